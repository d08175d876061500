"""Whether two values of any type are the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

__all__ = ["same"]


def same(left: Any, right: Any) -> bool:
    """Compare values of any type: tensors and arrays as a whole, NaN as equal to NaN.

    >>> same(float("nan"), float("nan")), same(torch.ones(2), torch.ones(3)), same(1, True)
    (True, False, False)

    Values that cannot be compared are the same only if they are one object.
    """
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return _same_tensors(left, right)
    if isinstance(left, Mapping):
        return _same_mappings(cast("Mapping[Any, Any]", left), right)
    if isinstance(left, (list, tuple)):
        return _same_sequences(cast("Sequence[Any]", left), right)
    return _same_objects(left, right)


def _same_tensors(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device:
        return False
    # A NaN is the only value that differs from itself.
    return bool(((left == right) | ((left != left) & (right != right))).all())


def _same_mappings(left: Mapping[Any, Any], right: Mapping[Any, Any]) -> bool:
    return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)


def _same_sequences(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(same, left, right))


def _same_objects(left: Any, right: Any) -> bool:
    try:
        return _truth(left == right) or _truth((left != left) & (right != right))
    except Exception:  # an `==` of any class may raise anything: then nothing says that they are the same
        return False


def _truth(answer: Any) -> bool:
    # numpy's arrays answer element by element.
    return bool(answer.all()) if hasattr(answer, "all") else bool(answer)
