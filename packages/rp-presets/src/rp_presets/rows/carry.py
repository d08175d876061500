"""What one layer of a row passes to the next, and the program that says what each layer reads and returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from rp_presets.rows.absent import Spec
from rp_presets.rows.trees import Box

# What the code around the layers has at hand: before which list of layers, by which name, for the nth time. It is
# the name of a part or of an argument, or empty for a layer.
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

    `arguments`: ``(args, kwargs)``, with `Value` and `BoxKey` for tensors and containers. `result`: what it
    returns, with `Value` for tensors. `done`: keys of values that nothing reads after this layer. `done_boxes`:
    the same for containers.
    """

    arguments: Any
    result: Any
    done: frozenset[int]
    done_boxes: frozenset[int]


class Program:
    """The calls of one row of layers, for one set of arguments. Not changed once made.

    `empty`: each container without items, by key. `past`: what parts returned, and earlier layers, with `Spec` for
    tensors. `specs`: shapes and dtypes of what layers return, by key, where known. `truths`: the answers of the
    truth tests before the layers, in order. It travels in the carry as one object, so it is no dataclass: trees of
    tensors end here.
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

    def __deepcopy__(self, memo: object) -> Program:
        del memo
        return self


class Carry(NamedTuple):
    """What a layer passes to the next. Only what a layer computes is replaced; the rest stays the same objects.

    `values`: tensors that a later layer, or the code after the layers, reads: hidden states, masks, tables of
    positions. `boxes`: containers that layers share, as new lists and dicts; `written`: keys of those that a layer
    has written. `collected`: results that the model returns beside its output, such as hidden states, by name.
    `arguments`: the model's own, ``(args, kwargs)``. `parts`: results of the model's parts that the code after the
    layers reads. `program`: a constant.
    """

    values: dict[int, Tensor]
    boxes: dict[int, Any]
    written: frozenset[int]
    collected: dict[str, Any]
    arguments: Any
    parts: dict[Origin, Any]
    program: Program
