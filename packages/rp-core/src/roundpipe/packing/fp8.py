"""FP8: E4M3 numbers, and one fp32 scale for each block of 128 rows and 128 columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from roundpipe.packing.format import blocks, matrices, rows_and_columns, windows

BLOCK = 128
_DTYPE = torch.float8_e4m3fn
_MOST = torch.finfo(_DTYPE).max


@dataclass(frozen=True, slots=True)
class Fp8:
    """Blocks of 128 by 128 in E4M3, as DeepSeek-V3 and Qwen3 are published: 1 byte an element.

    The scales are what those checkpoints call ``weight_scale_inv``: an element is its code times the scale. At the
    ends of a weight blocks may be smaller.

    >>> Fp8().specs((3, 200, 128))
    ((3, 200, 128), (3, 2, 1), torch.float32)
    """

    name: str = "fp8"

    def specs(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        """See `Format`."""
        rows, columns = rows_and_columns(shape, self.name)
        return tuple(shape), (*shape[:-2], blocks(rows, BLOCK), blocks(columns, BLOCK)), torch.float32

    def pack(self, weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """See `Format`."""
        source, target, factors = matrices(weight), matrices(codes), matrices(scales)
        for number, rows in windows(source.shape, BLOCK):
            part = source[number, rows].float()
            factor = _most(part) / _MOST
            factors[number, _blocks(rows)] = factor.where(factor > 0, 1.0)
            scaled = part / _spread(factors[number, _blocks(rows)], part)
            target[number, rows] = scaled.clamp(-_MOST, _MOST).to(_DTYPE).view(torch.uint8)

    def expand(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """See `Format`."""
        source, target, factors = matrices(codes).view(_DTYPE), matrices(out), matrices(scales)
        for number, rows in windows(source.shape, BLOCK):
            part = source[number, rows].float()
            target[number, rows] = part.mul_(_spread(factors[number, _blocks(rows)], part))


def _blocks(rows: slice) -> slice:
    return slice(rows.start // BLOCK, blocks(rows.stop, BLOCK))


def _most(part: torch.Tensor) -> torch.Tensor:
    """The largest absolute value of each block: (number, blocks of rows, blocks of columns)."""
    rows, columns = blocks(part.shape[1], BLOCK) * BLOCK, blocks(part.shape[2], BLOCK) * BLOCK
    padded = part.new_zeros(part.shape[0], rows, columns)
    padded[:, : part.shape[1], : part.shape[2]] = part.abs()
    return padded.view(part.shape[0], rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).amax((2, 4))


def _spread(factors: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Each block's scale at all its elements."""
    wide = factors.repeat_interleave(BLOCK, -1)[..., : part.shape[-1]]
    return wide.repeat_interleave(BLOCK, -2)[:, : part.shape[-2]]
