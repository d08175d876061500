"""Sums in the order of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which blocks of `dtype` are added: fp64 for fp64, else fp32.

    >>> sum_dtype(torch.bfloat16), sum_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def add_in_order(parts: Sequence[Tensor], out: Tensor, scratch: Tensor) -> None:
    """Write the sum of `parts`, added from the first to the last, to `out`.

    `out` may be one of the parts. `scratch`: (2, >= numel), of the sum's dtype, overwritten.

    >>> out = torch.empty(2)
    >>> add_in_order([torch.ones(2, dtype=torch.bfloat16)] * 3, out, torch.empty(2, 2))
    >>> out
    tensor([3., 3.])
    """
    is_later_part = any(part.data_ptr() == out.data_ptr() for part in parts[1:])
    total = scratch[0, : out.numel()] if is_later_part or out.dtype != scratch.dtype else out
    rest = parts[1:]
    if rest and parts[0].dtype == parts[1].dtype == total.dtype:
        torch.add(parts[0], parts[1], out=total)
        rest = parts[2:]
    elif total.data_ptr() != parts[0].data_ptr():
        total.copy_(parts[0])
    for part in rest:
        total.add_(_widened(part, scratch[1, : out.numel()]))
    if total is not out:
        out.copy_(total)


def _widened(part: Tensor, wide: Tensor) -> Tensor:
    """Return the part in the sum's dtype. Casting first is twice as fast as adding tensors of two dtypes."""
    return part if part.dtype == wide.dtype else wide.copy_(part)
