"""Split a tree into microbatches: views of its tensors and arrays, and the same objects for other leaves."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import torch

from rp_batch import tree
from rp_batch.arrays import is_array, split_array
from rp_batch.errors import FewerParts, SizeError, SplitError
from rp_batch.sizes import part_sizes, read_sizes
from rp_batch.spec import Parts, Ragged, Split, SplitRule, is_function
from rp_batch.splitting.functions import split_call, split_tree
from rp_batch.splitting.infer import Decided, SplitSubject, decide
from rp_batch.splitting.whole import refuse_indivisible

__all__ = ["split"]


def split(
    value: Any,
    parts: int,
    spec: Any = None,
    *,
    batch_size: int | None = None,
    sizes: Sequence[int] | None = None,
    exact: bool = False,
    name: str | None = None,
) -> Parts[Any]:
    """Split the arguments of a call, or the label of a call, into microbatches.

    >>> import torch
    >>> halves = split(((torch.arange(5),), {"scale": 2.0}), 2)
    >>> halves
    [((tensor([0, 1, 2]),), {'scale': 2.0}), ((tensor([3, 4]),), {'scale': 2.0})]
    >>> halves.sizes
    (3, 2)
    >>> split({"y": torch.arange(5)}, 2, sizes=halves.sizes)
    [{'y': tensor([0, 1, 2])}, {'y': tensor([3, 4])}]

    `value`: the pair (args, kwargs), split by the rules of `infer`; or any tree, whose tensors all count as
    positional. `spec`: a tree of specs over all or part of the value; or a function that takes
    (args, kwargs, parts) or (tree, parts) and returns the list of parts.

    If the batch is smaller than `parts`, or nothing is split, there are fewer parts, with the warning
    `FewerParts`. A value of type `Parts` sets the number of parts. With `exact`, any number but `parts` raises
    `SizeError`.

    NumPy's arrays are split as tensors are. With several parts, another object that has a length, or a tensor of
    the batch inside, raises `SplitError` unless a spec says `Replicate()`; strings and bytes go to every part.

    For a label, give the `batch_size` of its call, or the `sizes` of the call's parts. The label must have the
    same, is split into exactly `parts` parts, and is never mistaken for a pair (args, kwargs). `name`: the root of
    paths in errors.

    One part is the value itself, whatever the sizes of its tensors, unless there is a spec or it contains `Parts`:

    >>> split(((torch.zeros(4), torch.zeros(6)), {}), 1)
    [((tensor([0., 0., 0., 0.]), tensor([0., 0., 0., 0., 0., 0.])), {})]
    """
    _check_count(parts)
    if sizes is not None:
        sizes, batch_size = _agreeing(sizes, parts, batch_size)
    exact = exact or batch_size is not None
    is_call = not exact and name is None and _is_call(value)
    name = name or ("label" if exact else "tree")
    if is_function(spec):
        return _by_function(spec, value, parts, sizes, is_call=is_call, name=name)
    subject = SplitSubject.call(*value) if is_call else SplitSubject.named(value, name)
    if parts == 1 and spec is None and not any(isinstance(leaf, Parts) for leaf in subject.leaves):
        return Parts([value], sizes=sizes or _whole_size(subject, batch_size))
    decided = decide(subject, spec, batch_size=batch_size)
    chosen = _choose(subject, decided, parts, sizes, exact=exact)
    if len(chosen) > 1:
        refuse_indivisible(subject, decided)
    return Parts(_cut(subject, decided.rules, chosen), sizes=None if decided.batch_size is None else chosen)


def _whole_size(subject: SplitSubject, batch_size: int | None) -> tuple[int] | None:
    """Return the size of the only part; None if the tensors do not agree on it, or have none."""
    if batch_size is None:
        try:
            batch_size = decide(subject, None, batch_size=None).batch_size
        except SizeError:
            return None
    return None if batch_size is None else (batch_size,)


def _by_function(
    function: Callable[..., Any],
    value: Any,
    parts: int,
    sizes: tuple[int, ...] | None,
    *,
    is_call: bool,
    name: str,
) -> Parts[Any]:
    if not is_call:
        return split_tree(function, value, parts, sizes=sizes, name=name)
    args, kwargs = value
    return split_call(function, args, kwargs, parts)


def _check_count(parts: int) -> None:
    if type(parts) is not int or parts < 1:
        raise ValueError(f"the number of parts must be an integer of at least 1, but is {parts!r}")


def _agreeing(sizes: Sequence[int], parts: int, batch_size: int | None) -> tuple[tuple[int, ...], int]:
    """Validate `sizes`, and `batch_size` if given: the sizes of the parts and of the batch."""
    read = read_sizes(sizes, parts)
    if batch_size not in (None, sum(read)):
        raise ValueError(f"batch_size must be the sum of sizes {read}, but is {batch_size}; give one of them")
    return read, sum(read)


def _is_call(value: Any) -> bool:
    if type(value) is not tuple or len(cast("tuple[Any, ...]", value)) != 2:
        return False
    args, kwargs = cast("tuple[Any, Any]", value)
    return type(args) is tuple and type(kwargs) is dict and all(type(key) is str for key in cast("Any", kwargs))


# --- part sizes -----------------------------------------------------------------------------------------------


def _choose(
    subject: SplitSubject, decided: Decided, parts: int, sizes: Sequence[int] | None, *, exact: bool
) -> tuple[int, ...]:
    """Return the sizes of the parts. Leaves of type `Parts` take precedence over the number requested."""
    batch_size, apart = decided.batch_size, decided.apart
    wanted = None if sizes is None else tuple(sizes)
    count = _count(batch_size, parts, exact=exact) if apart.count is None else apart.count
    chosen = apart.sizes or wanted or part_sizes(batch_size or 0, count)
    starved = batch_size is not None and wanted is None and len(chosen) > 1 and 0 in chosen
    if starved or (exact and count != parts) or wanted not in (None, chosen):
        raise _indivisible(subject, parts, wanted, chosen)
    return chosen


def _count(batch_size: int | None, parts: int, *, exact: bool) -> int:
    """Return the number of parts, at most the number of samples in the batch."""
    fewer = max(1, min(parts, batch_size or 0))
    if exact and batch_size is None:
        return parts
    if fewer < parts and not exact:
        _warn(batch_size, parts, fewer)
    return fewer


def _indivisible(
    subject: SplitSubject, parts: int, wanted: tuple[int, ...] | None, chosen: tuple[int, ...]
) -> SizeError:
    of_sizes = "" if wanted is None else f" of sizes {wanted}"
    return SizeError(
        subject.roots[0],
        f"must split into {parts} parts{of_sizes}, none of them empty, but gives {len(chosen)} of sizes {chosen}; "
        "split it like the input, with a spec or a function (split_label)",
    )


def _warn(batch_size: int | None, parts: int, fewer: int) -> None:
    found = "nothing is split" if batch_size is None else f"the batch size is {batch_size}"
    warnings.warn(
        f"{parts} parts were requested, but {found}: there will be {fewer}. Request fewer, or give a spec "
        "(split_input) if another dimension is the batch",
        FewerParts,
        stacklevel=5,
    )


# --- cutting ----------------------------------------------------------------------------------------------------


def _cut(subject: SplitSubject, rules: list[SplitRule], sizes: tuple[int, ...]) -> list[Any]:
    # A tensor that two leaves share is shared in every part as well.
    views: dict[tuple[int, Split | Ragged], Sequence[Any]] = {}
    columns: list[Sequence[Any]] = []
    for index, (value, rule) in enumerate(zip(subject.leaves, rules, strict=True)):
        if isinstance(rule, Split | Ragged):
            key = (id(value), rule)
            cut = views.get(key)
            if cut is None:
                cut = views[key] = _cut_leaf(subject, index, rule, sizes)
            columns.append(cut)
        else:
            columns.append(value if rule is Parts else (value,) * len(sizes))
    rows = zip(*columns, strict=True) if columns else [()] * len(sizes)
    return [tree.unflatten(subject.treedef, row) for row in rows]


def _cut_leaf(subject: SplitSubject, index: int, rule: Split | Ragged, sizes: tuple[int, ...]) -> Sequence[Any]:
    if isinstance(rule, Ragged):
        bounds = accumulate(sizes, initial=0)
        places = [slice(start, stop) for start, stop in pairwise(bounds)]
        lengths = [sum(rule.counts[place]) for place in places]
        found = _views(subject, index, rule.dim, lengths)
        used = rule.counts if rule.used is None else rule.used
        return [part if any(used[place]) else None for part, place in zip(found, places, strict=True)]
    if rule.inner and rule.factor > 1:
        return _interleaved(subject.leaves[index], rule, sizes)
    return _views(subject, index, rule.dim, [size * rule.factor for size in sizes])


def _views(subject: SplitSubject, index: int, dim: int, lengths: list[int]) -> Sequence[Any]:
    value: Any = subject.leaves[index]
    if is_array(value):
        return split_array(value, lengths, dim)
    # The backward pass of tensor_split makes a full-size gradient per part; that of this one concatenates once.
    try:
        return torch.split_with_sizes(value, lengths, dim)
    except (RuntimeError, TypeError) as error:
        raise SplitError(
            subject.paths()[index],
            f"torch must be able to split it along dimension {dim}, but cannot split this "
            f"{type(value).__name__}: {_first_line(error)}; replicate it, or give a function as the spec",
        ) from error


def _interleaved(value: Any, rule: Split, sizes: tuple[int, ...]) -> Sequence[Any]:
    """Split the samples of each of `factor` rows that are folded into one dimension."""
    dim = rule.dim % value.ndim
    before, after = value.shape[:dim], value.shape[dim + 1 :]
    rows = value.reshape(*before, rule.factor, value.shape[dim] // rule.factor, *after)
    split = split_array if is_array(value) else torch.split_with_sizes
    parts: Sequence[Any] = split(rows, sizes, dim + 1)
    return [part.reshape(*before, -1, *after) for part in parts]


def _first_line(error: Exception) -> str:
    # torch appends pages about its registry; the full text is in the exception's cause.
    return str(error).partition("\n")[0]
