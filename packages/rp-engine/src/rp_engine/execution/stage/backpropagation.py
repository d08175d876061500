"""Backpropagation through the layers of a task: their graph, the backward pass, and gradients that leave."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import rp_batch
import torch
from rp_state.block import Block
from rp_telemetry.tracing import NOTHING

from rp_engine.execution.graphs.replay_steps import ignore
from rp_engine.execution.graphs.task_graphs import TaskGraphs
from rp_engine.execution.lazy import is_lazy
from rp_engine.execution.stage.layer_runs import LayerRuns
from rp_engine.execution.stage.running_task import RunningTask

# Gradients leave during backward in groups of so many bytes of weights: each departure takes the GIL from the
# thread that launches backward.
_DEPARTURE_BYTES = 128 << 20


class Backpropagation:
    """Runs layers with a graph, then backward through it.

    Gradients of a layer leave when backward has passed it for the last microbatch.
    """

    def __init__(self, running: RunningTask, layers: LayerRuns, graphs: TaskGraphs) -> None:
        self._place = running.place
        self._call = running.place.call
        self._twins = running.place.twins
        self._device = running.place.lane.device
        self._task = running.task
        self._weights = running.weights
        self._layers = layers
        self._times = running.times
        self._activity = running.activity
        self._graphs = graphs
        self._is_part = running.is_part

    def forward(self, layers: range, microbatch: int, tree: Any, *, recomputes: bool) -> Any:
        """Run layers, keeping their graph; return the output of the last one. `recomputes`: recompute them."""
        graphs, layer = self._graphs, layers.start
        while layer < layers.stop:
            rest = range(layer, layers.stop)
            replayed = self._replayed(rest, microbatch, tree, recomputes=recomputes) if graphs.is_used else None
            if replayed is None:
                done, tree = 1, self._run(layer, microbatch, tree, recomputes=recomputes)
            else:
                done, tree = replayed
            layer += done
            self._mark_backward(layer - 1, microbatch, tree)
        return tree

    def _replayed(self, layers: range, microbatch: int, tree: Any, *, recomputes: bool) -> tuple[int, Any] | None:
        passed = self._send_complete if microbatch == self._task.microbatches[-1] else ignore
        return self._graphs.run(layers, microbatch, tree, recomputes=recomputes, passed=passed)

    def _run(self, layer: int, microbatch: int, tree: Any, *, recomputes: bool) -> Any:
        self._weights.bind(self._call.state.layers[layer], training=True)
        if self._is_part:
            # Before the layer allocates: a hole that its largest temporaries leave would be split for them.
            self._weights.sums.make()
        before = None if self._times is None else self._used_bytes(microbatch)
        tree = self._layers.run(layer, microbatch, tree, recomputes=recomputes)
        if self._times is not None and before is not None:
            self._times.keep(layer, (self._used_bytes(microbatch) or 0) - before)
        return tree

    def _used_bytes(self, microbatch: int) -> int | None:
        # Measured on the first microbatch: no later one is larger.
        is_measured = microbatch == self._task.microbatches.start
        # What stays expanded of the layer before goes when the next one is expanded.
        return self._device.memory().used_bytes - self._twins.expansions.nbytes if is_measured else None

    def _mark_backward(self, layer: int, microbatch: int, output: Any) -> None:
        activity = ("in {0}, backward, microbatch {1}", layer, microbatch)

        def enter_layer(grad: torch.Tensor | None = None) -> None:
            del grad
            self._activity.current = activity
            if self._times is not None:
                self._times.enter_backward(layer, self._device.compute)
            self._twins.enter_backward(layer)
            if microbatch == self._task.microbatches[-1]:
                self._send_complete(layer)

        for leaf in rp_batch.flatten(output)[0]:
            if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
                continue
            if is_lazy(leaf):
                leaf.on_backward(enter_layer)
            elif not leaf.is_leaf:
                # A layer's own parameter would keep the hook, and with it this task.
                leaf.register_hook(enter_layer)  # pyright: ignore[reportUnknownMemberType]

    def backward(
        self, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor] | None, microbatch: int
    ) -> None:
        """Run the backward pass from these tensors; gradients of weights are added to the task's sums."""
        # The lock comes last: `adding` may wait for other tasks, which may wait for the lock.
        with (
            self._call.without_autocast(),
            self._place.span("backward"),
            self._weights.sums.adding(),
            self._generator_lock(microbatch),
        ):
            torch.autograd.backward(tensors, grads)
        self._twins.expansions.forget()
        if self._times is not None:
            self._times.leave_backward(self._device.compute)

    def _generator_lock(self, microbatch: int) -> AbstractContextManager[None]:
        randomness, task = self._call.randomness, self._task
        if randomness is None:
            return NOTHING
        return randomness.backward(task.layers, microbatch, with_loss=task.computes_loss)

    # Gradients on their way to the host

    def _send_complete(self, layer: int) -> None:
        if self._weights.sums.nbytes < _DEPARTURE_BYTES:
            return
        # Backward runs through later layers first: it has passed all layers above this one.
        blocks = self._weights.sums.complete_above(layer, self._task.layers)
        if sum(block.nbytes for block in blocks) >= _DEPARTURE_BYTES:
            self._send(blocks)

    def send_rest(self) -> None:
        """Send the gradients that have not left yet; after the last microbatch."""
        self._send(self._weights.sums.owed())

    def _send(self, blocks: Sequence[Block]) -> None:
        where = f"{self._task!r}, sending gradients to the host, from {self._device.name}"
        self._place.outbox.send_to_host(self._weights.sums.deliver(blocks), where)
