"""Specs: the rules by which a leaf is split into parts or merged from them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, TypeGuard, TypeVar, cast

from rp_batch import tree
from rp_batch.errors import SpecError
from rp_batch.sizes import read_sizes

__all__ = [
    "Concat",
    "Equal",
    "First",
    "Mean",
    "MergeRule",
    "Parts",
    "Ragged",
    "Reduce",
    "Replicate",
    "Split",
    "SplitRule",
    "Sum",
]

_Item = TypeVar("_Item")


@tree.leaf
@dataclass(frozen=True, slots=True, repr=False)
class Split:
    """Split a tensor along one dimension; when merging, the same as `Concat(dim, inner)`.

    >>> import torch, rp_batch
    >>> parts = rp_batch.split(((torch.zeros(3, 8),), {}), 4, spec=((Split(1),), {}))
    >>> parts[0][0][0].shape
    torch.Size([3, 2])

    `factor`: how many entries the dimension has for each sample, as where heads are folded into it. `inner`: the
    samples are the inner index of the two, as in (sequence, batch) folded into one; each part is folded alike.

    >>> folded = torch.arange(6)  # two rows of three samples
    >>> rp_batch.split(((folded,), {}), 3, spec=((Split(0, factor=2, inner=True),), {}))[0]
    ((tensor([0, 3]),), {})
    """

    dim: int = 0
    factor: int = 1
    inner: bool = False

    def __post_init__(self) -> None:
        _check_dim(self.dim)
        if type(self.factor) is not int or self.factor < 1:
            raise ValueError(f"factor must be an integer of at least 1, but is {self.factor!r}")
        _check_inner(self.inner)

    def __repr__(self) -> str:
        """Return the expression that makes it, without defaults but `dim`."""
        return _without_defaults(self)


@tree.leaf
@dataclass(frozen=True, slots=True)
class Ragged:
    """Split a dimension that has any number of entries for each sample, in the order of the samples.

    A part of which no sample has an entry is None, like an argument that is not given. When merging, the same as
    `Concat(dim)`.

    >>> import torch, rp_batch
    >>> patches = torch.arange(5)  # two of the first sample, none of the second, three of the third
    >>> rp_batch.split(((patches,), {}), 3, spec=((Ragged((2, 0, 3)),), {}))
    [((tensor([0, 1]),), {}), ((None,), {}), ((tensor([2, 3, 4]),), {})]

    `counts`: how many entries each sample has. `used`: whether each sample's entries are more than padding; a part
    of which no sample's are is None, too. By default all are.
    """

    counts: tuple[int, ...]
    dim: int = 0
    used: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        _check_dim(self.dim)
        if self.used is not None and len(self.used) != len(self.counts):
            raise ValueError(f"used must have {len(self.counts)} entries, one a sample, but has {len(self.used)}")
        is_valid = type(self.counts) is tuple and all(type(one) is int and one >= 0 for one in self.counts)
        if not is_valid or not self.counts:
            raise ValueError(
                f"counts must be a tuple of the number of entries of each sample, but is {self.counts!r}"
            )


@tree.leaf
@dataclass(frozen=True, slots=True)
class Replicate:
    """Give every part the same object; when merging, the same as `Equal()`.

    >>> import torch, rp_batch
    >>> table = torch.zeros(4, 2)
    >>> parts = rp_batch.split(((torch.zeros(4), table), {}), 2, spec=((Split(0), Replicate()), {}))
    >>> parts[1][0][1] is table
    True
    """


@tree.leaf
@dataclass(frozen=True, slots=True, repr=False)
class Concat:
    """Concatenate the parts' tensors along one dimension.

    >>> import torch, rp_batch
    >>> rp_batch.merge([torch.zeros(3, 1), torch.zeros(3, 2)], spec=Concat(1)).shape
    torch.Size([3, 3])

    `inner`: the dimension holds several rows of all samples, as in (sequence, batch) folded into one. The sizes of
    the microbatches must be known then.

    >>> rp_batch.merge([torch.tensor([0, 3]), torch.tensor([1, 2, 4, 5])], Concat(inner=True), sizes=(1, 2))
    tensor([0, 1, 2, 3, 4, 5])
    """

    dim: int = 0
    inner: bool = False

    def __post_init__(self) -> None:
        _check_dim(self.dim)
        _check_inner(self.inner)

    def __repr__(self) -> str:
        """Return the expression that makes it, without defaults but `dim`."""
        return _without_defaults(self)


@tree.leaf
@dataclass(frozen=True, slots=True)
class Join:
    """Put the parts' lists or tuples one after another, such as those with an entry for each image or sample.

    >>> import torch, rp_batch
    >>> boxes = [{"boxes": [torch.ones(2, 4), torch.ones(1, 4)]}, {"boxes": [torch.ones(3, 4)]}]
    >>> len(rp_batch.merge(boxes, spec={"boxes": Join()})["boxes"])
    3
    """


@tree.leaf
@dataclass(frozen=True, slots=True)
class Sum:
    """Add the parts' values: tensors of the same shape, or numbers.

    >>> import torch, rp_batch
    >>> rp_batch.merge([torch.tensor(1.0), torch.tensor(2.0)], spec=Sum())
    tensor(3.)
    """


@tree.leaf
@dataclass(frozen=True, slots=True)
class Mean:
    """Average the parts' values, weighted by microbatch size: tensors of the same shape, or numbers.

    >>> import torch, rp_batch
    >>> rp_batch.merge([torch.tensor(1.0), torch.tensor(4.0)], spec=Mean(), sizes=(2, 1))
    tensor(2.)
    """


@tree.leaf
@dataclass(frozen=True, slots=True)
class First:
    """Take the first part's value and drop the others.

    >>> import rp_batch
    >>> rp_batch.merge(["a", "b"], spec=First())
    'a'
    """


@tree.leaf
@dataclass(frozen=True, slots=True)
class Equal:
    """Take the value that all parts have; raise `MergeError` if they differ.

    >>> import rp_batch
    >>> rp_batch.merge(["a", "a"], spec=Equal())
    'a'
    """


@tree.leaf
@dataclass(frozen=True, slots=True)
class Reduce:
    """Fold the parts' values from the left: `function(function(initial, first), second)` and so on.

    >>> import rp_batch
    >>> rp_batch.merge([3, 5, 2], spec=Reduce(max, 0))
    5

    `initial` is copied for every merge, so `function` may modify it in place.
    """

    function: Callable[[Any, Any], Any]
    initial: Any

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"the function of Reduce must be callable, but is {self.function!r}; give it first")


def _check_dim(dim: object) -> None:
    if type(dim) is not int:
        raise TypeError(f"dim must be an integer, but is {dim!r}; negative ones count from the last dimension")


def _without_defaults(spec: Split | Concat) -> str:
    values = {each.name: getattr(spec, each.name) for each in fields(spec)}
    others = [f"{each.name}={values[each.name]}" for each in fields(spec)[1:] if values[each.name] != each.default]
    return f"{type(spec).__name__}({', '.join([f'dim={spec.dim}', *others])})"


def _check_inner(inner: object) -> None:
    if type(inner) is not bool:
        raise TypeError(f"inner must be a bool, but is {inner!r}")


class Parts(list[_Item]):
    """A list with one item per microbatch.

    `split` returns one. As a value in a tree that is split, item i goes to microbatch i. As a merge spec, the
    class itself keeps the parts as a list instead of merging them.

    >>> import rp_batch
    >>> rp_batch.split(((Parts(["a", "b"], sizes=(3, 1)), 7), {}), 2)
    [(('a', 7), {}), (('b', 7), {})]
    >>> type(rp_batch.merge(["a", "b"], spec=Parts)).__name__
    'Parts'

    `sizes`: the size of each microbatch along the batch dimension; None if unknown.
    """

    sizes: tuple[int, ...] | None

    def __init__(self, items: Iterable[_Item] = (), *, sizes: Iterable[int] | None = None) -> None:
        super().__init__(items)
        self.sizes = None if sizes is None else read_sizes(sizes, len(self))

    @property
    def batch_size(self) -> int | None:
        """The size of the whole batch; None if `sizes` is None."""
        return None if self.sizes is None else sum(self.sizes)


SplitRule: TypeAlias = Split | Ragged | Replicate | type[Parts[Any]]
MergeRule: TypeAlias = Concat | Join | Sum | Mean | First | Equal | Reduce | type[Parts[Any]]

_RULES = (Split, Ragged, Replicate, Concat, Join, Sum, Mean, First, Equal, Reduce)
_FOR_SPLITTING = "Split(dim), Ragged(counts), Replicate(), or None for the default rule"
_FOR_MERGING = (
    "Concat(dim), Join(), Sum(), Mean(), First(), Equal(), Reduce(function, initial), Parts, or None for the "
    "default rule"
)


def is_function(spec: object) -> TypeGuard[Callable[..., Any]]:
    """Return whether a spec is a user's function; classes such as `Replicate` are specs."""
    return callable(spec) and not isinstance(spec, (type, *_RULES))


