"""Add a 16-bit gradient to a `GradientPair` in place, in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rp_optim.checks import is_plain
from rp_optim.errors import InvalidParameter
from rp_optim.kernels.kernel import kernel_for
from rp_optim.kernels.updates import Spot
from rp_optim.pair import GradientPair

_DTYPES = (torch.bfloat16, torch.float16)


@torch.no_grad()
def add_to_pair(pair: GradientPair, addend: torch.Tensor) -> None:
    """Add a gradient to a pair: ``first`` becomes the rounded sum, and ``second`` its rounding error.

    Adds in fp32. Two bf16 numbers hold 16 significant bits of the sum, so the relative error of storing it is at
    most 2^-17; for two fp16 numbers it is 2^-22, or the spacing of their subnormals, 2^-24, if that is more. A sum
    beyond the dtype's range becomes infinite. The whole pass, which moves 10 bytes per parameter, releases the
    GIL.

    >>> pair = GradientPair(torch.ones(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16))
    >>> add_to_pair(pair, torch.full((1,), 2**-10, dtype=torch.bfloat16))
    >>> pair.first, pair.second, pair.sum()
    (tensor([1.], dtype=torch.bfloat16), tensor([0.0010], dtype=torch.bfloat16), tensor([1.0010]))

    Shapes: all three have the same number of elements; contiguous, on the host, all bf16 or all fp16.

    Raises `InvalidParameter` otherwise.
    """
    tensors = (pair.first, pair.second, addend)
    _check(tensors)
    spot = Spot(pair.first, addend, None, 1.0, pair.second)
    kernel_for(spot).add_to_pair(spot)


def _check(tensors: Sequence[torch.Tensor]) -> None:
    first = tensors[0]
    if first.dtype not in _DTYPES or any(tensor.dtype != first.dtype for tensor in tensors):
        raise InvalidParameter(
            "add_to_pair needs three tensors of bf16 or three of fp16, but has "
            f"{', '.join(str(tensor.dtype) for tensor in tensors)}"
        )
    if any(tensor.numel() != first.numel() for tensor in tensors):
        raise InvalidParameter(
            "add_to_pair needs three tensors of one size, but has "
            f"{', '.join(str(tensor.numel()) for tensor in tensors)} elements"
        )
    if not all(tensor.is_cpu and tensor.layout == torch.strided and is_plain(tensor) for tensor in tensors):
        raise InvalidParameter("add_to_pair needs contiguous tensors on the host; call .cpu().contiguous()")
