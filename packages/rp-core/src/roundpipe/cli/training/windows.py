"""Training sequences: windows of a text's bytes as tensors of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Windows:
    """All sequences of one length in a text, by their start; a token is a byte.

    >>> inputs, labels = Windows(b"abcdef", seq_len=2).at([0, 3])
    >>> bytes(inputs.flatten().tolist()), bytes(labels.flatten().tolist())
    (b'abde', b'bcef')
    """

    def __init__(self, text: bytes, seq_len: int) -> None:
        # A copy, since torch warns about read-only memory.
        self._tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._seq_len = seq_len

    def __len__(self) -> int:
        """Number of bytes in the text."""
        return len(self._tokens)

    def at(self, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and labels, which are shifted by one byte: each (sequences, seq_len) int64 on the host."""
        rows = torch.stack([self._tokens[start : start + self._seq_len + 1] for start in starts])
        tokens = rows.to(torch.int64)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
