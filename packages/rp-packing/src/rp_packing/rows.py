"""FP8 codes with one scale for each row: the cast, and what it means."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

Kind = Literal["e4m3", "e5m2"]

DTYPES: dict[Kind, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# The largest number of both is 1.75 times a power of two: 448 = 1.75 * 2**8, and 57344 = 1.75 * 2**15.
EXPONENTS = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
# Added to the bits of a fp32 number, it carries into the exponent if the mantissa is above 1.75.
CARRY = 0x1FFFFF
_MANTISSA_BITS = 23
# Of a scale's exponent with that of its inverse.
_BOTH_EXPONENTS = 254


class Rows(NamedTuple):
    """A matrix in FP8. `codes`: (rows, columns). `scales`: (rows, 1), fp32; a number is code times scale."""

    codes: torch.Tensor
    scales: torch.Tensor


def cast_rows(numbers: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Rows:
    """Cast a matrix, (rows, columns), each row with the least power of two by which its largest number fits.

    >>> codes, scales = cast_rows(torch.tensor([[1.0, -448.0], [3.0, 897.0], [0.0, 0.0]]))
    >>> codes.float().tolist(), scales[:2].flatten().tolist()
    ([[1.0, -448.0], [0.75, 224.0], [0.0, 0.0]], [1.0, 4.0])

    Rounds to nearest, ties to even. With a power of two nothing else is rounded, so codes are the same bits
    whatever computes them, and a scale multiplies other numbers exactly. No scale is below 2**-126, fp32's least
    normal number. A row with a NaN or an infinity has NaN for all of its numbers. Plain operations of torch, which
    its compiler fuses with what makes the numbers.
    """
    return _cast(numbers, dtype, -1)


def cast_columns(numbers: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Rows:
    """Cast the transposed matrix, as `cast_rows` does: (rows, columns) to codes of (columns, rows).

    >>> cast_columns(torch.tensor([[1.0, 3.0], [-448.0, 897.0]])).codes.float().tolist()
    [[1.0, -448.0], [0.75, 224.0]]
    """
    codes, scales = _cast(numbers, dtype, 0)
    return Rows(codes.t().contiguous(), scales.t().contiguous())


def _cast(numbers: torch.Tensor, dtype: torch.dtype, dim: int) -> Rows:
    scales, inverse = _scales(numbers.abs().amax(dim, keepdim=True), dtype)
    # A power of two is exact in bfloat16, too: no fp32 copy of the numbers; fp16 has no room for all of them.
    numbers = numbers.float() if numbers.dtype == torch.float16 else numbers
    return Rows((numbers * inverse.to(numbers.dtype)).to(dtype), scales)


def _scales(largest: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale for each largest number, and its inverse; both in fp32."""
    sizes = largest.float()
    exponents = ((sizes.view(torch.int32) + CARRY) >> _MANTISSA_BITS) - EXPONENTS[dtype]
    exponents = exponents.clamp(min=1)
    is_finite = sizes < torch.inf
    return tuple(  # type: ignore[return-value]  # two
        torch.where(is_finite, (bits << _MANTISSA_BITS).view(torch.float32), torch.nan)
        for bits in (exponents, _BOTH_EXPONENTS - exponents)
    )


def numbers_of(rows: Rows) -> torch.Tensor:
    """Return the numbers that codes and scales mean, in fp32: (rows, columns).

    >>> numbers_of(cast_rows(torch.tensor([[3.0, 897.0]]))).tolist()
    [[3.0, 896.0]]
    """
    return rows.codes.float() * rows.scales
