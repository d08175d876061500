"""Combine the values that the parts have at one leaf by a merge rule."""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from functools import reduce
from numbers import Number
from reprlib import Repr
from typing import Any

import torch

from rp_batch.arrays import concatenate, has_dimensions, is_array
from rp_batch.same import differing, same
from rp_batch.spec import Concat, Equal, First, Mean, MergeRule, Parts, Reduce, Sum

__all__ = ["Misfit", "brief", "combine", "default_rule", "suits"]

# Longer values are shortened in messages.
_MESSAGE_ELEMENTS = 8
_repr = Repr()
_repr.maxstring = _repr.maxother = 80
_ADVICE = "give another spec (merge_output)"


class Misfit(Exception):
    """Values that a rule cannot merge. Internal: `merge`, which knows the path, raises a MergeError from it."""


def combine(
    rule: MergeRule, values: Sequence[Any], weights: Sequence[int], sizes: Sequence[int] | None = None
) -> Any:
    """Merge `values`, one per part, by `rule`. `weights`: one per part, used by means. `sizes`: if known."""
    match rule:
        case Concat(inner=True):
            return _interleave(rule, values, sizes)
        case Concat():
            return _concatenate(rule, values)
        case Sum():
            return _sum(rule, values)
        case Mean():
            return _mean(rule, values, weights)
        case First():
            return values[0]
        case Equal():
            return _equal(values)
        case Reduce():
            return reduce(rule.function, values, _copied(rule.initial))
        case _:
            return Parts(values)


_CONCAT = Concat(0)
_MEAN = Mean()
_EQUAL = Equal()


def default_rule(value: Any) -> MergeRule:
    """Return the rule for a leaf without a spec."""
    if isinstance(value, torch.Tensor):
        return _CONCAT if value.dim() > 0 else _MEAN
    return _EQUAL


def suits(rule: MergeRule, value: Any) -> bool:
    """Return whether a rule for a whole node applies to this leaf. If not, the leaf gets its default rule."""
    if isinstance(rule, Concat):
        return has_dimensions(value)
    if isinstance(rule, (Sum, Mean)):
        return isinstance(value, torch.Tensor) or _is_number(value)
    return True


def _concatenate(rule: Concat, values: Sequence[Any]) -> Any:
    if all(map(is_array, values)):
        return _concatenate_arrays(rule, values)
    try:
        return torch.cat(tuple(values), rule.dim) if len(values) > 1 else _single(rule, values)
    except (RuntimeError, IndexError, TypeError) as error:
        _all_tensors(rule, values)
        if _can_concatenate(rule, values):
            raise  # for example out of memory
        raise _unlike(rule, values) from error


def _concatenate_arrays(rule: Concat, values: Sequence[Any]) -> Any:
    if not _can_concatenate(rule, values):
        raise _unlike(rule, values)
    return concatenate(values, rule.dim) if len(values) > 1 else values[0]


def _unlike(rule: Concat, values: Sequence[Any]) -> Misfit:
    return Misfit(
        f"{rule} needs parts with the same device and other dimensions, but found {_shapes(values)}; "
        "give a spec or a function (merge_output), or keep the parts as a list with Parts"
    )


def _interleave(rule: Concat, values: Sequence[Any], sizes: Sequence[int] | None) -> Any:
    """Concatenate the samples of each row: each part's dimension is (rows, samples) folded into one."""
    if sizes is None:
        raise Misfit(f"{rule} needs the sizes of the microbatches, but they are unknown; {_ADVICE}")
    if not all(map(is_array, values)):
        _all_tensors(rule, values)
    try:
        dim = rule.dim % values[0].ndim
        before, after = values[0].shape[:dim], values[0].shape[dim + 1 :]
        rows = [value.reshape(*before, -1, size, *after) for value, size in zip(values, sizes, strict=True)]
        return _concatenate(Concat(dim + 1), rows).reshape(*before, -1, *after)
    except (RuntimeError, ValueError, IndexError, ZeroDivisionError, Misfit) as error:
        raise Misfit(
            f"{rule} needs parts with as many rows of samples each and the same other dimensions, but found "
            f"{_shapes(values)} for the sizes {tuple(sizes)}; {_ADVICE}"
        ) from error


def _single(rule: Concat, values: Sequence[Any]) -> torch.Tensor:
    """Return the only value, not copied. It must pass the same checks as several values."""
    _all_tensors(rule, values)
    if not _can_concatenate(rule, values):
        raise IndexError(f"there is no dimension {rule.dim}")
    return values[0]


