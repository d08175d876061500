"""FP8 by rows: E4M3 numbers, and a power of two for each row, which products in FP8 read as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rp_packing.format import matrices, rows_and_columns
from rp_packing.layout import CodeLayout
from rp_packing.piecewise.threads import Scratch, each_piece
from rp_packing.piecewise.windows import window_for, windows
from rp_packing.rows import Rows, cast_rows, numbers_of


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows in E4M3 with a power of two each: 1 byte an element, 4 bytes a row.

    Codes are those that products in FP8 would cast the weight to, so linear layers that multiply so need not
    expand it.

    >>> Fp8Rows().specs((3, 200, 128))
    ((3, 200, 128), (3, 200), torch.float32)
    """

    name: str = "fp8-rows"

    def specs(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        """See `Format`."""
        rows_and_columns(shape, self.name)
        return tuple(shape), tuple(shape[:-1]), torch.float32

    def pack(self, weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """See `Format`."""
        source, target = matrices(weight), matrices(codes).view(torch.float8_e4m3fn)
        factors = scales.view(source.shape[:2])

        def pack(where: tuple[slice, slice], scratch: Scratch) -> None:
            part = source[where]
            numbers = scratch.take("numbers", part.shape, torch.float32).copy_(part)
            found = cast_rows(numbers)
            target[where], factors[where] = found.codes, found.scales.squeeze(-1)

        each_piece(windows(source.shape, 1, window_for(weight)), pack, weight)

    def expand(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """See `Format`."""
        source, target = matrices(codes).view(torch.float8_e4m3fn), matrices(out)
        factors = scales.view(source.shape[:2])

        def expand(where: tuple[slice, slice], scratch: Scratch) -> None:
            del scratch
            target[where] = numbers_of(Rows(source[where], factors[where].unsqueeze(-1)))

        each_piece(windows(source.shape, 1, window_for(out)), expand, codes)

    def layout(self, shape: Sequence[int]) -> CodeLayout:
        """See `Format`."""
        return CodeLayout("e4m3", 1, math.prod(shape[:-1]), shape[-1], block=(1, None))
