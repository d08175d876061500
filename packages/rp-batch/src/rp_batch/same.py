"""Compare two values of any type, with NaN equal to NaN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

__all__ = ["are_same", "differing", "same"]


def same(left: Any, right: Any) -> bool:
    """Return whether two values of any type are equal: tensors and arrays as a whole, NaN equal to NaN.

    >>> same(float("nan"), float("nan")), same(torch.ones(2), torch.ones(3)), same(1, True)
    (True, False, False)

    Values that cannot be compared are equal only if they are the same object.
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


def are_same(values: Sequence[Any]) -> bool:
    """Return whether all these values are equal, as `Equal()` asks of what the parts have at one place.

    >>> are_same([torch.ones(2), torch.ones(2)]), are_same([1, 2])
    (True, False)
    """
    return all(value is values[0] or same(values[0], value) for value in values)


def differing(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """Return the elementwise difference of two tensors as a mask; None if they cannot be compared.

    >>> differing(torch.tensor([1.0, torch.nan]), torch.tensor([2.0, torch.nan]))
    tensor([ True, False])
    """
    if not (_is_plain(left) and _is_plain(right)):
        return None
    if (left.shape, left.dtype, left.device) != (right.shape, right.dtype, right.device):
        return None
    # Only NaN differs from itself.
    return (left != right) & ((left == left) | (right == right))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor supports `!=`: sparse, nested and meta tensors do not."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def _same_tensors(left: torch.Tensor, right: torch.Tensor) -> bool:
    places = differing(left, right)
    return places is not None and not bool(places.any())


def _same_mappings(left: Mapping[Any, Any], right: Mapping[Any, Any]) -> bool:
    return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)


def _same_sequences(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(same, left, right))


def _same_objects(left: Any, right: Any) -> bool:
    try:
        return _truth(left == right) or _truth((left != left) & (right != right))
    except Exception:  # a user's `==` may raise anything; the values then count as different
        return False


def _truth(answer: Any) -> bool:
    # numpy arrays compare elementwise.
    return bool(answer.all()) if hasattr(answer, "all") else bool(answer)
