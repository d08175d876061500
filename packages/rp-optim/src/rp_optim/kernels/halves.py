"""An fp32 number in two halves of 16 bits, in torch operations: the bf16 weight and the remainder.

The weight is the number rounded to nearest, ties away from zero: half a unit is added to the magnitude. The
remainder is the number's lower 16 bits as an int16, so that both together are the number to the last bit.
With ties to even that is impossible: 65,537 numbers would round to 0x3f80, and 65,535 to 0x3f81. Signs, subnormals
and infinities are exact, even where the weight of a finite number is infinite. Every NaN becomes the same NaN.

The compiled kernels do the same, bit for bit.
"""

from __future__ import annotations

import torch

_HALF = 0x8000
_INFINITE = 0x7F800000
_NAN = 0x7FC0


def to_halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split fp32 numbers into weight (bf16) and remainder (int16), of the same shape.

    >>> weight, rest = to_halves(torch.tensor([1.0, 1 + 2**-8, 1 + 2**-20]))
    >>> weight.tolist(), rest.tolist()
    ([1.0, 1.0078125, 1.0], [0, -32768, 8])
    """
    bits = values.view(torch.int32)
    is_nan = (bits & 0x7FFFFFFF) > _INFINITE
    upper = ((bits + _HALF) >> 16).to(torch.int16).masked_fill_(is_nan, _NAN)
    return upper.view(torch.bfloat16), bits.to(torch.int16).masked_fill_(is_nan, 0)


def of_halves(weight: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Join the halves of `to_halves` to fp32 numbers.

    >>> of_halves(*to_halves(torch.tensor([0.1, -0.0]))).tolist() == torch.tensor([0.1, -0.0]).tolist()
    True
    """
    upper = weight.view(torch.int16).to(torch.int32) << 16
    return (upper + rest.to(torch.int32)).view(torch.float32)
