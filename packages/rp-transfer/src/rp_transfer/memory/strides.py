"""How tensors lie in memory: contiguous, as they are copied, and with strides, as layers see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Strides = tuple[int, ...]


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with each element once, in the order of memory: contiguous, unless the memory has gaps.

    >>> wide = torch.zeros(2, 3, 4).transpose(0, 2).expand(5, 4, 3, 2)
    >>> in_order(wide).shape, in_order(wide).is_contiguous()
    (torch.Size([1, 2, 3, 4]), True)
    """
    if tensor.is_contiguous():
        return tensor
    return _once(tensor).permute(_order(tensor))


def laid_out(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view of `memory`, which has the shape of ``in_order(like)``, with the shape of `like`.

    Its strides are those of `like`, if that has no gaps in its memory. Otherwise they are in the same order.
    """
    if like.is_contiguous():
        return memory if memory.stride() == like.stride() else memory.as_strided(like.shape, like.stride())
    order = _order(like)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    found = memory.permute(inverse).expand(like.shape)
    return strided(found, like.stride()) if _differs_by_ones(found, like.stride()) else found


def strided(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return a tensor with these values and strides: a view if its memory suffices, else a copy with gaps."""
    if tensor.stride() == tuple(strides):
        return tensor
    if _differs_by_ones(tensor, strides):
        return tensor.as_strided(tensor.shape, strides)
    # Some strides are 0, or windows that overlap: an element that several indices name is written once, or equal.
    found = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    _once(found).copy_(_like_once(tensor, found))
    return found


def gaps(tensors: Sequence[Any], held: Sequence[Any]) -> dict[int, Strides]:
    """Return the strides of those tensors, by position, whose copies in `held` have others, for want of gaps."""
    return {
        index: tensor.stride()
        for index, (tensor, copy) in enumerate(zip(tensors, held, strict=True))
        if isinstance(tensor, torch.Tensor) and tensor.stride() != copy.stride()
    }


def _differs_by_ones(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Return whether the strides differ only in dimensions of size 1, where they mean nothing."""
    return all(
        size == 1 or own == other for size, own, other in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view without the repetitions of expanded dimensions."""
    return _like_once(tensor, tensor)


def _like_once(tensor: torch.Tensor, expanded: torch.Tensor) -> torch.Tensor:
    """Return a view of `tensor` without what repeats in `expanded`."""
    for dim, (size, stride) in enumerate(zip(expanded.shape, expanded.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _order(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions by falling stride; expanded ones, of which memory has one, come first."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: (strides[dim] != 0, -strides[dim]))
