"""Small state in torch operations: bf16 with stochastic rounding, and 8 bits with a scale for each 32 elements.

The 8-bit format follows FlashOptim (Gonzalez Ortiz et al., 2026, arXiv 2602.23349): second moments as square
roots, numbers with a sign companded by ``2x / (1 + |x|)``, each group divided by its largest element. Four things
differ. Rounding is stochastic, so that an average over many steps does not stall. Scales are bf16, rounded up.
Only zero becomes zero, so that no step divides by a second moment that rounding lost. Adam's first moment is
stored in units of the root of its second moment, by which a step divides it. So small elements in a group with
large ones keep their precision.

The compiled kernels do the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

StateKind = Literal["fp32", "bf16", "8bit"]
KINDS: tuple[StateKind, ...] = ("fp32", "bf16", "8bit")

GROUP = 32
"""Elements that share a scale."""

_MASK = 0xFFFFFFFF
_ROOTS, _SIGNED = 255.0, 127.0
# The fp32 number just below 1 / 255, so that no stored root exceeds the scale. Otherwise the scale would grow each
# time the roots are stored again.
_UNIT = float.fromhex("0x1.0101p-8")
# The bits of the smallest normal and the largest bf16 number, and of a NaN.
_LEAST, _MOST, _NAN = 0x0080, 0x7F7F, 0x7FC0
_INFINITE = 0x7F800000


@dataclass(frozen=True, slots=True)
class Noise:
    """Random numbers that depend only on a key and an element's index, never on the process's generators.

    >>> noise = Noise.of(step=3, parameter=0)
    >>> noise.draws(2, 2, 0).equal(noise.draws(0, 4, 0)[2:])
    True
    """

    key: tuple[int, int]

    @classmethod
    def of(cls, step: int, parameter: int) -> Noise:
        """Return the noise of a parameter (its index in the optimizer) in a step."""
        # SplitMix64 (Steele et al., 2014) mixes both into 64 bits.
        x = ((step << 32) + parameter + 0x9E3779B97F4A7C15) & (2**64 - 1)
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        x ^= x >> 31
        return cls((x & _MASK, x >> 32))

    def draws(self, first: int, count: int, array: int) -> torch.Tensor:
        """Draw int64 numbers in [0, 65536) for elements from `first` on. `array`: which of three state tensors."""
        index = torch.arange(first, first + count, dtype=torch.int64, device="cpu")
        x = (self.key[0] + (index & _MASK) + (index >> 32) * 0x9E3779B1) & _MASK
        x = x ^ (x >> 16)
        x = (x * 0x7FEB352D) & _MASK
        x = x ^ (x >> 15) ^ self.key[1]
        x = (x * 0x846CA68B) & _MASK
        x = x ^ (x >> 16)
        if array == 0:
            return x & 0xFFFF
        return (x if array == 1 else (x * 0x9E3779B1) & _MASK) >> 16


# Draws numbers in [0, 65536): draw(first element, number of elements, which of three state tensors).
Draw = Callable[[int, int, int], torch.Tensor]


def nearest(first: int, count: int, array: int) -> torch.Tensor:
    """Round to nearest, for conversions; use it in place of `Noise.draws`."""
    del first, array
    return torch.full((count,), 1 << 15, dtype=torch.int64, device="cpu")


def num_groups(count: int) -> int:
    """Return the number of scales for `count` elements.

    >>> num_groups(33)
    2
    """
    return -(-count // GROUP)


def exact_sqrt(values: torch.Tensor) -> torch.Tensor:
    """Return correctly rounded square roots; torch's may be off by the last bit."""
    return values.double().sqrt().to(values.dtype)


# bf16


