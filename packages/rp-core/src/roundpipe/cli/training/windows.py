"""Sequences of bytes as tensors of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Windows:
    """The sequences of one length in a text; a token is a byte.

    >>> inputs, labels = Windows(b"abcdef", seq_len=2).at([0, 3])
    >>> bytes(inputs.flatten().tolist()), bytes(labels.flatten().tolist())
    (b'abde', b'bcef')
    """

    def __init__(self, text: bytes, seq_len: int) -> None:
        # A copy, since torch warns of memory that it may not write.
        self._tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._seq_len = seq_len

    def __len__(self) -> int:
        """Bytes of the whole text."""
        return len(self._tokens)

    def at(self, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and, one byte later, labels: (sequences, seq_len) int64 on the host."""
        rows = torch.stack([self._tokens[start : start + self._seq_len + 1] for start in starts])
        tokens = rows.to(torch.int64)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
