"""Propose ways in which the tensors of a call may hold a batch, from their shapes alone."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple, cast

import torch

from rp_batch import tree
from rp_batch.arrays import has_dimensions
from rp_batch.errors import SizeError
from rp_batch.spec import Replicate, Split
from rp_batch.splitting.infer import SplitSubject, decide

__all__ = ["Proposal", "Proposals", "Way", "propose"]

# Each proposal is tried by running a layer.
_MOST_PROPOSALS = 8
# An integer that small may choose what a layer does; a larger one is likely to be a length or a count.
_CHOICES = range(-1, 5)

Shape = tuple[int, ...]


class Way(NamedTuple):
    """How a proposal reads shapes, whatever the sizes.

    `source`: where the batch size was read: ``"likely"``, given by the caller; ``"inferred"``, by the rules of
    `infer`; or a dimension of the first tensor. `first`: the dimension that is the batch in the first tensor.
    `others`: the one that is tried first in others; 0 leaves their second dimension alone, also if it has the same
    size. `fold`: whether a leading dimension that is a multiple of the batch size holds several entries of each
    sample (``"outer"``), the samples several times (``"inner"``), or no samples (``"none"``).

    >>> propose((torch.zeros(4, 3),)).found[0].way
    Way(source='inferred', first=0, others=0, fold='none')
    """

    source: Literal["likely", "inferred", "leading", "second"]
    first: int
    others: int
    fold: Literal["none", "outer", "inner"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """One way to split a call, see `propose`. `spec`, `batch_size`: as in `Inferred`.

    >>> propose((torch.zeros(4, 3),)).found[0].batch_size
    4
    """

    way: Way
    spec: Any
    batch_size: int


@dataclass(frozen=True, slots=True)
class Proposals:
    """Ways to split a call, the likeliest first; none if nothing in it can be split.

    `pattern`: which sizes are equal or multiples, and what else the proposals and the work of a call are likely to
    depend on: structure, dtypes, flags. It is the same for two calls that differ in sizes alone.

    >>> square, wide, wider = (propose((torch.zeros(4, length, 3),)).pattern for length in (4, 5, 6))
    >>> wide == wider, wide == square
    (True, False)
    """

    pattern: Hashable
    found: tuple[Proposal, ...]


def propose(
    args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, *, likely: int | None = None
) -> Proposals:
    """Propose ways to split the arguments of a call. Shapes cannot tell which of them is right: values can.

    >>> time_first = torch.zeros(5, 2, 3)
    >>> [each.spec for each in propose((time_first,), likely=2).found]
    [((Split(dim=1),), {}), ((Split(dim=0),), {})]

    `likely`: a batch size that is known from elsewhere, tried first; 1 means that nothing is to be split. A tensor
    may hold the batch in its first or second dimension, or a multiple of it in the first one, as where heads are
    folded into it.
    """
    subject = SplitSubject.call(args, dict(kwargs or {}))
    shapes = [_shape(leaf) for leaf in subject.leaves]
    first = next((index for index, shape in enumerate(shapes) if shape), None)
    sizes = {} if first is None else _batch_sizes(subject, shapes[first], likely)
    found = iter(()) if first is None else _distinct(subject, shapes, first, sizes)
    codes = [_code(leaf, shape, sizes) for leaf, shape in zip(subject.leaves, shapes, strict=True)]
    return Proposals((subject.treedef, tuple(codes)), tuple(islice(found, _MOST_PROPOSALS)))


def _batch_sizes(subject: SplitSubject, first: Shape, likely: int | None) -> dict[Any, int]:
    """Return the sizes that may be the batch's, by their source; each size once, none below two."""
    if likely == 1:
        return {}
    found: dict[Any, int | None] = {
        "likely": likely,
        "inferred": _inferred(subject),
        "leading": first[0],
        "second": first[1] if len(first) > 1 else None,
    }
    sizes: dict[Any, int] = {}
    for source, size in found.items():
        if size is not None and size > 1 and size not in sizes.values():
            sizes[source] = size
    return sizes


def _inferred(subject: SplitSubject) -> int | None:
    try:
        return decide(subject, None, batch_size=None).batch_size
    except SizeError:
        return None


def _distinct(
    subject: SplitSubject, shapes: Sequence[Shape], first: int, sizes: Mapping[Any, int]
) -> Iterator[Proposal]:
    seen: set[tuple[Split | Replicate, ...]] = set()
    for source, size in sizes.items():
        for way in _ways(source, shapes[first], size):
            rules = tuple(_rule(shape, size, way, is_first=index == first) for index, shape in enumerate(shapes))
            if rules not in seen and any(isinstance(rule, Split) for rule in rules):
                seen.add(rules)
                yield Proposal(way, tree.unflatten(subject.treedef, rules), size)


def _ways(source: Any, first: Shape, size: int) -> Iterator[Way]:
    # Where the first tensor has the batch as it is, a multiple elsewhere may be a coincidence.
    dims = [dim for dim, length in enumerate(first[:2]) if length == size]
    for fold in ("none", "outer", "inner") if dims else ("outer", "inner"):
        for dim in dims or [0]:
            yield from (Way(source, dim, other, fold) for other in (dim, 1 - dim))


def _rule(shape: Shape, size: int, way: Way, *, is_first: bool) -> Split | Replicate:
    dims = (way.first,) if is_first else (1, 0)[1 - way.others :]
    for dim in dims:
        if dim < len(shape) and shape[dim] == size:
            return Split(dim)
    if way.fold != "none" and shape and shape[0] > size and shape[0] % size == 0:
        return Split(0, factor=shape[0] // size, inner=way.fold == "inner")
    return Replicate()


def _shape(leaf: object) -> Shape:
    """Return the shape of a tensor or an array that can be split; empty for all other leaves."""
    if isinstance(leaf, torch.Tensor) and (leaf.is_nested or leaf.layout is not torch.strided):
        return ()
    return tuple(cast("Any", leaf).shape) if has_dimensions(leaf) else ()


def _code(leaf: object, shape: Shape, sizes: Mapping[Any, int]) -> Hashable:
    """Return what of a leaf is in the pattern."""
    if isinstance(leaf, torch.Tensor) or shape:
        kind = (leaf.dtype, leaf.layout) if isinstance(leaf, torch.Tensor) else type(leaf)
        return kind, tuple(_size_code(size, dim, sizes) for dim, size in enumerate(shape))
    if isinstance(leaf, torch.Size):
        return torch.Size, tuple(_size_code(size, 1, sizes) for size in leaf)
    if isinstance(leaf, int) and not isinstance(leaf, bool) and leaf not in _CHOICES:
        return int, _size_code(leaf, 0, sizes)
    return (type(leaf), leaf) if isinstance(leaf, (bool, int, str, type(None))) else type(leaf)


def _size_code(size: int, dim: int, sizes: Mapping[Any, int]) -> Hashable:
    if size == 1:
        return 1
    equal = next((source for source, other in sizes.items() if size == other), None)
    if equal is not None or dim > 0:
        return equal
    return tuple(source for source, other in sizes.items() if size % other == 0)
