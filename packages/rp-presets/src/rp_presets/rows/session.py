"""One run of a model's forward on a skeleton: the code of one stage runs, everything else is replayed.

The code of stage `k` is what the model does after its list of layers `k - 1` and before its list `k`. Forward runs
from the beginning. Before the stage, layers and parts return what they returned in earlier stages if it is read
again, otherwise stand-ins. In the stage, parts run, and the calls of the next layers are recorded. After it, the
run stops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from rp_presets.errors import NotARow
from rp_presets.rows import capture
from rp_presets.rows.absent import Absent, Spec, standing_in
from rp_presets.rows.carry import BoxKey, Carry, LayerCall, Origin, Program, Value
from rp_presets.rows.layout import Layout
from rp_presets.rows.recorder import Recorder, boxes_of
from rp_presets.rows.skeleton import Part, Stub
from rp_presets.rows.trees import Box, leaves, mapped, refill


class Reached(BaseException):
    """The layers of this stage have been called, and the code behind them begins. Not an error."""


class Run:
    """A `Session` that runs the code of one stage.

    `before`: what the layers before it handed on. `at_its_code`: called where the code of the stage begins.
    """

    def __init__(
        self,
        stage: int,
        layout: Layout,
        device: torch.device,
        before: Carry | None,
        at_its_code: Callable[[], object] = lambda: None,
    ) -> None:
        self._at_its_code = at_its_code
        self._stage = stage
        self._layout = layout
        self._device = device
        self._before = before
        # How many lists of layers have been called, and how many layers of the next one.
        self._phase = 0
        self._position = 0
        self._counts: Counter[tuple[int, str]] = Counter()
        self._past: dict[Origin, Any] = {} if before is None else dict(before.program.past)
        self._parts: dict[Origin, Any] = {} if before is None else dict(before.parts)
        self._recorder = Recorder(device, self._touched, self._refuse)
        self._collected: dict[str, Any] = {}
        self._boxes: dict[int, Box] = {}
        if stage == 0:
            at_its_code()

    # What stubs and parts ask

    def layer(self, stub: Stub, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Session.layer`."""
        self._check_turn(stub)
        if stub.segment < self._stage:
            result = self._replayed(stub, (args, kwargs))
        else:
            if stub.index == 0:
                self._collected = _without_values(capture.wanted())
            like = self._layout.segments[stub.segment].results[stub.index]
            result = self._recorder.record((args, kwargs), like)
        self._position += 1
        if self._position == len(self._layout.segments[stub.segment].results):
            self._end_of_segment(stub.segment)
        return result

    def part(self, part: Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Session.part`."""
        if self._phase > self._stage:
            raise Reached
        origin = self._origin(part.path)
        if self._phase < self._stage:
            return self._again(origin)
        result = part.run(args, kwargs)
        self._past[origin] = mapped(Spec.of, result)
        if origin in self._layout.needed:
            self._parts[origin] = result
        return result

    def read(self, part: Part, name: str) -> Any:
        """See `Session.read`."""
        if self._phase > self._stage:
            raise Reached
        if self._phase == self._stage or part.inner is not None:
            return getattr(part.held(), name)
        return part.stand_in(name, self._device)

    # The end

    def carry(self, arguments: Any) -> Carry:
        """What the layers of this stage are handed; `arguments`: those of the model.

        Call it where the frames of forward are still alive: what they hold of the layers' results is kept for the
        code behind them.
        """
        if self._phase <= self._stage:
            count = len(self._layout.segments[self._phase].results)
            self._refuse(
                f"the model called {self._position} of its {count} layers; in a row each runs once, and none "
                "is skipped at random (layerdrop) or by arguments"
            )
        program = Program(self._recorder.calls(), self._recorder.empty(), self._past)
        return Carry(
            self._recorder.values,
            self._recorder.contents(),
            frozenset(),
            self._collected,
            arguments,
            self._parts,
            program,
        )

    # Inside

    def _check_turn(self, stub: Stub) -> None:
        if (stub.segment, stub.index) != (self._phase, self._position):
            if self._phase > self._stage:
                raise Reached
            self._refuse(f"layer {stub.index} is called out of turn; in a row every layer runs once, in order")

    def _end_of_segment(self, segment: int) -> None:
        self._phase, self._position = self._phase + 1, 0
        if self._phase == self._stage:
            self._at_its_code()
        if self._before is not None and segment == self._stage - 1:
            capture.deliver(self._before.collected)
            for key in self._before.written:
                refill(self._boxes[key], self._before.boxes[key])

    def _origin(self, path: str) -> Origin:
        number = self._counts[self._phase, path]
        self._counts[self._phase, path] += 1
        return self._phase, path, number

    def _again(self, origin: Origin) -> Any:
        if origin in self._parts:
            return self._parts[origin]
        if origin not in self._past:
            self._refuse(
                f"the model called {origin[1]!r} in another order when its forward ran again; a row runs the code "
                "around its layers several times, and it must take the same path"
            )
        return standing_in(self._past[origin], self._device)

    def _replayed(self, stub: Stub, arguments: Any) -> Any:
        origin = (stub.segment, "", stub.index)
        if self._before is None or stub.segment < self._stage - 1:
            result = self._again(origin)
            return mapped(lambda leaf: self._gone() if isinstance(leaf, Gone) else leaf, result)
        call = self._before.program.calls[stub.index]
        self._note_boxes(call, arguments)
        result = mapped(self._value, call.result)
        self._past[origin] = mapped(lambda leaf: GONE if isinstance(leaf, Absent) else Spec.of(leaf), result)
        if origin in self._layout.needed:
            self._parts[origin] = mapped(lambda leaf: GONE if isinstance(leaf, Absent) else leaf, result)
        return result

    def _value(self, leaf: Any) -> Any:
        if not isinstance(leaf, Value):
            return leaf
        assert self._before is not None
        found = self._before.values.get(leaf.key)
        return self._gone() if found is None else found

    def _gone(self) -> Absent:
        return Absent.make(None, self._device, self._touched)

    def _note_boxes(self, call: LayerCall, arguments: Any) -> None:
        keys = [leaf.key for leaf in leaves(call.arguments) if isinstance(leaf, BoxKey)]
        self._boxes.update(zip(keys, boxes_of(arguments), strict=True))

    def _touched(self, what: str) -> Any:
        if self._phase > self._stage:
            raise Reached
        self._refuse(
            f"the model computes between its layers: before layer {self._position}, {what} reads what a layer "
            "returned; in a row only layers read that"
        )

    def _refuse(self, reason: str) -> NoReturn:
        segments = self._layout.segments
        raise NotARow(segments[min(self._phase, len(segments) - 1)].path, reason)


class Gone:
    """A layer's result that nothing read after the layers."""

    def __deepcopy__(self, memo: object) -> Gone:
        del memo
        return self


GONE = Gone()


def _without_values(lists: dict[str, Any]) -> dict[str, Any]:
    return {key: [] if isinstance(value, list) else value for key, value in lists.items()}
