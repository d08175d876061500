"""How far two tensors are apart, row by row, relative to their size."""

from __future__ import annotations

import math

import torch

__all__ = ["distance"]

# Rows are compared in pieces of about so many elements, so that large outputs need little memory more.
_PIECE_ELEMENTS = 1 << 22


def distance(whole: torch.Tensor, other: torch.Tensor, dim: int | None = None) -> float:
    """Return how far two tensors are apart: 0 for equal ones, infinity for those that cannot be compared.

    >>> distance(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[3.0, 4.5], [0.0, 0.0]]), dim=0)
    0.1

    For floating-point tensors it is the largest norm of a row's difference, relative to the row's norm, or to that
    of an average row where this one is smaller. `dim`: the dimension of rows; None: all is one row. For others it
    is the largest fraction of a row's elements that differ. NaN and infinities must be at the same places.
    """
    if (whole.shape, whole.dtype, whole.layout) != (other.shape, other.dtype, other.layout) or whole.is_nested:
        return math.inf
    if whole.layout is not torch.strided:
        return distance(whole.to_dense(), other.to_dense(), dim)
    if not whole.numel():
        return 0.0
    rows, others = _rows(whole.detach(), dim), _rows(other.detach(), dim)
    count = max(1, _PIECE_ELEMENTS // rows.shape[1])
    pieces = zip(torch.split(rows, count), torch.split(others, count), strict=True)
    if not (whole.is_floating_point() or whole.is_complex()):
        return max(float((one != two).double().mean(1).max()) for one, two in pieces)
    return _relative([_norms(one, two) for one, two in pieces])


def _rows(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    return tensor.reshape(1, -1) if dim is None else tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)


def _norms(one: torch.Tensor, two: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norms of each row's difference and of each row."""
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, two = one.to(wide), two.to(wide)
    equal = (one == two) | ((one != one) & (two != two))
    difference = torch.where(equal, 0, one - two).abs()
    size = torch.where(one.isfinite(), one, 0).abs()
    # A place where only one of them is finite is infinitely far off.
    difference = torch.where(difference.isnan(), math.inf, difference)
    return difference.square().sum(1).sqrt(), size.square().sum(1).sqrt()


def _relative(norms: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    differences, sizes = (torch.cat(column) for column in zip(*norms, strict=True))
    if not differences.any():
        return 0.0
    least = sizes.square().mean().sqrt()
    # If the whole is 0 everywhere, an equal row would be 0 / 0, and a NaN is larger than nothing.
    return float(torch.where(differences == 0, 0, differences / sizes.clamp_min(float(least))).max())