def to_bfloat16(values: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Round fp32 numbers to bf16, up or down by `draws`, exact on average. Finite numbers stay finite.

    >>> halfway = torch.full((2,), 1 + 2**-8)
    >>> to_bfloat16(halfway, torch.tensor([0, 65535]))
    tensor([1.0000, 1.0078], dtype=torch.bfloat16)
    """
    bits = values.view(torch.int32).to(torch.int64) & _MASK
    size = bits & 0x7FFFFFFF
    rounded = ((bits + draws) & _MASK) >> 16
    most = ((bits >> 16) & 0x8000) | _MOST
    rounded = torch.where((size < _INFINITE) & ((rounded & 0x7FFF) > _MOST), most, rounded)
    return _bfloat16(torch.where(size > _INFINITE, (bits >> 16) | 0x40, rounded))


def _bfloat16(bits: torch.Tensor) -> torch.Tensor:
    """Make bf16 numbers from their bits in int64."""
    return (bits - ((bits >> 15) << 16)).to(torch.int16).view(torch.bfloat16)


# 8 bits


def _grouped(values: torch.Tensor) -> torch.Tensor:
    """Reshape (n,) to (groups, GROUP), padded with zeros."""
    fill = num_groups(values.numel()) * GROUP - values.numel()
    return torch.nn.functional.pad(values, (0, fill)).view(-1, GROUP)


def _scales(groups: torch.Tensor) -> torch.Tensor:
    """Return each group's largest magnitude, rounded up to normal bf16; 0 for zeros, NaN if not finite."""
    sizes = groups.view(torch.int32).to(torch.int64) & 0x7FFFFFFF
    top = sizes.amax(-1)
    up = ((top + 0xFFFF) >> 16).clamp(_LEAST, _MOST)
    return _bfloat16(torch.where(top >= _INFINITE, _NAN, torch.where(top == 0, 0, up)))


def _per_scale(number: float, scales: torch.Tensor) -> torch.Tensor:
    wide = scales.float()
    # Torch computes number / tensor as a product with the reciprocal, which is rounded twice.
    return torch.where(wide == 0, wide, torch.tensor(number).div(wide))[:, None]


def pack_roots(squares: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Store square roots: (n,) fp32 to codes (n,) uint8 and scales (groups,) bf16.

    Rounds so that the stored squares are exact on average. Only 0 becomes 0. A group with a number that is
    negative or not finite becomes NaN.

    >>> codes, scales = pack_roots(torch.tensor([4.0, 1.0, 0.0]), nearest(0, 3, 0))
    >>> codes.tolist(), scales.tolist(), unpack_roots(codes, scales).square()
    ([255, 127, 0], [2.0], tensor([4.0000, 0.9922, 0.0000]))
    """
    groups = _grouped(exact_sqrt(squares))
    scales = _scales(groups)
    at = groups * _per_scale(_ROOTS, scales)
    at = torch.where(at <= _ROOTS, at, _ROOTS)
    below = at.floor()
    draw = _grouped(draws.float() * 2.0**-16)
    code = below + ((at - below) * (at + below) > draw * (below + below + 1.0))
    code = torch.where(groups == 0, 0.0, code.clamp(min=1.0))
    return code.view(-1)[: squares.numel()].to(torch.uint8), scales


def unpack_roots(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the square roots that `pack_roots` stored, (n,) fp32."""
    unit = scales.float() * _UNIT
    return (_grouped(codes.float()) * unit[:, None]).view(-1)[: codes.numel()]


def pack_signed(values: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Store numbers with a sign: (n,) fp32 to codes (n,) int8 and scales (groups,) bf16.

    A group with a number that is not finite becomes NaN.

    >>> codes, scales = pack_signed(torch.tensor([2.0, -1.0, 0.0]), nearest(0, 3, 0))
    >>> codes.tolist(), scales.tolist(), unpack_signed(codes, scales)
    ([127, -85, 0], [2.0], tensor([ 2.0000, -1.0059,  0.0000]))
    """
    groups = _grouped(values)
    scales = _scales(groups)
    part = groups * _per_scale(1.0, scales)
    at = (part * (2 * _SIGNED)) / (1.0 + part.abs())
    at = torch.where(at >= -_SIGNED, at, -_SIGNED)
    code = (at + 128.0) + _grouped(draws.float() * 2.0**-16)
    code = torch.where(code < 255.0, code, 255.0).to(torch.int16) - 128
    return code.view(-1)[: values.numel()].to(torch.int8), scales


def unpack_signed(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers that `pack_signed` stored, (n,) fp32."""
    code = _grouped(codes.float())
    return (code / (2 * _SIGNED - code.abs()) * scales.float()[:, None]).view(-1)[: codes.numel()]
