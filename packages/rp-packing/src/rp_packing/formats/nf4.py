"""NF4: 4-bit codes for quantiles of the normal distribution, and one fp32 scale for each 64 elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from rp_packing.format import blocks, table
from rp_packing.layout import CodeLayout
from rp_packing.piecewise.lookup import pair_lookup
from rp_packing.piecewise.threads import Scratch, each_piece
from rp_packing.piecewise.windows import stretches, window_for

BLOCK = 64
# With bitsandbytes' digits.
VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_MIDDLES = tuple((one + other) / 2 for one, other in pairwise(VALUES))
_PAIRS = tuple(VALUES[nibble] for byte in range(256) for nibble in (byte >> 4, byte & 15))


@dataclass(frozen=True, slots=True)
class Nf4:
    """QLoRA's 4-bit format (Dettmers et al., 2023), with the bytes of bitsandbytes: 0.5625 bytes an element.

    Blocks are 64 elements in the order of memory, whatever the weight's shape. A byte holds two codes, the first
    in its high half. The scale is the block's largest absolute value.

    >>> Nf4().specs((3, 50))
    ((75,), (3,), torch.float32)
    """

    name: str = "nf4"

    def specs(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        """See `Format`."""
        numel = math.prod(shape)
        return (blocks(numel, 2),), (blocks(numel, BLOCK),), torch.float32

    def pack(self, weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """See `Format`."""
        flat = weight.view(-1)
        lookup = pair_lookup(_nearest, weight.device, first_is_high=True)

        def pack(piece: slice, scratch: Scratch) -> None:
            factors, target = scales[_blocks(piece)], codes[_bytes(piece)]
            numbers = _in_blocks(flat[piece], scratch)
            sizes = torch.abs(numbers, out=scratch.take("sizes", numbers.shape, torch.float32))
            torch.amax(sizes, 1, out=factors)
            numbers.div_(factors.where(factors > 0, 1.0).unsqueeze(1))
            target.copy_(lookup(numbers.view(-1), scratch)[: target.numel()])

        each_piece(_pieces(flat), pack, weight)

    def expand(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """See `Format`."""
        flat = out.view(-1)
        pairs = table(_PAIRS, 2, codes).view(torch.int64).view(-1)

        def expand(piece: slice, scratch: Scratch) -> None:
            factors, bytes_ = scales[_blocks(piece)], codes[_bytes(piece)]
            index = scratch.take("index", bytes_.shape, torch.int32).copy_(bytes_)
            # In whole blocks: numbers beyond the end are arbitrary.
            chosen = scratch.take("pairs", (factors.numel() * BLOCK // 2,), torch.int64)
            torch.index_select(pairs, 0, index, out=chosen[: index.numel()])
            numbers = chosen.view(torch.float32).view(-1, BLOCK).mul_(factors.unsqueeze(1))
            target = flat[piece]
            target.copy_(numbers.view(-1)[: target.numel()])

        each_piece(_pieces(flat), expand, codes)

    def layout(self, shape: Sequence[int]) -> CodeLayout:
        """See `Format`."""
        return CodeLayout("first_high", 1, 1, math.prod(shape), block=(1, BLOCK), values=VALUES)


def _pieces(flat: torch.Tensor) -> list[slice]:
    return stretches(flat.numel(), BLOCK, window_for(flat))


def _blocks(piece: slice) -> slice:
    return slice(piece.start // BLOCK, blocks(piece.stop, BLOCK))


def _bytes(piece: slice) -> slice:
    return slice(piece.start // 2, blocks(piece.stop, 2))


def _in_blocks(part: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """Return these numbers in fp32, padded with zeros to the end of the last block."""
    numbers = scratch.take("numbers", (blocks(part.numel(), BLOCK), BLOCK), torch.float32)
    flat = numbers.view(-1)
    flat[: part.numel()].copy_(part)
    flat[part.numel() :].zero_()
    return numbers


def _nearest(scaled: torch.Tensor) -> torch.Tensor:
    """Return the code of the nearest value; of two equally near ones, the smaller."""
    return torch.bucketize(scaled, table(_MIDDLES, 1, scaled).view(-1)).to(torch.uint8)
