"""`StageRun`: a run of a model's forward on a skeleton, which runs one stage's code and replays everything else.

The code of stage `k` is the model's code after its list of layers `k - 1` and before its list `k`. Forward runs
from the beginning. Before the stage, layers and parts return their results from earlier stages if these are read
again, and stand-ins otherwise. In the stage, parts run, and the calls of the next layers are recorded. After the
stage, the run stops.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn, TypeAlias, cast

import torch
from torch import Tensor, nn

from rp_presets.errors import ComputesBetween, NotARow
from rp_presets.losses import lazy_logits
from rp_presets.rows import capture
from rp_presets.rows.absent import Absent, Spec, standing_in
from rp_presets.rows.carry import Carry, LayerCall, LayerCalls, Origin, Value
from rp_presets.rows.layout import LayerSegment, RowLayout
from rp_presets.rows.recorder import CallRecorder, boxes_of, direct_tensors
from rp_presets.rows.skeleton import CalledModule, Method, Stub
from rp_presets.rows.trees import Box, is_plain, leaves, mapped, refill
from rp_presets.truths import Truths


class Reached(BaseException):
    """Stops forward when the code after this stage's layers begins. Not an error."""


# Runs of towers by call: arguments, the state of the random numbers before, the result, and the state after.
_Towers: TypeAlias = defaultdict[Origin, list[tuple[Any, Tensor, Any, Tensor]]]
_REMEMBERED: ContextVar[_Towers] = ContextVar("rp_presets_towers")


@contextmanager
def remembering_towers() -> Generator[None]:
    """Let runs with the same arguments inside the context run a tower once: on a processor it may take minutes."""
    token = _REMEMBERED.set(defaultdict(list))
    try:
        yield
    finally:
        _REMEMBERED.reset(token)


