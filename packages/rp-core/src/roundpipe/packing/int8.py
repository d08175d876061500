"""int8: each row of a weight as whole numbers from -127 to 127, times one fp32 scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from roundpipe.packing.format import matrices, rows_and_columns, windows

_MOST = 127


@dataclass(frozen=True, slots=True)
class Int8:
    """Rows in 8 bits, as LLM.int8 has weights (Dettmers et al., 2022): 1 byte an element, 4 bytes a row.

    >>> codes, scales = torch.empty(1, 2, dtype=torch.uint8), torch.empty(1)
    >>> Int8().pack(torch.tensor([[-2.0, 1.0]]), codes, scales)
    >>> codes.view(torch.int8), Int8().expand(codes, scales, out := torch.empty(1, 2)), out
    (tensor([[-127,   64]], dtype=torch.int8), None, tensor([[-2.0000,  1.0079]]))
    """

    name: str = "int8"

    def specs(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        """See `Format`."""
        rows_and_columns(shape, self.name)
        return tuple(shape), tuple(shape[:-1]), torch.float32

    def pack(self, weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """See `Format`."""
        source, target = matrices(weight), matrices(codes)
        factors = scales.view(source.shape[:2])
        for where in windows(source.shape, 1):
            part: torch.Tensor = source[where].float()
            factor = part.abs().amax(-1) / _MOST
            factors[where] = factor.where(factor > 0, 1.0)
            rounded = (part / factors[where].unsqueeze(-1)).round().clamp(-_MOST, _MOST)
            target[where] = rounded.to(torch.int8).view(torch.uint8)

    def expand(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """See `Format`."""
        source, target = matrices(codes).view(torch.int8), matrices(out)
        factors = scales.view(source.shape[:2])
        for where in windows(source.shape, 1):
            target[where] = source[where].float() * factors[where].unsqueeze(-1)
