"""The observation of a model: its lists of layers, the layers' results, and the parts around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rp_presets.rows.absent import Spec
from rp_presets.rows.capture import Hooks
from rp_presets.rows.carry import Origin


class Like:
    """A tensor in a layer's result. `argument`: the index of a tensor argument with the same shape and dtype."""

    def __init__(self, argument: int | None) -> None:
        self.argument = argument

    def spec(self, arguments: list[Spec | None]) -> Spec | None:
        """Return the tensor's shape and dtype in a call with these arguments; None if unknown."""
        known = self.argument is not None and self.argument < len(arguments)
        return arguments[self.argument] if known and self.argument is not None else None


@dataclass(frozen=True, slots=True)
class Segment:
    """A list of layers that run in order. `results`: the result of each, with `Like` in place of tensors."""

    path: str
    results: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The structure of a model as a row.

    `segments`: its lists of layers, in the order in which they run. `spine`: the names of the modules that contain
    them. `parts`: for the code before each segment and after the last one, the names of the modules that it calls.
    `needed`: the origins of results and arguments that must be passed on because later code reads them.
    `cache_argument`: whether forward takes `use_cache`. `written`: names of attributes that layers set when they
    run, which code around them cannot read. `hooks`: transformers' hooks on the model.
    """

    segments: tuple[Segment, ...]
    spine: frozenset[str]
    parts: tuple[frozenset[str], ...]
    needed: frozenset[Origin]
    cache_argument: bool
    written: frozenset[str]
    hooks: Hooks

    def __deepcopy__(self, memo: object) -> RowLayout:
        del memo
        return self

    def numbers(self) -> Mapping[str, int]:
        """Return the number of each segment, by the name of its list."""
        return {segment.path: number for number, segment in enumerate(self.segments)}