class StageRun:
    """A `Session` that runs the code of one stage.

    `before`: the carry of the layers before it; None for the first stage. `at_its_code`: called when the code of
    the stage begins. `keeps_all`: whether later stages may read any earlier result.
    """

    def __init__(
        self,
        stage: int,
        layout: RowLayout,
        device: torch.device,
        before: Carry | None,
        at_its_code: Callable[[], object] = lambda: None,
        *,
        keeps_all: bool = False,
    ) -> None:
        self._keeps_all = keeps_all
        # Pairs: a tensor that this run passes to the first layers again, and the tensor that they really got.
        self._layer_inputs: list[tuple[Tensor, Tensor]] = []
        self._at_its_code = at_its_code
        self._stage = stage
        self._layout = layout
        self.device = device
        self._before = before
        # The number of lists of layers that have been called, and of layers of the next list.
        self._phase = 0
        self._position = 0
        self._counts: Counter[tuple[int, str]] = Counter()
        self._past: dict[Origin, Any] = {} if before is None else dict(before.program.past)
        self._parts: dict[Origin, Any] = {} if before is None else dict(before.parts)
        self._recorder = CallRecorder(device, self._touched, self._refuse)
        self._collected: dict[str, Any] = {}
        self._boxes: dict[int, Box] = {}
        self._refusal: NotARow | None = None
        # A separate context, since it intercepts torch operations.
        self.truths = Truths(() if before is None else before.program.truths)
        self._truths_before_layers: list[bool] = []
        if stage == 0:
            at_its_code()

    # Calls from stubs and parts

    def layer(self, stub: Stub, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Session.layer`."""
        if self._phase > self._stage:
            raise Reached
        self._check_turn(stub)
        if stub.segment < self._stage:
            result = self._replayed(stub, (args, kwargs))
        else:
            if stub.index == 0:
                self._collected = self._to_collect()
                self._parts |= {self._first(stub): direct_tensors((args, kwargs))} if self._keeps_all else {}
            like = self._layout.segments[stub.segment].results[stub.index]
            result = self._recorder.record((args, kwargs), like)
        self._position += 1
        if self._position == len(self._layout.segments[stub.segment].results):
            self._end_of_segment(stub.segment)
        return result

    def part(self, part: CalledModule | Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Session.part`."""
        if self._phase > self._stage:
            raise Reached
        origin = self._origin(part.path)
        if self._phase < self._stage:
            return self._again(origin)
        with self.truths.paused():
            result = self._known(origin, part, args, kwargs)
        self._past[origin] = mapped(Spec.of, result)
        if self._is_needed(origin):
            self._parts[origin] = mapped(_cloned, result)
        return result

    def read(self, part: CalledModule, name: str) -> Any:
        """See `Session.read`."""
        if self._phase > self._stage:
            raise Reached
        if self._phase == self._stage or part.inner is not None:
            return getattr(part.held(), name)
        return part.known(name)

    # The end

    @property
    def is_past(self) -> bool:
        """Whether the layers of this stage have been called."""
        return self._phase > self._stage

    def carry(self, arguments: Any) -> Carry:
        """Return the carry for the first layer of this stage. `arguments`: the model's arguments to pass on.

        Call it while the frames of forward are still alive: results of layers that they hold are kept for the code
        after the layers.
        """
        self.check()
        if self._phase <= self._stage:
            count = len(self._layout.segments[self._phase].results)
            self._refuse(
                f"the model called {self._position} of its {count} layers; in a row each runs once, and none "
                "is skipped at random (layerdrop) or by arguments"
            )
        program = LayerCalls(
            self._recorder.calls(),
            self._recorder.empty(),
            self._past,
            self._recorder.specs,
            self._truths_before_layers,
        )
        return Carry(
            self._recorder.values,
            self._recorder.contents(),
            frozenset(),
            self._collected,
            arguments,
            self._parts,
            program,
        )

    def check(self) -> None:
        """Raise a refusal again that the model's code may have caught."""
        if self._refusal is not None:
            raise self._refusal

    def end(self) -> None:
        """Let go of all it has seen: its recorder refers to it, and circles wait for the garbage collector."""
        del self._recorder, self._before, self._parts, self._past, self._boxes, self._layer_inputs

    def with_handed(self, output: Any) -> Any:
        """Replace tensors of the output that were computed again by those that the first layers really got.

        They may differ: a dropout outside of modules draws new numbers when forward runs again.
        """
        if not self._layer_inputs:
            return output
        return mapped(
            lambda leaf: next((original for again, original in self._layer_inputs if again is leaf), leaf), output
        )

    # Inside

    def _has_labels(self) -> bool:
        kwargs: dict[str, Any] = {} if self._before is None else self._before.arguments[1]
        return any("label" in name and value is not None for name, value in kwargs.items())

    def _known(
        self, origin: Origin, part: CalledModule | Method, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        known = _REMEMBERED.get(None)
        if known is None or self.device.type != "cpu" or not _is_tower(part):
            return self._run(part, args, kwargs)
        before = torch.get_rng_state()
        for given, drawn, result, state in known[origin]:
            if torch.equal(drawn, before) and _are_same(given, (args, kwargs)):
                torch.set_rng_state(state)
                return mapped(_cloned, result)
        given = mapped(_cloned, (args, kwargs))
        result = self._run(part, args, kwargs)
        known[origin].append((given, before, result, torch.get_rng_state()))
        return mapped(_cloned, result)

    def _run(self, part: CalledModule | Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # With labels, only the model's own loss is likely to read the logits of a linear layer that widens its
        # input.
        is_last = self._stage == len(self._layout.segments)
        if is_last and isinstance(part, CalledModule) and len(args) == 1 and self._has_labels():
            inner = part.held()
            if isinstance(inner, nn.Linear) and inner.out_features > inner.in_features:
                return lazy_logits(inner, args[0])
        return part.run(args, kwargs)

    def _to_collect(self) -> dict[str, Any]:
        lists = capture.wanted()
        if lists:
            self._layout.hooks.ensure()
        # Hooks read how many there are: only the first of all layers adds the hidden state before it.
        return {
            key: [None] * len(cast("list[Any]", value)) if isinstance(value, list) else value
            for key, value in lists.items()
        }

    def _check_turn(self, stub: Stub) -> None:
        if (stub.segment, stub.index) != (self._phase, self._position):
            index = self._layout.segments[stub.segment].start + stub.index
            self._refuse(f"layer {index} is called out of turn; in a row every layer runs once, in order")

    def _end_of_segment(self, segment: int) -> None:
        if segment == self._stage:
            self._truths_before_layers = list(self.truths.given)
        self._phase, self._position = self._phase + 1, 0
        if self._phase == self._stage:
            self._check_truths()
            self._at_its_code()
        if self._before is None or segment >= self._stage:
            return
        capture.deliver(self._collected_by(segment, self._before))
        if segment == self._stage - 1:
            for key in self._before.written:
                refill(self._boxes[key], self._before.boxes[key])

    def _check_truths(self) -> None:
        before = () if self._before is None else self._before.program.truths
        if len(self.truths.given) != len(before):
            self._refuse(
                f"the model's code before its layers tested {len(before)} tensors, as in `if mask.all():`, and "
                f"{len(self.truths.given)} when it ran again; a row runs it several times, with and without "
                "gradients, and it must take the same path"
            )

    def _collected_by(self, segment: int, before: Carry) -> dict[str, Any]:
        """Return the values that hooks collected from a list of layers."""
        origin = (segment, "<collected>", 0)
        if segment < self._stage - 1:
            return self._again(origin)
        collected = capture.added(before.collected)
        self._past[origin] = mapped(Spec.of, collected)
        if self._is_needed(origin):
            self._parts[origin] = collected
        return collected

    def _is_needed(self, origin: Origin) -> bool:
        return self._keeps_all or self._layout.needs(origin)

    def _first(self, stub: Stub) -> Origin:
        return stub.segment, "", -1

    def _origin(self, path: str) -> Origin:
        number = self._counts[self._phase, path]
        self._counts[self._phase, path] += 1
        return self._phase, path, number

    def _again(self, origin: Origin) -> Any:
        if origin in self._parts:
            return mapped(_cloned, self._parts[origin])
        if origin not in self._past:
            self._refuse(
                f"the model called {origin[1]!r} in another order when its forward ran again; a row runs the code "
                "around its layers several times, and it must take the same path"
            )
        return standing_in(self._past[origin], self.device)

    def _replayed(self, stub: Stub, arguments: Any) -> Any:
        origin = (stub.segment, "", stub.index)
        if stub.index == 0 and self._first(stub) in self._parts:
            self._layer_inputs += zip(direct_tensors(arguments), self._parts[self._first(stub)], strict=True)
        if self._before is None or stub.segment < self._stage - 1:
            result = self._again(origin)
            return mapped(lambda leaf: self._gone(leaf.spec) if isinstance(leaf, Gone) else leaf, result)
        call = self._before.program.calls[stub.index]
        self._note_boxes(call, arguments)
        result = mapped(self._value, call.result)
        self._past[origin] = mapped(
            lambda leaf: Gone(leaf.spec) if isinstance(leaf, Absent) else Spec.of(leaf), result
        )
        if self._is_needed(origin):
            self._parts[origin] = mapped(
                lambda leaf: Gone(leaf.spec) if isinstance(leaf, Absent) else leaf, result
            )
        return result

    def _value(self, leaf: Any) -> Any:
        if not isinstance(leaf, Value):
            return leaf
        assert self._before is not None
        value = self._before.values.get(leaf.key)
        return self._gone(self._before.program.specs.get(leaf.key)) if value is None else value

    def _gone(self, spec: Spec | None) -> Absent:
        return Absent.make(spec, self.device, self._touched)

    def _note_boxes(self, call: LayerCall, arguments: Any) -> None:
        if call.boxes:
            self._boxes.update(zip(call.boxes, boxes_of(arguments), strict=True))

    def _touched(self, what: str) -> Any:
        if self._phase > self._stage:
            raise Reached
        index = self._segment.start + self._position
        reason = (
            f"the model computes between its layers: before layer {index}, {what} reads what a layer returned; in "
            "a row only layers read that"
        )
        self._raise(ComputesBetween(self._segment.path, reason, index) if self._position else None, reason)

    @property
    def _segment(self) -> LayerSegment:
        segments = self._layout.segments
        return segments[min(self._phase, len(segments) - 1)]

    def _refuse(self, reason: str) -> NoReturn:
        self._raise(None, reason)

    def _raise(self, refusal: NotARow | None, reason: str) -> NoReturn:
        refusal = refusal or NotARow(self._segment.path, reason)
        self._refusal = self._refusal or refusal
        raise refusal


@contextmanager
def ending(run: StageRun) -> Generator[None]:
    """End a run with the context."""
    try:
        yield
    finally:
        run.end()


class Gone:
    """A layer's result that was not kept, since nothing reads it later. `spec`: its shape and dtype, if known."""

    def __init__(self, spec: Spec | None) -> None:
        self.spec = spec

    def __deepcopy__(self, memo: object) -> Gone:
        del memo
        return self


def _is_tower(part: CalledModule | Method) -> bool:
    return isinstance(part, CalledModule) and any(isinstance(one, nn.ModuleList) for one in part.held().modules())


def _are_same(one: Any, other: Any) -> bool:
    first, second = list(leaves(one)), list(leaves(other))
    return len(first) == len(second) and all(map(_is_same, first, second))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one is other or (is_plain(one) and is_plain(other) and one == other)


def _cloned(leaf: Any) -> Any:
    # Models write in place to results of their modules, as by `x *= scale`, and do so again when forward runs
    # again.
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
