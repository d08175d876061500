"""FP8: E4M3 numbers, and one fp32 scale for each block of 128 rows and 128 columns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from rp_packing.format import blocks, matrices, rows_and_columns
from rp_packing.layout import CodeLayout
from rp_packing.piecewise.threads import Scratch, each_piece
from rp_packing.piecewise.windows import window_for, windows

BLOCK = 128
_DTYPE = torch.float8_e4m3fn
_MOST = torch.finfo(_DTYPE).max


@dataclass(frozen=True, slots=True)
class Fp8Tiles:
    """Blocks of 128 by 128 in E4M3, as DeepSeek-V3 and Qwen3 are published: 1 byte an element.

    Those checkpoints call the scales ``weight_scale_inv``: an element is its code times the scale. At the ends of
    a weight blocks may be smaller.

    >>> Fp8Tiles().specs((3, 200, 128))
    ((3, 200, 128), (3, 2, 1), torch.float32)
    """

    name: str = "fp8"

    def specs(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        """See `Format`."""
        rows, columns = rows_and_columns(shape, self.name)
        return tuple(shape), (*shape[:-2], blocks(rows, BLOCK), blocks(columns, BLOCK)), torch.float32

    def pack(self, weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """See `Format`."""
        source, target, factors = matrices(weight), matrices(codes).view(_DTYPE), matrices(scales)

        def pack(where: tuple[slice, slice], scratch: Scratch) -> None:
            number, rows = where
            part = source[where]
            numbers = scratch.take("numbers", part.shape, torch.float32).copy_(part)
            sizes = torch.abs(numbers, out=scratch.take("sizes", part.shape, torch.float32))
            factor = _most(sizes) / _MOST
            factors[number, _blocks(rows)] = factor.where(factor > 0, 1.0)
            for some, theirs in _by_blocks(numbers, factors[number, _blocks(rows)]):
                some.div_(theirs)
            target[where] = numbers.clamp_(-_MOST, _MOST)

        each_piece(windows(source.shape, BLOCK, window_for(weight)), pack, weight)

    def expand(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """See `Format`."""
        source, target, factors = matrices(codes), matrices(out), matrices(scales)

        def expand(where: tuple[slice, slice], scratch: Scratch) -> None:
            number, rows = where
            numbers = _numbers(source[where], scratch)
            for some, theirs in _by_blocks(numbers, factors[number, _blocks(rows)]):
                some.mul_(theirs)
            target[where] = numbers

        each_piece(windows(source.shape, BLOCK, window_for(out)), expand, codes)

    def layout(self, shape: Sequence[int]) -> CodeLayout:
        """See `Format`."""
        return CodeLayout("e4m3", math.prod(shape[:-2]), *shape[-2:], block=(BLOCK, BLOCK))


def _numbers(codes: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """Return the codes' numbers, as torch converts them; on the host by a table, which is ten times as fast."""
    numbers = scratch.take("numbers", codes.shape, torch.float32)
    if codes.device.type != "cpu" or type(codes) is not torch.Tensor:
        return numbers.copy_(codes.view(_DTYPE))
    index = scratch.take("index", codes.shape, torch.int32).copy_(codes)
    torch.index_select(_all_numbers(), 0, index.view(-1), out=numbers.view(-1))
    return numbers


@cache
def _all_numbers() -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.arange(256, dtype=torch.uint8, device="cpu").view(_DTYPE).float()


def _blocks(rows: slice) -> slice:
    return slice(rows.start // BLOCK, blocks(rows.stop, BLOCK))


def _most(sizes: torch.Tensor) -> torch.Tensor:
    """Return the largest number of each block: (number, blocks of rows, blocks of columns)."""
    return _most_in_a_row(_most_in_a_row(sizes).transpose(-1, -2)).transpose(-1, -2)


def _most_in_a_row(sizes: torch.Tensor) -> torch.Tensor:
    # Padded with zeros to the end of the last block.
    lacking = -sizes.shape[-1] % BLOCK
    whole = torch.nn.functional.pad(sizes, (0, lacking)) if lacking else sizes
    return whole.reshape(*sizes.shape[:-1], -1, BLOCK).amax(-1)


def _by_blocks(numbers: torch.Tensor, factors: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield views of the numbers, and the factors to broadcast over each."""
    columns = numbers.shape[-1]
    wide = factors.repeat_interleave(BLOCK, -2)[:, : numbers.shape[-2]]
    count = columns // BLOCK
    yield numbers[..., : count * BLOCK].unflatten(-1, (count, BLOCK)), wide[..., :count].unsqueeze(-1)
    if columns % BLOCK:
        yield numbers[..., count * BLOCK :], wide[..., count:]