def _can_concatenate(rule: Concat, values: Sequence[Any]) -> bool:
    first = values[0]
    if not -first.ndim <= rule.dim < first.ndim or any(value.ndim != first.ndim for value in values):
        return False
    dim = rule.dim % first.ndim
    return len({(_device(value), value.shape[:dim], value.shape[dim + 1 :]) for value in values}) == 1


def _device(value: Any) -> torch.device | None:
    return value.device if isinstance(value, torch.Tensor) else None


def _sum(rule: Sum, values: Sequence[Any]) -> Any:
    if not isinstance(values[0], torch.Tensor):
        return sum(_all_numbers(rule, values))
    _all_alike(rule, values)
    if _is_exact(values[0]):
        return reduce(operator.add, [value.long() if value.dtype is torch.bool else value for value in values])
    return _weighted(values, (1,) * len(values)).to(values[0].dtype)


def _mean(rule: Mean, values: Sequence[Any], weights: Sequence[int]) -> Any:
    first = values[0]
    if not isinstance(first, torch.Tensor):
        return sum(map(operator.mul, _all_numbers(rule, values), weights)) / sum(weights)
    if all(value is first for value in values):
        return first
    _all_alike(rule, values)
    narrow = torch.get_default_dtype() if _is_exact(first) else first.dtype
    return (_weighted(values, weights) / sum(weights)).to(narrow)


def _weighted(values: Sequence[torch.Tensor], weights: Sequence[int]) -> torch.Tensor:
    """Return the weighted sum in double precision, so that order and sizes of the parts do not change it."""
    wide = torch.complex128 if values[0].is_complex() else torch.float64
    # Skip parts of size 0: their mean is NaN, and 0 * NaN is NaN.
    terms = (value.to(wide) * weight for value, weight in zip(values, weights, strict=True) if weight)
    return reduce(operator.add, terms)


def _equal(values: Sequence[Any]) -> Any:
    first = values[0]
    for index, value in enumerate(values):
        if value is not first and not same(first, value):
            raise Misfit(
                f"the parts must be equal here, but part 0 has {brief(first)} and part {index} has {brief(value)}"
                f"{_first_difference(first, value)}; give a spec (merge_output) for it, for example First() "
                "or Parts"
            )
    return first


def _copied(initial: Any) -> Any:
    return initial.clone() if isinstance(initial, torch.Tensor) else copy.deepcopy(initial)


# --- checks of values ------------------------------------------------------------------------------------------


def _is_exact(value: torch.Tensor) -> bool:
    return not (value.dtype.is_floating_point or value.dtype.is_complex)


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Number)


def _all_tensors(rule: MergeRule, values: Sequence[Any]) -> None:
    for index, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            raise Misfit(
                f"{rule} needs tensors, but part {index} has {brief(value)}; give another spec (merge_output)"
            )


def _all_alike(rule: MergeRule, values: Sequence[Any]) -> None:
    _all_tensors(rule, values)
    first = values[0]
    if any((value.shape, value.dtype) != (first.shape, first.dtype) for value in values):
        raise Misfit(f"{rule} needs parts of the same shape and dtype, but found {_shapes(values)}; {_ADVICE}")


def _all_numbers(rule: MergeRule, values: Sequence[Any]) -> Sequence[Any]:
    for index, value in enumerate(values):
        if not _is_number(value):
            raise Misfit(
                f"{rule} needs tensors in all parts, or numbers, but part {index} has {brief(value)}; {_ADVICE}"
            )
    return values


def _shapes(values: Sequence[Any]) -> str:
    several = len(set(map(_device, values))) > 1
    return ", ".join(
        f"{tuple(value.shape)} {value.dtype}{f' on {_device(value)}' if several else ''}".replace("torch.", "")
        for value in values
    )


def brief(value: Any) -> str:
    """Return a short text for a value, for error messages."""
    if isinstance(value, torch.Tensor) and value.numel() > _MESSAGE_ELEMENTS:
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return _repr.repr(value)


def _first_difference(left: Any, right: Any) -> str:
    """Describe the first different element of two tensors of the same kind that are too large to show; else ""."""
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return ""
    places = differing(left, right)
    if places is None or left.numel() <= _MESSAGE_ELEMENTS:
        return ""
    first = tuple(map(int, places.nonzero()[0]))
    return f", first at {list(first)}: {left[first]} and {right[first]}"