def split_rule(spec: Any, where: str) -> SplitRule | None:
    """Convert a spec to a split rule; None if it is a tree of specs or no spec at all."""
    rule = _normalized(spec)
    if rule is None or isinstance(rule, (Split, Ragged, Replicate)):
        return rule
    if rule is Parts:
        return Parts
    raise SpecError(where, f"must be {_FOR_SPLITTING}, but is {rule!r}, which is for merging")


def merge_rule(spec: Any) -> MergeRule | None:
    """Convert a spec to a merge rule; None if it is a tree of specs or no spec at all."""
    rule = _normalized(spec)
    if isinstance(rule, Split):
        return Concat(rule.dim, rule.inner)
    if isinstance(rule, Ragged):
        return Concat(rule.dim)
    if isinstance(rule, Replicate):
        return Equal()
    return cast("MergeRule | None", rule)


def _normalized(spec: Any) -> Any:
    if isinstance(spec, _RULES):
        return spec
    if isinstance(spec, type):
        return _from_class(spec)
    return _from_torch(spec)


def _from_class(spec: type) -> Any:
    if issubclass(spec, Parts):
        return Parts
    if spec in (Split, Replicate, Concat, Join, Sum, Mean, First, Equal):
        return spec()
    return Replicate() if spec is _torch_class("_Replicate") else None


def _from_torch(spec: Any) -> Any:
    if _is_torch(spec, "TensorChunkSpec"):
        return Split(spec.split_dim)
    if _is_torch(spec, "_Replicate"):
        return Replicate()
    if _is_torch(spec, "_CustomReducer"):
        return Reduce(spec.reduce_fn, spec.init_value)
    return None


def _is_torch(spec: Any, name: str) -> bool:
    cls = _torch_class(name)
    return cls is not None and isinstance(spec, cls)


def _torch_class(name: str) -> type | None:
    # Importing this module takes a second. If a caller has an instance, it is imported already.
    return getattr(sys.modules.get("torch.distributed.pipelining.microbatch"), name, None)


def unusable(spec: Any, where: str, *, merging: bool) -> SpecError:
    """Return the error for a value that is not a spec."""
    wanted, kind = (_FOR_MERGING, "merging") if merging else (_FOR_SPLITTING, "splitting")
    return SpecError(where, f"the spec for {kind} must be {wanted}, but is {spec!r} ({type(spec).__name__})")
