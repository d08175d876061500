"""int8: each row of a weight as integers from -127 to 127, times one fp32 scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rp_packing.format import matrices, rows_and_columns
from rp_packing.layout import CodeLayout
from rp_packing.piecewise.threads import Scratch, each_piece
from rp_packing.piecewise.windows import window_for, windows

_MOST = 127


@dataclass(frozen=True, slots=True)
class Int8:
    """Rows in 8 bits, as LLM.int8 stores weights (Dettmers et al., 2022): 1 byte an element, 4 bytes a row.

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
        source, target = matrices(weight), matrices(codes).view(torch.int8)
        factors = scales.view(source.shape[:2])

        def pack(where: tuple[slice, slice], scratch: Scratch) -> None:
            part = source[where]
            numbers = scratch.take("numbers", part.shape, torch.float32).copy_(part)
            sizes = torch.abs(numbers, out=scratch.take("sizes", part.shape, torch.float32))
            factor = sizes.amax(-1) / _MOST
            factors[where] = factor.where(factor > 0, 1.0)
            target[where] = numbers.div_(factors[where].unsqueeze(-1)).round_().clamp_(-_MOST, _MOST)

        each_piece(windows(source.shape, 1, window_for(weight)), pack, weight)

    def expand(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """See `Format`."""
        source, target = matrices(codes).view(torch.int8), matrices(out)
        factors = scales.view(source.shape[:2])

        def expand(where: tuple[slice, slice], scratch: Scratch) -> None:
            part = source[where]
            numbers = scratch.take("numbers", part.shape, torch.float32).copy_(part)
            target[where] = numbers.mul_(factors[where].unsqueeze(-1))

        each_piece(windows(source.shape, 1, window_for(out)), expand, codes)

    def layout(self, shape: Sequence[int]) -> CodeLayout:
        """See `Format`."""
        return CodeLayout("int8", 1, math.prod(shape[:-1]), shape[-1], block=(1, None))
