"""Runs of single layers: one layer of a task, for one microbatch, forward or in a recomputation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from rp_sched import Task

from roundpipe.device.activations import Courier
from roundpipe.device.randomness import Drawer
from roundpipe.device.recompute import Memory
from roundpipe.device.weights import Weights
from roundpipe.execution.effects.buffers import LayerBuffers
from roundpipe.execution.lazy import computed
from roundpipe.execution.shortage.slots import TaskSlots
from roundpipe.execution.stage.activity import TaskActivity
from roundpipe.execution.stage.workplace import Workplace
from roundpipe.telemetry.layer_times import LayerTimes
from roundpipe.telemetry.tracing import NOTHING

_FORWARD = "in {0}, forward, microbatch {1}"
_RECOMPUTATION = "in {0}, recomputation, microbatch {1}"
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class LayerRuns:
    """Runs a task's layers with their seeds, buffers and saved data."""

    def __init__(
        self,
        place: Workplace,
        task: Task,
        weights: Weights,
        slots: TaskSlots,
        courier: Courier,
        times: LayerTimes | None,
        activity: TaskActivity,
    ) -> None:
        self._place = place
        self._call = place.call
        self._twins = place.twins
        self._device = place.lane.device
        self._task = task
        self._weights = weights
        self._times = times
        self._activity = activity
        self._memory = Memory(self._device.torch_device, courier, slots)
        self._buffers = LayerBuffers(place.call, task, weights, courier, slots)

    def run(self, layer: int, microbatch: int, tree: Any, *, again: bool) -> Any:
        """Run a layer whose weights are bound; return its output. `again`: recompute it."""
        self._activity.current = (_RECOMPUTATION if again else _FORWARD, layer, microbatch)
        twin, state = self._twins.module(layer, self._call.flags[layer]), self._call.state.layers[layer]

        call: _Arguments = tree if layer == 0 else ((tree,), {})
        if self._twins.prepares(layer):
            call = (call[0], {**call[1], "prepared": self._prepared(layer, microbatch, twin, call, again=again)})
        enter_memory = self._memory.again if again else self._memory.first

        def body() -> Any:
            with (
                self._place.span("forward of {}", state),
                self._timed(layer, again),
                enter_memory(layer, microbatch),
                self._twins.expanded(layer),
            ):
                return self._twins.outside(layer, twin(*call[0], **call[1]))

        def seeded(run: Callable[[], Any]) -> Any:
            return self.seeded(Drawer("layer", layer), microbatch, run, again=again)

        has_buffers = self._buffers.has(layer)
        output = self._buffers.run(layer, microbatch, body, seeded, again=again) if has_buffers else seeded(body)
        if has_buffers or microbatch == self._task.microbatches.start:
            self._twins.check(layer)
        return output if self._is_for_loss(layer) else computed(output)

    def check(self) -> None:
        """Refuse layers that have changed what they must not, after the last microbatch."""
        for layer in self._task.layers:
            self._activity.current = ("in {0}, after its last microbatch", layer, -1)
            self._twins.check(layer)

    def seeded(self, drawer: Drawer, microbatch: int, body: Callable[[], Any], *, again: bool) -> Any:
        """Run `body` with the seed of its drawer and microbatch, if the call draws random numbers."""
        randomness = self._call.randomness
        if randomness is None:
            return body()
        return randomness.run(self._device.generator(), drawer, microbatch, body, again=again)

    def _is_for_loss(self, layer: int) -> bool:
        """Whether the loss function is what reads a layer's output."""
        return self._task.computes_loss and layer + 1 == self._call.num_layers

    def _timed(self, layer: int, again: bool) -> AbstractContextManager[None]:
        times, stream = self._times, self._device.compute
        return NOTHING if times is None else times.forward(layer, stream, again=again)

    def _prepared(
        self, layer: int, microbatch: int, twin: torch.nn.Module, call: _Arguments, *, again: bool
    ) -> Any:
        if again:
            return self._memory.prepared(layer, microbatch)
        prepare = cast("Callable[..., Any]", twin.prepare)
        buffers = self._weights.buffers(self._call.state.layers[layer])
        versions = self._weights.versions(buffers)
        # A seed of its own: the recomputation skips `prepare` and must still draw the numbers of forward.

        def body() -> Any:
            with self._twins.expanded(layer):
                return prepare(*call[0], **call[1])

        found = self.seeded(Drawer("prepare", layer), microbatch, body, again=False)
        if self._weights.versions(buffers) != versions:
            raise TypeError("prepare wrote a buffer, but recomputation does not call it; write it in forward")
        return self._memory.keep_prepared(layer, microbatch, found)
