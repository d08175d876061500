"""MXFP4: E2M1 numbers in 4 bits, and a power of two for every 32 elements of a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rp_packing.format import matrices, rows_and_columns, table
from rp_packing.layout import CodeLayout
from rp_packing.piecewise.lookup import pair_lookup
from rp_packing.piecewise.threads import Scratch, each_piece
from rp_packing.piecewise.windows import window_for, windows

BLOCK = 32
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGNED = (*_VALUES, *(-value for value in _VALUES))
_PAIRS = tuple(_SIGNED[nibble] for byte in range(256) for nibble in (byte & 15, byte >> 4))
_POWERS = (*(2.0 ** (byte - 127) for byte in range(255)), math.nan)
_BIAS = 127
# The exponent of 4.0, which is that of the largest values.
_MOST_EXPONENT = 2


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """The OCP's microscaling format (MX v1.0, 2023), as GPT-OSS is published: 0.53125 bytes an element.

    `transposed`: blocks go along the last dimension but one, as in weights of GPT-OSS that are (experts, in, out);
    its files have them as (experts, out, in / 32, 16). A byte holds two codes, the first in its low half.

    >>> Mxfp4().specs((3, 50, 64)), Mxfp4(transposed=True).specs((3, 64, 50))[0]
    (((3, 50, 2, 16), (3, 50, 2), torch.uint8), (3, 50, 2, 16))
    """

    name: str = "mxfp4"
    transposed: bool = False

    def specs(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        """See `Format`."""
        rows, columns = rows_and_columns(shape, self.name)
        if self.transposed:
            rows, columns = columns, rows
        if columns % BLOCK:
            raise ValueError(
                f"mxfp4 packs {BLOCK} elements of a row, but a weight of shape {tuple(shape)} has rows of "
                f"{columns}; use another format for it"
            )
        scales = (*shape[:-2], rows, columns // BLOCK)
        return (*scales, BLOCK // 2), scales, torch.uint8

    def pack(self, weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """See `Format`. Rounds to nearest, ties to even, and to 6 times the scale at most."""
        source = self._rows(matrices(weight))
        bytes_, powers = matrices(codes.flatten(-2)), matrices(scales)
        lookup = pair_lookup(_nearest, weight.device, first_is_high=False)

        def pack(where: tuple[slice, slice], scratch: Scratch) -> None:
            numbers = scratch.take("numbers", source[where].shape, torch.float32).copy_(source[where])
            numbers = numbers.view(*powers[where].shape, BLOCK)
            sizes = torch.abs(numbers, out=scratch.take("sizes", numbers.shape, torch.float32))
            exponent = torch.frexp(sizes.amax(-1)).exponent - 1 - _MOST_EXPONENT
            powers[where] = (exponent + _BIAS).clamp(0, 254).to(torch.uint8)
            numbers.div_(_power(powers[where]).unsqueeze(-1))
            bytes_[where] = lookup(numbers.view(-1), scratch).view(bytes_[where].shape)

        each_piece(windows(source.shape, 1, window_for(weight)), pack, weight)

    def expand(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """See `Format`."""
        target = self._rows(matrices(out))
        bytes_, powers = matrices(codes.flatten(-2)), matrices(scales)
        pairs = table(_PAIRS, 2, codes).view(torch.int64).view(-1)

        def expand(where: tuple[slice, slice], scratch: Scratch) -> None:
            part = bytes_[where]
            index = scratch.take("index", part.shape, torch.int32).copy_(part).view(-1)
            chosen = scratch.take("pairs", index.shape, torch.int64)
            numbers = torch.index_select(pairs, 0, index, out=chosen).view(torch.float32)
            numbers = numbers.view(*powers[where].shape, BLOCK).mul_(_power(powers[where]).unsqueeze(-1))
            target[where] = numbers.flatten(-2)

        each_piece(windows(target.shape, 1, window_for(out)), expand, codes)

    def layout(self, shape: Sequence[int]) -> CodeLayout:
        """See `Format`."""
        if not self.transposed:
            # Rows are whole blocks, so the weight can be treated as one row.
            return CodeLayout("first_low", 1, 1, math.prod(shape), block=(1, BLOCK), values=_SIGNED)
        number, length, lines = math.prod(shape[:-2]), *shape[-2:]
        return CodeLayout("first_low", number, lines, length, block=(1, BLOCK), values=_SIGNED, is_transposed=True)

    def _rows(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.transpose(-1, -2) if self.transposed else weight


def _nearest(scaled: torch.Tensor) -> torch.Tensor:
    """Return the nearest codes; of two equally near ones, the even one."""
    size = scaled.abs()
    # Numbers are 0.5 apart up to 2, then 1 up to 4, then 2.
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    nearest = (size / step).round() * step
    values = table(_VALUES, 1, scaled).view(-1)
    codes = torch.bucketize(nearest.clamp(max=_VALUES[-1]).contiguous(), values)
    return torch.where(scaled < 0, codes | 8, codes).to(torch.uint8)


def _power(bytes_: torch.Tensor) -> torch.Tensor:
    powers = table(_POWERS, 1, bytes_).view(-1)
    return powers.index_select(0, bytes_.reshape(-1).int()).view(bytes_.shape)
