"""The data that one layer of a row passes to the next, and the program of what each layer reads and returns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import starmap
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from torch import Tensor

from rp_presets.caches.before import is_state
from rp_presets.caches.held import HeldCaches, is_fixed
from rp_presets.rows.absent import Spec
from rp_presets.rows.trees import Box, frozen, leaves

# The origin of a result or argument, (list, name, number). For a part that runs before list of layers `list`: the
# part's name and the number of its call. For a layer of that list: an empty name and the layer's index. For an
# argument of the model: -1, its name and 0.
Origin = tuple[int, str, int]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor in a tree of arguments or results: its key in `Carry.values`."""

    key: int


@dataclass(frozen=True, slots=True)
class BoxKey:
    """A container in a tree of arguments: its key in `Carry.boxes`."""

    key: int


@dataclass(frozen=True, slots=True)
class LayerCall:
    """How a layer is called.

    `arguments`: ``(args, kwargs)``, with `Value` and `BoxKey` in place of tensors and containers. `boxes`: the
    keys of the containers among them. `result`: its result, with `Value` in place of tensors. `done`: keys of
    values that nothing reads after this layer. `done_boxes`: the same for containers.
    """

    arguments: Any
    boxes: tuple[int, ...]
    result: Any
    done: frozenset[int]
    done_boxes: frozenset[int]


class LayerCalls:
    """The calls of the layers of one list, for one set of arguments. Immutable.

    `empty`: an empty copy of each container, by key. `past`: results of parts and of earlier layers, with `Spec`
    in place of tensors. `specs`: shapes and dtypes of the layers' results, by key, where known. `truths`: the
    answers of the truth tests before the layers, in order. It is passed on as one object, and is not a dataclass,
    so that it is a leaf in trees of tensors.

    Programs are equal if layers do the same by them, so that what was captured with one may be replayed with
    another. The rest is for the code after the layers.
    """

    def __init__(
        self,
        calls: Sequence[LayerCall],
        empty: Mapping[int, Box],
        past: Mapping[Origin, Any],
        specs: Mapping[int, Spec | None],
        truths: Sequence[bool],
    ) -> None:
        self.calls = tuple(calls)
        self.empty = dict(empty)
        self.past = dict(past)
        self.specs = dict(specs)
        self.truths = tuple(truths)

    def with_arguments(self, changed: Callable[[Any], Any]) -> LayerCalls:
        """Return a program that calls the layers with changed arguments."""
        calls = [replace(call, arguments=changed(call.arguments)) for call in self.calls]
        return LayerCalls(calls, self.empty, self.past, self.specs, self.truths)

    def held_state(self) -> HeldCaches | None:
        """Return what layers write beside what they hand on: caches; None if these give it another place."""
        return HeldCaches(self._caches) if all(map(is_fixed, self._caches)) else None

    @cached_property
    def _caches(self) -> list[Any]:
        arguments = [call.arguments for call in self.calls]
        return list({id(leaf): leaf for leaf in leaves(arguments) if is_state(leaf)}.values())

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, LayerCalls) and self._read_by_layers == other._read_by_layers)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Once: tuples do not keep theirs, and it is asked of each microbatch.
        return hash(self._read_by_layers)

    @cached_property
    def _read_by_layers(self) -> Hashable:
        # Each token of a text has a program, and to find out that two are the same takes less than to freeze one.
        if (same := next(filter(self.is_surely, list(_FROZEN.values())), None)) is not None:
            self.__dict__["_hash"] = same._hash
            return same._read_by_layers
        _FROZEN[id(self)] = self
        calls = [(call.arguments, call.result, call.done, call.done_boxes) for call in self.calls]
        return frozen(calls), frozen(self.empty)

    def is_surely(self, other: LayerCalls) -> bool:
        """Return whether it is seen at once that layers do the same by another program."""
        calls = zip(self.calls, other.calls, strict=False)
        no_boxes = not (self.empty or other.empty)
        return no_boxes and len(self.calls) == len(other.calls) and all(starmap(_is_same_call, calls))

    def __deepcopy__(self, memo: object) -> LayerCalls:
        del memo
        return self


# Programs that graphs know are alive, those of other calls soon gone.
_FROZEN: WeakValueDictionary[int, LayerCalls] = WeakValueDictionary()


def _is_same_call(one: LayerCall, other: LayerCall) -> bool:
    return (
        one.done == other.done and _is_same(one.arguments, other.arguments) and _is_same(one.result, other.result)
    )


def _is_same(one: Any, other: Any) -> bool:
    """Whether two trees without containers that are written hold the same constants in the same places."""
    kind = one.__class__
    if one is other:
        return True
    if kind is not other.__class__:
        return False
    if kind is Value:
        return one.key == other.key
    if kind is dict:
        return one.keys() == other.keys() and all(map(_is_same, one.values(), other.values()))
    return kind is tuple and len(one) == len(other) and all(map(_is_same, one, other))


class Carry(NamedTuple):
    """The data that a layer passes to the next. A layer replaces only what it computes; all other objects stay.

    `values`: tensors that a later layer or the code after the layers reads, such as hidden states, masks and
    position tables, by key. `boxes`: the contents of containers that layers share, by key, as new lists and dicts.
    `written`: the keys of containers that a layer has written to. `collected`: additional results of the model,
    such as hidden states, by name. `arguments`: the model's arguments, ``(args, kwargs)``. `parts`: results of the
    model's parts that the code after the layers reads, by origin. `program`: the calls of the layers, which no
    layer changes.
    """

    values: dict[int, Tensor]
    boxes: dict[int, Any]
    written: frozenset[int]
    collected: dict[str, Any]
    arguments: Any
    parts: dict[Origin, Any]
    program: LayerCalls
