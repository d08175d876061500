"""Sums in the order of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What blocks of a dtype are added in: fp32, or fp64 for fp64.

    >>> sum_dtype(torch.bfloat16), sum_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def add_in_order(parts: Sequence[Tensor], out: Tensor, spare: Tensor) -> None:
    """Write the sum of `parts`, added from the first to the last, to `out`.

    `out` may be one of the parts. `spare`: (2, >= numel), memory of the sum's dtype; its content is lost.

    >>> out = torch.empty(2)
    >>> add_in_order([torch.ones(2, dtype=torch.bfloat16)] * 3, out, torch.empty(2, 2))
    >>> out
    tensor([3., 3.])
    """
    is_later_part = any(part.data_ptr() == out.data_ptr() for part in parts[1:])
    total = spare[0, : out.numel()] if is_later_part or out.dtype != spare.dtype else out
    if total.data_ptr() != parts[0].data_ptr():
        total.copy_(parts[0])
    for part in parts[1:]:
        total.add_(_widened(part, spare[1, : out.numel()]))
    if total is not out:
        out.copy_(total)


def _widened(part: Tensor, wide: Tensor) -> Tensor:
    """The part in the sum's dtype. Two operations of one dtype each are twice as fast as one of two."""
    return part if part.dtype == wide.dtype else wide.copy_(part)
