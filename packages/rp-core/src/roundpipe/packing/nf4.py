"""NF4: 4-bit codes for quantiles of the normal distribution, and one fp32 scale for each 64 elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from roundpipe.packing.format import WINDOW, blocks, table

BLOCK = 64
# In bitsandbytes' digits.
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
_WINDOW_BLOCKS = WINDOW // BLOCK


@dataclass(frozen=True, slots=True)
class Nf4:
    """QLoRA's 4-bit format (Dettmers et al., 2023), in the bytes of bitsandbytes: 0.5625 bytes an element.

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
        middles = table(_MIDDLES, 1, weight).view(-1)
        for first in range(0, scales.numel(), _WINDOW_BLOCKS):
            part = flat[first * BLOCK : (first + _WINDOW_BLOCKS) * BLOCK].float()
            padded = part.new_zeros(blocks(part.numel(), BLOCK), BLOCK)
            padded.view(-1)[: part.numel()] = part
            most = padded.abs().amax(1)
            scales[first : first + most.numel()] = most
            scaled = padded / most.where(most > 0, 1.0).unsqueeze(1)
            pairs = torch.bucketize(scaled, middles).to(torch.uint8).view(-1, 2)
            target = codes[first * BLOCK // 2 :][: blocks(part.numel(), 2)]
            target.copy_((pairs[:, 0] << 4 | pairs[:, 1])[: target.numel()])

    def expand(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """See `Format`."""
        flat = out.view(-1)
        pairs = table(_PAIRS, 2, codes)
        for first in range(0, scales.numel(), _WINDOW_BLOCKS):
            target = flat[first * BLOCK : (first + _WINDOW_BLOCKS) * BLOCK]
            bytes_ = codes[first * BLOCK // 2 :][: blocks(target.numel(), 2)]
            values = pairs.index_select(0, bytes_.int()).view(-1)[: target.numel()]
            target.copy_(values.mul_(_spread(scales[first : first + _WINDOW_BLOCKS], target.numel())))


def _spread(scales: torch.Tensor, numel: int) -> torch.Tensor:
    return scales.repeat_interleave(BLOCK)[:numel]
