"""Runs of single layers: one layer of a task, for one microbatch, forward or in a recomputation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from rp_sched import Task

from rp_engine.context import LayerCtx, RecomputeCtx
from rp_engine.device.activations import PacketCopier
from rp_engine.device.randomness import Drawer, unseeded
from rp_engine.device.recompute import Data, Memory
from rp_engine.device.weights import Weights
from rp_engine.errors import ImpureLayer
from rp_engine.execution.effects.attributes import ModuleCopy
from rp_engine.execution.effects.boundary import Boundary, Given
from rp_engine.execution.effects.buffers import LayerBuffers
from rp_engine.execution.effects.copies import copied
from rp_engine.execution.effects.examination import Subject, examined
from rp_engine.execution.effects.kinship import Kinship
from rp_engine.execution.effects.later import LaterComparison
from rp_engine.execution.effects.precision import least_precise
from rp_engine.execution.lazy import computed
from rp_engine.execution.shortage.slots import TaskSlots
from rp_engine.execution.stage.activity import TaskActivity
from rp_engine.execution.stage.workplace import Workplace
from rp_engine.telemetry.layer_times import LayerTimes
from rp_engine.telemetry.tracing import NOTHING

_FORWARD = "in {0}, forward, microbatch {1}"
_COMPARISON = "in {0}, recomputation to compare with forward, microbatch {1}"
_RECOMPUTATION = "in {0}, recomputation, microbatch {1}"
# How often a layer is examined after it or its flags have changed: the second time only its attributes.
_EXAMINATIONS = 2
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class LayerRuns:
    """Runs a task's layers with their seeds, buffers and saved data."""

    def __init__(
        self,
        place: Workplace,
        task: Task,
        weights: Weights,
        slots: TaskSlots,
        copier: PacketCopier,
        times: LayerTimes | None,
        activity: TaskActivity,
        kinship: Kinship,
    ) -> None:
        self._place = place
        self._call = place.call
        self._twins = place.twins
        self._device = place.lane.device
        self._abilities = place.backend.abilities
        self._task = task
        self._weights = weights
        self._times = times
        self._activity = activity
        self._memory = Memory(self._device.torch_device, copier, slots)
        self._boundary = Boundary(place.call, kinship)
        self._buffers = LayerBuffers(place.call, task, weights, copier, slots)
        self._later = LaterComparison(place.call, copier, slots, self._device.torch_device)

    def run(self, layer: int, microbatch: int, tree: Any, *, recomputes: bool) -> Any:
        """Run a layer whose weights are bound; return its output. `recomputes`: recompute it."""
        self._activity.current = (_RECOMPUTATION if recomputes else _FORWARD, layer, microbatch)
        twin = self._twins.module(layer, self._call.flags[layer])
        call: _Arguments = tree if layer == 0 else ((tree,), {})
        given = self._given(layer, call)
        if self._twins.prepares(layer):
            call = (
                call[0],
                {**call[1], "prepared": self._prepared(layer, microbatch, twin, call, recomputes=recomputes)},
            )
        if recomputes or not self._wants_examination(layer):
            output = self._once(layer, microbatch, twin, call, given, recomputes=recomputes)
        else:
            output = self._examined(layer, microbatch, twin, call, given)
        if self._buffers.has(layer) or microbatch == self._task.microbatches.start:
            self._twins.check(layer)
        if self._call.compares and microbatch == 0:
            dtype = self._precision(twin)
            self._later.see(layer, microbatch, output, dtype, recomputes=recomputes)
        if self.is_for_loss(layer):
            return output
        view = self._call.view_of(layer)
        return computed(output) if view is None else view(computed(output))

    def _once(
        self,
        layer: int,
        microbatch: int,
        twin: torch.nn.Module,
        call: _Arguments,
        given: Given,
        *,
        recomputes: bool,
        also: Callable[[Data], None] | None = None,
    ) -> Any:
        """Run a layer forward or recompute it. `given`: its arguments as they were; `also`: see `Memory.first`."""
        state = self._call.state.layers[layer]

        def memory() -> LayerCtx:
            return (
                self._memory.recompute(layer, microbatch)
                if recomputes
                else self._memory.first(layer, microbatch, also)
            )

        runs: list[int] = []

        def body() -> Any:
            if runs:
                self._boundary.check_run_again(layer, given)
            runs.append(layer)
            with (
                self._place.span("forward of {}", state),
                self._timed(layer, recomputes),
                memory(),
                self._twins.expanded(layer),
            ):
                return self._twins.outside(layer, twin(*call[0], **call[1]))

        def seeded(run: Callable[[], Any]) -> Any:
            return self.seeded(Drawer("layer", layer), microbatch, run, recomputes=recomputes)

        has_buffers = self._buffers.has(layer)
        output = (
            self._buffers.run(layer, microbatch, body, seeded, recomputes=recomputes)
            if has_buffers
            else seeded(body)
        )
        self._check(layer, given, output)
        return output

    # What it may take, write and return

    def _given(self, layer: int, call: _Arguments) -> Given:
        if layer == 0:
            self._boundary.check_input(call)
            return Given.now(call)
        # Most later layers take one tensor, which is flattened in no time.
        return Given.now(call[0][0])

    def _check(self, layer: int, given: Given, output: Any) -> None:
        if self._boundary.check_written(layer, given):
            habits, drawer = self._call.habits, Drawer("layer", layer)
            habits.writers.add(drawer)
            habits.not_drawing.discard(drawer)
        if self._crosses(layer):
            self._boundary.check_output(layer, output)

    def _crosses(self, layer: int) -> bool:
        """Whether a layer's output crosses a boundary, under some plan: not if only the loss function reads it."""
        is_read_here = self.is_for_loss(layer) and not self._call.keep_outputs
        return not is_read_here and self._call.view_of(layer) is None

    # Its first runs are examined

    def _wants_examination(self, layer: int) -> bool:
        seen = self._call.habits.examined
        return max(seen[layer, True], seen[layer, self._call.with_grad]) < _EXAMINATIONS

    def _examined(self, layer: int, microbatch: int, twin: torch.nn.Module, call: _Arguments, given: Given) -> Any:
        """Run a layer forward; run it once more, and raise `ImpureLayer` if anything differs that should not."""
        saved: Data = ()

        def keep(data: Data) -> None:
            nonlocal saved
            saved = copied(data)

        def first() -> Any:
            output = self._once(layer, microbatch, twin, call, given, recomputes=False, also=keep)
            self._twins.check(layer)
            return output

        def rerun(arguments: _Arguments) -> Any:
            self._activity.current = (_COMPARISON, layer, microbatch)
            with self._buffers.starting_from(layer, buffers):
                return self._recompute(layer, microbatch, twin, arguments, copied(saved))

        buffers = self._buffers.values(layer)
        try:
            output, is_done = examined(self._subject(layer, twin), call, first, rerun)
        except ImpureLayer:
            self._twins.spoil(layer)
            raise
        # What the comparison took is no workspace of later calls, for which plans leave room.
        self._device.reset_peak_memory()
        if is_done:
            self._call.habits.examined[layer, self._call.with_grad] += 1
        return output

    def _recompute(self, layer: int, microbatch: int, twin: torch.nn.Module, call: _Arguments, saved: Data) -> Any:
        """Run a layer as a recomputation would, for nothing but its output."""
        state = self._call.state.layers[layer]

        def body() -> Any:
            with self._place.span("comparison of {}", state), RecomputeCtx(saved), self._twins.expanded(layer):
                return self._twins.outside(layer, twin(*call[0], **call[1]))

        if self._call.randomness is None:
            # The caller's generators stay as they are.
            return unseeded(self._device.generator(), body)
        return self.seeded(Drawer("layer", layer), microbatch, body, recomputes=True)

    def _subject(self, layer: int, twin: torch.nn.Module) -> Subject:
        call = self._call
        is_first = not call.habits.examined[layer, call.with_grad]
        return Subject(
            name=call.where(layer),
            modules=[ModuleCopy(*each) for each in self._twins.parts(layer)],
            dtype=self._precision(twin),
            is_exact=self._abilities.repeats_exactly,
            compares=call.with_grad and call.randomness is not None and is_first,
        )

    def _precision(self, twin: torch.nn.Module) -> torch.dtype:
        kind, rounds = self._device.torch_device.type, self._abilities.rounds_fp32
        return least_precise(twin, self._call.autocast, kind, rounds_fp32=rounds)

    def check(self) -> None:
        """Refuse layers that have changed what they must not, after the last microbatch."""
        for layer in self._task.layers:
            self._activity.current = ("in {0}, after its last microbatch", layer, -1)
            self._twins.check(layer)

    def seeded(self, drawer: Drawer, microbatch: int, body: Callable[[], Any], *, recomputes: bool) -> Any:
        """Run `body` with the seed of its drawer and microbatch, if the call draws random numbers."""
        randomness = self._call.randomness
        if randomness is None:
            return body()
        return randomness.run(self._device.generator(), drawer, microbatch, body, recomputes=recomputes)

    def is_for_loss(self, layer: int) -> bool:
        """Whether the loss function is what reads a layer's output."""
        return layer + 1 == self._call.num_layers and self._call.computes_loss(self._task)

    def _timed(self, layer: int, recomputes: bool) -> AbstractContextManager[None]:
        times, stream = self._times, self._device.compute
        return NOTHING if times is None else times.forward(layer, stream, recomputes=recomputes)

    def _prepared(
        self, layer: int, microbatch: int, twin: torch.nn.Module, call: _Arguments, *, recomputes: bool
    ) -> Any:
        if recomputes:
            return self._memory.prepared(layer, microbatch)
        prepare = cast("Callable[..., Any]", twin.prepare)
        buffers = self._weights.buffers(self._call.state.layers[layer])
        versions = self._weights.versions(buffers)
        # A seed of its own: the recomputation skips `prepare` and must still draw the numbers of forward.

        def body() -> Any:
            with self._twins.expanded(layer):
                return prepare(*call[0], **call[1])

        found = self.seeded(Drawer("prepare", layer), microbatch, body, recomputes=False)
        if self._weights.versions(buffers) != versions:
            raise TypeError("prepare wrote a buffer, but recomputation does not call it; write it in forward")
        return self._memory.keep_prepared(layer, microbatch, found)
