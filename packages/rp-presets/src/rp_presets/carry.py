"""What one layer of a language model hands to the next."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Carry(NamedTuple):
    """The hidden states, with all that every decoder layer reads beside them.

    Only `hidden_states` changes on the way; `advance` passes every other tensor on as the same object, by which
    an engine can tell that it need not be copied back from a device.

    >>> import torch
    >>> table = torch.ones(1, 3, 2)
    >>> carry = Carry(torch.zeros(4, 3, 8), (table, table), None, {"full_attention": None})
    >>> after = carry.advance(carry.hidden_states + 1)
    >>> after.position_embeddings[0] is table
    True

    Shapes:
        hidden_states: (batch, positions, hidden).
        position_embeddings: cosine and sine, each (batch, positions, head), or (1, positions, head) where all
            sequences have the same positions.
        position_ids: (batch, positions) or (1, positions) as the caller gave them; None where the positions
            count from 0, which spares the attention kernels a look for packed sequences.
        masks: by layer type; (batch, 1, positions, positions) or, for flash attention, (batch, positions).
            None where the attention kernel needs no mask.
    """

    hidden_states: Tensor
    position_embeddings: tuple[Tensor, Tensor]
    position_ids: Tensor | None
    masks: dict[str, Tensor | None]

    def advance(self, hidden_states: Tensor) -> Carry:
        """The same carry, with the hidden states that a layer made."""
        # Not `_replace`: compiled by torch 2.11, it returns an empty tuple.
        return Carry(hidden_states, self.position_embeddings, self.position_ids, self.masks)
