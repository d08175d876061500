"""Infer the batch size and the split rule of each leaf."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch

from rp_batch import spec as specs
from rp_batch import tree
from rp_batch.arrays import has_dimensions, is_array
from rp_batch.errors import SizeError, SpecError
from rp_batch.place import Rules, place
from rp_batch.sizes import read_batch_size
from rp_batch.spec import Parts, Ragged, Replicate, Split, SplitRule

__all__ = ["Inferred", "Why", "infer"]


class Why(Enum):
    """Why a leaf is split or replicated.

    >>> import torch, rp_batch
    >>> rp_batch.infer((torch.zeros(4), 0.5)).reasons["args[1]"]
    <Why.OBJECT: 'not a tensor'>
    """

    SPEC = "the spec says so"
    BATCH = "its leading dimension is the batch"
    BROADCAST = "a leading 1 is broadcast over the batch"
    OTHER = "its leading dimension is not the batch"
    SCALAR = "a tensor without dimensions"
    OBJECT = "not a tensor"
    APART = "it is in parts already"


@dataclass(frozen=True, slots=True)
class Inferred:
    """How the arguments of a call are split: the result of `infer`.

    `spec`: the pair (args, kwargs) with each leaf replaced by its spec. `batch_size`: None if no leaf is split.
    `reasons`: the reason for each spec, by the path of the leaf.
    """

    spec: Any
    batch_size: int | None
    reasons: Mapping[str, Why]


def infer(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    spec: Any = None,
    batch_size: int | None = None,
) -> Inferred:
    """Report how `split` would split the arguments of a call, and why.

    >>> import torch
    >>> result = infer((), {"ids": torch.zeros(8, 5), "mask": torch.zeros(8, 5), "table": torch.zeros(5, 5)})
    >>> result.batch_size
    8
    >>> result.spec
    ((), {'ids': Split(dim=0), 'mask': Split(dim=0), 'table': Replicate()})
    >>> result.reasons["kwargs['table']"].value
    'its leading dimension is not the batch'

    Positional tensors set the batch size and must agree on it. If there are none, the batch size is the leading
    dimension that most keyword tensors share. If the batch is larger than 1, a leading dimension of 1 is a
    broadcast. `batch_size`, and `spec` for the leaves it covers, take precedence over both rules.
    """
    _check_args(args)
    subject = SplitSubject.call(args, dict(kwargs or {}))
    decided = decide(subject, spec, batch_size=batch_size)
    reasons = dict(zip(subject.paths(), decided.reasons, strict=True))
    return Inferred(tree.unflatten(subject.treedef, decided.rules), decided.batch_size, reasons)


def _check_args(args: object) -> None:
    if not isinstance(args, (tuple, list)):
        raise TypeError(
            f"args must be a tuple of positional arguments, but is a {type(args).__name__}; write (x,)"
        )


@dataclass(frozen=True, slots=True)
class SplitSubject:
    """A flattened tree to split.

    `leading`: the leading dimension of each leaf, None if it has none. `positional`: how many leaves, from the
    first on, must agree on the batch size. `roots`: the name of the tree in error paths; two names for the pair
    (args, kwargs).
    """

    value: Any
    leaves: list[Any]
    leading: list[int | None]
    treedef: tree.TreeDef
    positional: int
    roots: tuple[str, ...]

    @staticmethod
    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitSubject:
        """Flatten the arguments of a call."""
        leaves, treedef = tree.flatten_named((args, kwargs), "args", "kwargs")
        return SplitSubject(
            (args, kwargs),
            leaves,
            list(map(_leading, leaves)),
            treedef,
            tree.leaf_count(treedef, 0),
            ("args", "kwargs"),
        )

    @staticmethod
    def named(value: Any, name: str) -> SplitSubject:
        """Flatten any tree. All its leaves count as positional."""
        leaves, treedef = tree.flatten_named(value, name)
        return SplitSubject(value, leaves, list(map(_leading, leaves)), treedef, len(leaves), (name,))

    def paths(self) -> list[str]:
        """Return the path of each leaf, as the caller would write it in Python."""
        if len(self.roots) == 1:
            return tree.paths_of(self.treedef, self.roots[0])
        return tree.paths_below(self.treedef, self.roots)

    def place(self, spec: Any) -> Rules:
        """Return the split rule that a spec gives each leaf; None for the default rule."""
        if spec is None:
            return [None] * len(self.leaves)
        if len(self.roots) == 1:
            return place(spec, self.value, self.roots[0])
        halves = zip(_pair(spec), self.value, self.roots, strict=True)
        return [rule for half, value, root in halves for rule in place(half, value, root)]


def _pair(spec: Any) -> tuple[Any, Any]:
    """Divide the spec for a call into the specs for args and for kwargs."""
    if specs.split_rule(spec, "spec") is not None:
        return spec, spec
    items = tuple(cast("Iterable[Any]", spec)) if isinstance(spec, (tuple, list)) else ()
    if len(items) == 2:
        return items
    raise SpecError(
        "spec", f"must be a pair (spec for args, spec for kwargs), but is {spec!r}; write None for either"
    )


@dataclass(frozen=True, slots=True)
class Decided:
    """How a tree is split: a rule and a reason for each leaf, the batch size, and the existing parts."""

    rules: list[SplitRule]
    reasons: list[Why]
    batch_size: int | None
    apart: Apart


@dataclass(frozen=True, slots=True)
class Apart:
    """The number and sizes of the parts in leaves of type `Parts`, which are in parts already; None if unknown."""

    count: int | None = None
    sizes: tuple[int, ...] | None = None


def decide(subject: SplitSubject, spec: Any, *, batch_size: int | None) -> Decided:
    """Choose the rule of each leaf: the rule of its spec, or else the default rule."""
    rules = subject.place(spec)
    batch = _Batch(subject, batch_size)
    apart = _read_parts(subject, rules, batch)
    _measure(subject, rules, batch)
    if batch.size is None:
        _vote(subject, rules, batch)
    chosen = [_rule_for(rule, index, batch) for index, rule in enumerate(rules)]
    return Decided([rule for rule, _ in chosen], [why for _, why in chosen], batch.size, apart)


class _Batch:
    """The batch size of a tree, once known, and the leaf that set it."""

    def __init__(self, subject: SplitSubject, size: int | None) -> None:
        self.subject = subject
        self.size = read_batch_size(size)
        self._source: int | None = None

    def agree(self, size: int, index: int) -> None:
        """Set the batch size from a leaf, or raise `SizeError` if it is already known to be another."""
        if self.size is None:
            self.size, self._source = size, index
        elif size != self.size:
            raise self._differs(size, index)

    def _differs(self, size: int, index: int) -> SizeError:
        paths = self.subject.paths()
        leaf = self.subject.leaves[index]
        source = "the input" if self._source is None else paths[self._source]
        found = (
            f"its shape is {tuple(_shape(leaf))}"
            if has_dimensions(leaf)
            else f"the sizes of its parts add up to {size}"
        )
        return SizeError(
            paths[index],
            f"must have the batch size {self.size} of {source}, but {found}; make them agree, or give a spec "
            "(split_input, split_label) that says which leaves are split and which are replicated",
        )


# --- leaves that are Parts ------------------------------------------------------------------------------------


def _read_parts(subject: SplitSubject, rules: Rules, batch: _Batch) -> Apart:
    """Read the number of parts, and their sizes if known, from leaves of type `Parts`."""
    apart = Apart()
    for index, value in enumerate(subject.leaves):
        if isinstance(value, Parts):
            if not isinstance(rules[index], Replicate):
                rules[index] = Parts
                apart = _agreed(apart, cast("Parts[Any]", value), subject, index, batch)
        elif rules[index] is Parts:
            raise SpecError(
                subject.paths()[index],
                "must be a value of type Parts for the spec Parts, but is not; use Split or Replicate",
            )
    return apart


def _agreed(apart: Apart, parts: Parts[Any], subject: SplitSubject, index: int, batch: _Batch) -> Apart:
    sizes = sizes_of(parts)
    found = Apart(len(parts), apart.sizes if sizes is None else sizes)
    if apart.count not in (None, found.count) or apart.sizes not in (None, found.sizes) or not parts:
        wanted = "at least one part" if not parts else f"{apart.count} parts of sizes {apart.sizes}"
        raise SizeError(
            subject.paths()[index],
            f"must hold {wanted}, like the Parts before it, but holds {len(parts)} of sizes {sizes}",
        )
    if sizes is not None:
        batch.agree(sum(sizes), index)
    return found


def sizes_of(parts: Parts[Any]) -> tuple[int, ...] | None:
    """`parts.sizes`, or else the sizes inferred from the tensors; None if they cannot be inferred."""
    if parts.sizes is not None:
        return parts.sizes
    sizes = [_size_of(part) for part in parts]
    return None if None in sizes else tuple(cast("list[int]", sizes))


def _size_of(part: Any) -> int | None:
    """Return the batch size of one part; None if its tensors are ambiguous."""
    leaves, _ = tree.flatten(part)
    sizes = {size for size in map(_leading, leaves) if size is not None}
    certain = sizes - {1} or sizes
    return certain.pop() if len(certain) == 1 else None


# --- leaves that the spec splits --------------------------------------------------------------------------------


def _measure(subject: SplitSubject, rules: Rules, batch: _Batch) -> None:
    """Set the batch size from the leaves that the spec splits."""
    for index, rule in enumerate(rules):
        if isinstance(rule, Split | Ragged):
            batch.agree(_length(subject, rule, index), index)


def _length(subject: SplitSubject, rule: Split | Ragged, index: int) -> int:
    """Return the number of samples in a leaf."""
    value = subject.leaves[index]
    if not (isinstance(value, torch.Tensor) or is_array(value)):
        raise SpecError(
            subject.paths()[index],
            f"must be a tensor or an array for {rule}, but is a {type(value).__name__}; replicate it instead",
        )
    if not -value.ndim <= rule.dim < value.ndim:
        raise SpecError(
            subject.paths()[index],
            f"must have the dimension of {rule}, but its shape is {tuple(_shape(value))}; correct the dimension",
        )
    entries = value.shape[rule.dim]
    if isinstance(rule, Ragged):
        return _checked_counts(subject, rule, index, entries)
    if entries % rule.factor:
        raise SizeError(
            subject.paths()[index],
            f"must have {rule.factor} entries for each sample along dimension {rule.dim}, for {rule}, but its "
            f"shape is {tuple(_shape(value))}; correct the factor",
        )
    return entries // rule.factor


def _checked_counts(subject: SplitSubject, rule: Ragged, index: int, entries: int) -> int:
    if sum(rule.counts) != entries:
        raise SizeError(
            subject.paths()[index],
            f"must have the entries that its Ragged counts, {sum(rule.counts)}, along dimension {rule.dim}, but "
            f"its shape is {tuple(_shape(subject.leaves[index]))}; correct the counts",
        )
    return len(rule.counts)


# --- the default rules ------------------------------------------------------------------------------------------


def _vote(subject: SplitSubject, rules: Rules, batch: _Batch) -> None:
    """Infer the batch size from tensors without a spec: positional ones, or keyword ones if there are none."""
    sizes = {size for rule, size in zip(rules, subject.leading, strict=True) if rule is None} - {None}
    if len(sizes) == 1:  # the common case: all agree
        batch.size = sizes.pop()
        return
    leading = {
        index: size
        for index, (rule, size) in enumerate(zip(rules, subject.leading, strict=True))
        if rule is None and size is not None
    }
    positional = {index: size for index, size in leading.items() if index < subject.positional}
    if positional:
        _agree_all(positional, batch)
    elif leading:
        batch.size = _most_shared(subject, leading)


def _agree_all(leading: Mapping[int, int], batch: _Batch) -> None:
    larger = {index: size for index, size in leading.items() if size != 1}
    for index, size in (larger or leading).items():
        batch.agree(size, index)


def _most_shared(subject: SplitSubject, leading: Mapping[int, int]) -> int:
    votes = Counter(leading.values())
    ones = votes.pop(1, 0)
    if not votes:
        return 1
    (size, most), *others = votes.most_common(2)
    if others and others[0][1] == most:
        raise _tie(subject, leading, size, others[0][0])
    # The size may be a sequence length, with a batch of one: positions (128,) with ids (1, 128). But ids (8, 8)
    # with positions (1, 8) are a batch of 8, unless most tensors have a leading 1.
    is_square = _is_inside(subject, leading, size, first=size)
    if ones + (not is_square) > most and _is_inside(subject, leading, size, first=1):
        raise _tie(subject, leading, size, 1)
    return size


def _is_inside(subject: SplitSubject, leading: Mapping[int, int], size: int, *, first: int) -> bool:
    """Return whether a tensor with the leading dimension `first` has another dimension of this size."""
    return any(size in _shape(subject.leaves[index])[1:] for index in leading if leading[index] == first)


def _tie(subject: SplitSubject, leading: Mapping[int, int], size: int, other: int) -> SizeError:
    paths = subject.paths()
    first, second = (next(index for index in leading if leading[index] == found) for found in (size, other))
    shape, other_shape = (tuple(_shape(subject.leaves[index])) for index in (first, second))
    return SizeError(
        paths[first],
        f"the batch size is ambiguous: {size} from its shape {shape}, or {other} from {paths[second]} of shape "
        f"{other_shape}; give a spec (split_input): Split(0) for tensors that have the batch dimension, "
        "Replicate() for the others",
    )


_SPLIT = Split(0)
_REPLICATE = Replicate()


def _rule_for(rule: SplitRule | None, index: int, batch: _Batch) -> tuple[SplitRule, Why]:
    """Return the rule for one leaf, and the reason for it."""
    if rule is not None:
        return rule, Why.APART if rule is Parts else Why.SPEC
    size = batch.subject.leading[index]
    if size is None:
        leaf = batch.subject.leaves[index]
        is_scalar = isinstance(leaf, torch.Tensor) or is_array(leaf)
        return _REPLICATE, Why.SCALAR if is_scalar else Why.OBJECT
    if size == batch.size:
        return _SPLIT, Why.BATCH
    if size == 1:
        return _REPLICATE, Why.BROADCAST
    if index < batch.subject.positional:
        batch.agree(size, index)
    return _REPLICATE, Why.OTHER


def _leading(value: Any) -> int | None:
    """Return the leading dimension of a tensor or array; None for other values and those without dimensions."""
    return _shape(value)[0] if has_dimensions(value) else None


def _shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of a tensor or array. A ragged nested tensor has only a length."""
    try:
        return tensor.shape
    except RuntimeError:
        return (tensor.size(0),)
