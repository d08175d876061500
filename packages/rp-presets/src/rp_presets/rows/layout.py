"""What was observed of a model: its lists of layers, what they return, and the parts around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rp_presets.rows.absent import Spec
from rp_presets.rows.capture import Hooks
from rp_presets.rows.carry import Origin


class Like:
    """A tensor in a layer's result. `argument`: the number of the tensor argument with its shape and dtype."""

    def __init__(self, argument: int | None) -> None:
        self.argument = argument

    def spec(self, arguments: list[Spec | None]) -> Spec | None:
        """Its shape and dtype in a call with such arguments; None if unknown."""
        known = self.argument is not None and self.argument < len(arguments)
        return arguments[self.argument] if known and self.argument is not None else None


@dataclass(frozen=True, slots=True)
class Segment:
    """A list of layers that run one after another. `results`: what each returns, with `Like` for tensors."""

    path: str
    results: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model becomes a row.

    `segments`: its lists of layers, in the order in which they run. `spine`: the modules around them, by name.
    `parts`: for the code before each segment, and after the last one, the names of the modules that it calls.
    `needed`: what later code reads of what earlier code computed, or of arguments that would not travel otherwise.
    `cache_argument`: whether forward takes `use_cache`. `written`: names of attributes that layers set when they
    run; code around them cannot read these. `hooks`: those of transformers on the model.
    """

    segments: tuple[Segment, ...]
    spine: frozenset[str]
    parts: tuple[frozenset[str], ...]
    needed: frozenset[Origin]
    cache_argument: bool
    written: frozenset[str]
    hooks: Hooks

    def __deepcopy__(self, memo: object) -> Layout:
        del memo
        return self

    def numbers(self) -> Mapping[str, int]:
        """The number of each segment, by the name of its list."""
        return {segment.path: number for number, segment in enumerate(self.segments)}
