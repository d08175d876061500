"""Arrays of NumPy, which are split as tensors are, where NumPy is loaded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["concatenate", "has_dimensions", "is_array", "split_array"]


def is_array(value: object) -> bool:
    """Return whether a value is an array of NumPy. This does not import NumPy.

    >>> is_array([1, 2])
    False
    """
    # Without the module there is no array.
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def has_dimensions(value: Any) -> bool:
    """Return whether a value is a tensor or an array with at least one dimension."""
    return (isinstance(value, torch.Tensor) and value.ndim > 0) or (is_array(value) and bool(value.ndim))


def split_array(array: Any, sizes: Sequence[int], dim: int) -> list[Any]:
    """Return views of an array, of these sizes along one dimension."""
    before = (slice(None),) * (dim % array.ndim)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [array[(*before, slice(start, start + size))] for start, size in zip(starts, sizes, strict=True)]


def concatenate(arrays: Sequence[Any], dim: int) -> Any:
    """Return the arrays joined along one dimension."""
    return sys.modules["numpy"].concatenate(arrays, axis=dim)
