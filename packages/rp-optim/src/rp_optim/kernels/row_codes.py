"""FP8 codes of bf16 weights, with a scale a row, in torch operations: the same bits as of the compiled kernels."""

from __future__ import annotations

import torch

# The largest number of E4M3 is 448 = 1.75 * 2**8.
_EXPONENT = 8
# Added to the bits of an fp32 number, it carries into the exponent if the mantissa is above 1.75.
_CARRY = 0x1FFFFF
_MANTISSA_BITS = 23
# Of a scale's exponent with that of its inverse.
_BOTH_EXPONENTS = 254
_NAN = 0x7F
# Elements worked on at a time.
_PIECE = 1 << 18


def code_rows(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Write the codes and the scales of a bf16 matrix, (rows, columns).

    >>> codes, scales = torch.empty(1, 2, dtype=torch.float8_e4m3fn), torch.empty(1, 1)
    >>> code_rows(torch.tensor([[3.0, 900.0]]).bfloat16(), codes, scales)
    >>> codes.float().tolist(), scales.tolist()
    ([[0.75, 224.0]], [[4.0]])
    """
    step = max(_PIECE // max(weight.shape[1], 1), 1)
    for begin in range(0, len(weight), step):
        part = slice(begin, begin + step)
        _code(weight[part], codes[part], scales[part])


def _code(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    largest = weight.abs().amax(1, keepdim=True).float()
    exponents = ((largest.view(torch.int32) + _CARRY) >> _MANTISSA_BITS) - _EXPONENT
    exponents = exponents.clamp(min=1)
    is_finite = largest < torch.inf
    scales.copy_(torch.where(is_finite, _power(exponents), torch.nan))
    # A power of two is exact in bf16, too.
    codes.copy_(weight * _power(_BOTH_EXPONENTS - exponents).bfloat16())
    codes.view(torch.uint8).masked_fill_(~is_finite, _NAN)


def _power(exponents: torch.Tensor) -> torch.Tensor:
    return (exponents << _MANTISSA_BITS).view(torch.float32)
