"""The observation of a model: its lists of layers, the layers' results, and the parts around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import Tensor

from rp_presets.errors import UnsupportedModel
from rp_presets.rows.absent import Absent, Spec
from rp_presets.rows.capture import Hooks
from rp_presets.rows.carry import Origin

# By the name of a list of layers: for each segment, the index of its first layer and its number.
Starts: TypeAlias = Mapping[str, Sequence[tuple[int, int]]]


class Like:
    """A tensor in a layer's result. `argument`: the index of a tensor argument with the same shape and dtype."""

    def __init__(self, argument: int | None) -> None:
        self.argument = argument

    def spec(self, arguments: Sequence[Tensor]) -> Spec | None:
        """Return the tensor's shape and dtype in a call with these tensor arguments; None if unknown."""
        if self.argument is None or self.argument >= len(arguments):
            return None
        like = arguments[self.argument]
        return like.spec if isinstance(like, Absent) else Spec.of(like)


@dataclass(frozen=True, slots=True)
class LayerSegment:
    """Layers of one list that run in order, with none of the model's code between them.

    `path`: the name of their list. `results`: the result of each, with `Like` in place of tensors. `start`: the
    index of the first in the list. A list is divided where the model computes between two of its layers.
    """

    path: str
    results: tuple[Any, ...]
    start: int = 0

    @property
    def stop(self) -> int:
        """The index after the last layer."""
        return self.start + len(self.results)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The structure of a model as a row.

    `segments`: its lists of layers, or parts of lists, in the order in which they run. `spine`: the names of the
    modules that contain them. `parts`: for the code before each segment and after the last one, the names of the
    modules that it calls.
    `needed`: the origins of results and arguments that must be passed on because later code reads them.
    `observed`: the origins of all results.
    `cache_argument`: whether forward takes `use_cache`. `written`: names of attributes that layers set when they
    run, which code around them cannot read. `hooks`: transformers' hooks on the model.
    """

    segments: tuple[LayerSegment, ...]
    spine: frozenset[str]
    parts: tuple[frozenset[str], ...]
    needed: frozenset[Origin]
    cache_argument: bool
    written: frozenset[str]
    hooks: Hooks
    observed: frozenset[Origin] = frozenset()

    def __deepcopy__(self, memo: object) -> RowLayout:
        del memo
        return self

    def needs(self, origin: Origin) -> bool:
        """Return whether an origin must be passed on.

        So is a call of a part that has run more often than observed, as a projector of each image, if others are.
        """
        is_more = origin not in self.observed and bool(origin[1])
        return origin in self.needed or (is_more and any(one[:2] == origin[:2] for one in self.needed))

    def starts(self) -> Starts:
        """Return where the segments of each list begin, by the name of the list."""
        found: dict[str, list[tuple[int, int]]] = {}
        for number, segment in enumerate(self.segments):
            found.setdefault(segment.path, []).append((segment.start, number))
        return found


def together(layouts: Sequence[RowLayout]) -> RowLayout:
    """Return the layout of a model that was observed in several calls, which must call the same layers.

    Raises `UnsupportedModel` if they do not.
    """
    first, *others = layouts
    for other in others:
        if _ranges(other) != _ranges(first):
            raise UnsupportedModel(
                f"the model calls the layers {_ranges(first)} in one call, and {_ranges(other)} in another"
            )
    return replace(
        first,
        parts=tuple(frozenset[str]().union(*parts) for parts in zip(*(one.parts for one in layouts), strict=True)),
        needed=frozenset[Origin]().union(*(one.needed for one in layouts)),
        observed=frozenset[Origin]().union(*(one.observed for one in layouts)),
        written=frozenset[str]().union(*(one.written for one in layouts)),
    )


def _ranges(layout: RowLayout) -> list[str]:
    return [f"{one.path}[{one.start}:{one.stop}]" for one in layout.segments]
