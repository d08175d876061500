"""Run a model's forward once and observe which lists of layers it calls, and what they return."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from rp_presets.errors import NotARow
from rp_presets.observing.attributes import Attributes, holds_others, is_scratch, own
from rp_presets.observing.hidden import Reads, held_by
from rp_presets.observing.randomness import generators, seed_generators
from rp_presets.rows import capture
from rp_presets.rows.layout import LayerSegment, Like, RowLayout
from rp_presets.rows.recorder import boxes_of, direct_tensors
from rp_presets.rows.skeleton import CalledModule, Method, Stub, children_of, in_session, skeleton
from rp_presets.rows.trees import contents_of, is_plain, leaves, mapped, same


@dataclass(frozen=True, slots=True)
class LayersSeen:
    """The observation of one list of layers in one run.

    `results`: the result of each layer. `written`: the contents of containers that the layers wrote to, by number.
    `collected`: values that hooks collected from the layers, by name.
    """

    results: list[Any]
    written: dict[int, Any]
    collected: dict[str, Any]


class Trace:
    """A `Session` in which everything runs, except that of several layers of one kind only the first does.

    `lists`: the lists of layers to observe, by name; each with the indices at which it is divided, see
    `LayerSegment`.
    """

    def __init__(
        self,
        model: nn.Module,
        lists: Mapping[str, Sequence[int]],
        spine: frozenset[str],
        hooks: capture.Hooks,
    ) -> None:
        self._hooks = hooks
        self.device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._autocast = torch.is_autocast_enabled(self.device.type)
        self._model = model
        self._places = [(path, start) for path, cuts in lists.items() for start in (0, *sorted(cuts))]
        own = {path: list(children_of(model.get_submodule(path)).values()) for path in lists}
        self._lists = [own[path][start:] for path, start in self._places]
        self._order: list[int] = []
        self._next = 0
        self._used: defaultdict[int, set[str]] = defaultdict(set)
        self._used_since: set[str] = set()
        self._templates: defaultdict[int, list[Any]] = defaultdict(list)
        self._results: defaultdict[int, list[Any]] = defaultdict(list)
        # By list of layers and name: the values that hooks collected from its layers.
        self._collected: defaultdict[int, dict[str, Any]] = defaultdict(dict)
        # By kind of layer: its result, and the values that hooks collected from it, by name.
        self._of_kind: dict[Any, tuple[Any, dict[str, list[Any]]]] = {}
        self._boxes: defaultdict[int, dict[int, tuple[Any, Any]]] = defaultdict(dict)
        # By list of layers: the attributes that its layers set, with the index of the first layer that does.
        self._written_attributes: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self._settable: set[str] = set()
        self._skeleton = skeleton(
            model,
            {
                path: [(start, number) for number, (own, start) in enumerate(self._places) if own == path]
                for path in lists
            },
            lambda _: True,
            spine,
            self._settable,
        )
        self._spine = spine

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the model's forward; return its output, of layers that nearly all have not run."""
        # With gradients, to notice where the model turns them off.
        with in_session(self), torch.enable_grad():
            output = self._skeleton(*args, **kwargs)
        self._assign_used(len(self._order))
        self._check_others()
        return output

    def layout(self, *, cache_argument: bool) -> RowLayout:
        """Return the observed layout."""
        segments = [
            LayerSegment(self._places[number][0], tuple(self._templates[number]), self._places[number][1])
            for number in self._order
        ]
        parts = [frozenset(self._used[phase]) for phase in range(len(segments) + 1)]
        return RowLayout(
            tuple(segments),
            self._spine,
            tuple(parts),
            frozenset(),
            cache_argument,
            frozenset(self._settable),
            self._hooks,
        )

    def seen(self) -> list[LayersSeen]:
        """Return the observation of each list of layers, in the order of the segments."""
        return [
            LayersSeen(self._results[number], self._written(number), self._collected[number])
            for number in self._order
        ]

    def _written(self, number: int) -> dict[int, Any]:
        boxes = self._boxes[number].values()
        return {
            key: contents_of(box) for key, (box, first) in enumerate(boxes) if not same(contents_of(box), first)
        }

    # Calls from stubs and parts

    def layer(self, stub: Stub, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Session.layer`."""
        self._check_turn(stub)
        if capture.wanted():
            self._hooks.ensure()
        if not torch.is_grad_enabled():
            self._refuse(
                stub.segment,
                f"{self._name(stub)} is called without gradients, or in an autograd function that has its own",
            )
        if torch.is_autocast_enabled(self.device.type) != self._autocast:
            self._refuse(stub.segment, f"{self._name(stub)} is called inside an autocast of the model's own")
        for box in boxes_of((args, kwargs)):
            self._boxes[stub.segment].setdefault(id(box), (box, contents_of(box)))
        layer = self._lists[stub.segment][stub.index]
        result = self._result(stub, layer, args, kwargs)
        given = direct_tensors((args, kwargs))
        self._templates[stub.segment].append(mapped(lambda leaf: _like(leaf, given), result))
        self._results[stub.segment].append(result)
        return result

    def part(self, part: CalledModule | Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Session.part`."""
        self._note_use(part.part.path if isinstance(part, Method) else part.path)
        return part.run(args, kwargs)

    def read(self, part: CalledModule, name: str) -> Any:
        """See `Session.read`."""
        self._note_use(part.path)
        return getattr(part.held(), name)

    # Inside

    def _note_use(self, path: str) -> None:
        # Only the next call of a layer, if any, tells whether this use is between two layers of a list or after
        # them.
        self._used_since.add(path)

    def _assign_used(self, phase: int) -> None:
        self._used[phase] |= self._used_since
        self._used_since = set()

    def _check_turn(self, stub: Stub) -> None:
        if stub.segment not in self._order:
            self._assign_used(len(self._order))
            self._order.append(stub.segment)
            self._next = 0
        self._assign_used(len(self._order) - 1)
        if stub.segment != self._order[-1] or stub.index != self._next:
            self._refuse(
                stub.segment,
                f"{self._name(stub)} is called out of turn; in a row every layer runs once, in order",
            )
        self._next += 1

    def _result(self, stub: Stub, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The first layer of a list is a kind of its own: hooks also collect its arguments.
        kind = (stub.segment, stub.index == 0, _kind(layer), _shapes((args, kwargs)))
        if kind in self._of_kind:
            result, collected = mapped(_cloned, self._of_kind[kind])
            capture.deliver(collected)
        else:
            before = [contents_of(box) for box in boxes_of((args, kwargs))]
            known = _lengths(capture.wanted())
            result = self._observed(stub, layer, args, kwargs)
            collected = {key: lists[known[key] :] for key, lists in capture.wanted().items() if key in known}
            if same(before, [contents_of(box) for box in boxes_of((args, kwargs))]):
                self._of_kind[kind] = result, collected
        for key, values in collected.items():
            self._collected[stub.segment].setdefault(key, []).extend(values)
        return result

    def _observed(self, stub: Stub, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._check_handed(stub, (args, kwargs))
        versions = [tensor._version for tensor in given]
        before, arguments = Attributes(self._model), mapped(_same_leaf, (args, kwargs))
        with torch.no_grad(), Reads([*given, *held_by(layer)]) as reads:
            result = layer(*args, **kwargs)
        if reads.hidden:
            self._refuse(
                stub.segment,
                f"{self._name(stub)} reads a tensor that it neither holds nor is handed, as of a global or of an "
                "object that layers share",
            )
        if [tensor._version for tensor in given] != versions:
            self._refuse(stub.segment, f"{self._name(stub)} writes a tensor that it is handed")
        if (strange := next((leaf for leaf in leaves(result) if not _can_be_passed_on(leaf)), None)) is not None:
            self._refuse(
                stub.segment,
                f"{self._name(stub)} returns a {type(strange).__name__}, which may be another in each call, or "
                "hold tensors; only tensors and None are handed on",
            )
        if changed := before.changed():
            self._check_written(stub, layer, changed, arguments)
            before.restore()
        return result

    def _check_handed(self, stub: Stub, arguments: Any) -> None:
        strange = (leaf for leaf in leaves(arguments) if not (isinstance(leaf, Tensor) or is_plain(leaf)))
        if (leaf := next(strange, None)) is not None:
            self._refuse(
                stub.segment,
                f"{self._name(stub)} is handed a {type(leaf).__name__}, which cannot be handed on: it may be "
                "written, or hold tensors",
            )

    def _check_written(
        self, stub: Stub, layer: nn.Module, changed: list[tuple[nn.Module, str]], arguments: Any
    ) -> None:
        """Raise if anything may read the attributes that a layer has set."""
        inside = {module: name for name, module in _named_modules(layer)}
        for module, name in changed:
            if module not in inside:
                self._refuse(
                    stub.segment,
                    f"{self._name(stub)} sets the attribute {name!r} of a {type(module).__name__} outside of it",
                )
        module, name = changed[0]
        where = f"{inside[module]}.{name}" if inside[module] else name
        if not is_scratch(lambda given: _with_seed(lambda: layer(*given[0], **given[1])), arguments):
            self._refuse(
                stub.segment, f"{self._name(stub)} sets its attribute {where!r}, and reads it the next time"
            )
        self._written_attributes[self._places[stub.segment][0]].setdefault(where, self._index(stub))
        self._settable |= {name for _, name in changed}

    def _check_others(self) -> None:
        """Raise if a layer may read attributes that other layers set."""
        for path, written in self._written_attributes.items():
            number = self._places.index((path, 0))
            for index, layer in enumerate(self._lists[number]):
                if holds_others(layer):
                    name, writer = next(iter(written.items()))
                    self._refuse(
                        number,
                        f"layer {writer} sets its attribute {name!r}, and layer {index} has other modules in its "
                        "attributes, which may be that layer",
                    )

    def _refuse(self, segment: int, reason: str) -> NoReturn:
        raise NotARow(self._places[segment][0], reason)

    def _name(self, stub: Stub) -> str:
        return f"layer {self._index(stub)}"

    def _index(self, stub: Stub) -> int:
        return self._places[stub.segment][1] + stub.index


def _can_be_passed_on(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, Tensor)


def _with_seed(call: Callable[[], Any]) -> Any:
    seed_generators(0)
    return call()


def _same_leaf(leaf: Any) -> Any:
    return leaf


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _lengths(lists: Mapping[str, Any]) -> dict[str, int]:
    return {key: len(cast("list[Any]", values)) for key, values in lists.items() if isinstance(values, list)}


def _like(leaf: Any, given: Sequence[Tensor]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    alike = (number for number, one in enumerate(given) if (one.shape, one.dtype) == (leaf.shape, leaf.dtype))
    return Like(next(alike, None))


def _shapes(tree: Any) -> tuple[Any, ...]:
    return tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves(tree))


def _named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    # A typed wrapper of `named_modules`.
    yield from module.named_modules()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _kind(module: nn.Module) -> Any:
    """Return what determines a layer's kind of result: classes, plain attributes, parameter shapes."""
    plain = {
        f"{path}.{name}": value
        for path, child in _named_modules(module)
        for name, value in own(child)
        if isinstance(value, bool | int | float | str)
    }
    return (
        tuple((name, type(child)) for name, child in _named_modules(module)),
        tuple(sorted(plain.items(), key=lambda item: item[0])),
        tuple((name, parameter.shape) for name, parameter in module.named_parameters()),
        id(module) if holds_others(module) else None,
    )


class _Restored:
    """Restores what observation must not change: buffers, attributes, training flags, random states."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._attributes = Attributes(model)
        self._flags = [module.training for module in model.modules()]
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        self._random = [(generator, generator.get_state()) for generator in generators()]
        self._tables = [(vars(module)["_buffers"], dict(vars(module)["_buffers"])) for module in model.modules()]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for module, flag in zip(self._model.modules(), self._flags, strict=True):
            module.training = flag
        for generator, state in self._random:
            generator.set_state(state)
        self._attributes.restore()
        for table, before in self._tables:
            table.clear()
            table.update(before)
        for buffer, before in self._buffers:
            buffer.copy_(before)


def undisturbed(model: nn.Module) -> _Restored:
    """Return a context that restores the model and the random state at its end."""
    return _Restored(model)
