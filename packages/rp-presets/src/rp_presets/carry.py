"""The tuple of tensors that each layer passes to the next."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Carry(NamedTuple):
    """The hidden states, and the tensors that all decoder layers read.

    Only `hidden_states` changes between layers; `advance` passes all other tensors on as the same objects, so that
    an engine can see that they need not be copied back from a device.

    >>> import torch
    >>> table = torch.ones(1, 3, 2)
    >>> carry = Carry(torch.zeros(4, 3, 8), (table, table), None, {"full_attention": None})
    >>> after = carry.advance(carry.hidden_states + 1)
    >>> after.position_embeddings[0] is table
    True

    Shapes:
        hidden_states: (batch, positions, hidden).
        position_embeddings: cosine and sine, each (batch, positions, head), or (1, positions, head) if all
            sequences have the same positions.
        position_ids: (batch, positions) or (1, positions) as the caller gave them; None if the positions count
            from 0, so that the attention kernels need not check for packed sequences.
        masks: by layer type; (batch, 1, positions, positions) or, for flash attention, (batch, positions).
            None if the attention kernel needs no mask.
    """

    hidden_states: Tensor
    position_embeddings: tuple[Tensor, Tensor]
    position_ids: Tensor | None
    masks: dict[str, Tensor | None]

    def advance(self, hidden_states: Tensor) -> Carry:
        """A copy with other hidden states; all other tensors are the same objects."""
        # `_replace` returns an empty tuple when compiled by torch 2.11.
        return Carry(hidden_states, self.position_embeddings, self.position_ids, self.masks)
