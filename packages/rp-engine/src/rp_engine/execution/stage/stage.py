"""Execution of one task on its device: forward, backward, or forward, loss and backward of a range of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, assert_never

import rp_batch
import torch
from rp_recompute.randomness import RngConsumer
from rp_sched import Task, TaskKind
from rp_telemetry.layer_times import LayerTimes
from rp_telemetry.tracing import NOTHING
from rp_transfer import Event

from rp_engine.device.activations import Arrived, Origins, enter
from rp_engine.device.packet import Slot, is_dense
from rp_engine.device.weights import Weights
from rp_engine.execution.graphs.task_graphs import TaskGraphs
from rp_engine.execution.losses import check_losses
from rp_engine.execution.shortage.task_slots import TaskSlots
from rp_engine.execution.stage.backpropagation import Backpropagation
from rp_engine.execution.stage.layer_runs import LayerRuns
from rp_engine.execution.stage.running_task import RunningTask
from rp_engine.execution.stage.task_context import TaskContext
from rp_engine.execution.stage.task_packets import TaskPackets

# After transfers of so many bytes a worker waits for its device between layers, or they would fill its memory.
_LARGE_BYTES = 64 << 20


class Stage:
    """Runs one task on its lane's device.

    `recomputes`: a forward task that recomputes. `is_part`: other parts of the same task follow; the next task's
    weights are not fetched meanwhile. `next_microbatch`: from which one on the task runs again if this fails.
    """

    def __init__(
        self,
        place: TaskContext,
        task: Task,
        weights: Weights,
        slots: TaskSlots,
        times: LayerTimes | None = None,
        *,
        recomputes: bool = False,
        is_part: bool = False,
    ) -> None:
        running = RunningTask.of(place, task, weights, slots, times, recomputes=recomputes, is_part=is_part)
        self._place = place
        self._call = place.call
        self._lane = place.lane
        self._device = place.lane.device
        self._task = task
        self._weights = weights
        self._exchange = slots
        self._times = times
        self._recomputes = recomputes
        self._is_part = is_part
        self.next_microbatch = task.microbatches.start
        # Once buffers are on their way, the host no longer has those that a second run would start from.
        self._is_returning = False
        self._activity = running.activity
        self._copier = running.copier
        self._packets = TaskPackets(running)
        self._layers = LayerRuns(running)
        self._graphs = TaskGraphs(running, self._layers)
        self._graph = Backpropagation(running, self._layers, self._graphs)

    def where(self) -> str:
        """Name the last activity in words, for an error's note."""
        return self._activity.where()

    def run(self) -> None:
        """Run all microbatches, then send the gradients and buffers to the host."""
        body = self._body()
        with self._device.computing(), self._call.ambience():
            self._lane.retainer.flush()
            self._graphs.begin()
            self._weights.upload()
            for microbatch in self._task.microbatches:
                with NOTHING if self._times is None else self._times.microbatch(self._task):
                    with self._told(microbatch):
                        body(microbatch)
                    self._note_done(microbatch)
                    self._end_of_microbatch()
            self._layers.check()
            self._is_returning = True
            self._weights.return_buffers()
            if self._task.adds_gradients:
                self._graph.send_rest()
            self._weights.end(len(self._task.layers))

    def _body(self) -> Callable[[int], None]:
        match self._task.kind:
            case TaskKind.FORWARD:
                return self._forward
            case TaskKind.BACKWARD:
                return self._backward
            case TaskKind.FUSED:
                return self._fused
            case _:
                assert_never(self._task.kind)

    def _told(self, microbatch: int) -> AbstractContextManager[None]:
        task, device = self._task, self._device
        parts = (task.kind, task.layers.start, task.layers.stop, microbatch)
        return self._place.tracer.on_stream(device, device.compute, "task", "{}[{}:{}] m{}", *parts)

    # After a failure

    @property
    def may_run_again(self) -> bool:
        """Whether the task can be run again after a failure."""
        # What layers have written to the state of a call, they would write again.
        return not (self._is_returning and self._weights.has_written) and not self._call.holds_state

    def withdraw(self) -> None:
        """After a failure, free all device memory; the task keeps its turns and will run again."""
        with self._device.computing():
            self._copier.let_go(self._device.compute.record())
            self._weights.withdraw()
            self._graphs.drop()

    def release_after_failure(self) -> None:
        """Release the task's device memory after the work already queued there. For a run that has failed."""
        with self._device.computing():
            self._copier.let_go(self._device.compute.record())
            self._weights.abandon()
            self._weights.release()

    # The end of a microbatch, or of a layer with large transfers

    def _note_done(self, microbatch: int) -> None:
        if not self._task.sends_outputs or self._recomputes:
            return
        self._exchange.note_done(self._task.layers, microbatch)
        # A second run starts from the buffers on the host, which are those before the first microbatch.
        if not self._is_part and not self._weights.has_written:
            self._exchange.let_go(microbatch)
            self.next_microbatch = microbatch + 1

    def _end_of_microbatch(self) -> None:
        self._weights.sums.note_microbatch()
        self._end_of_part()
        if not self._is_part:
            self._lane.prefetch_next()

    def _end_of_part(self, still: Sequence[Any] = ()) -> None:
        done = self._device.compute.record()
        self._copier.let_go(done, still)
        self._pace(done)

    def _pace(self, done: Event) -> None:
        self._copier.carried_bytes = 0
        self._lane.pace(done)
        if self._is_part:
            self._lane.settle_device()

    # Forward: each layer's graph is dropped at once; it only shows which results require grad.

    def _forward(self, microbatch: int) -> None:
        layers = self._task.layers
        arrived, origins = self._packets.inputs(layers.start, microbatch)
        while layers:
            layer = layers.start
            if self._layers.is_for_loss(layer):
                self._weights.bind(self._call.state.layers[layer], training=False)
                self._end_with_loss(layer, microbatch, arrived.tree())
                return
            replayed = self._replayed(layers, microbatch, arrived) if self._graphs.is_used else None
            # No other name for an output: it would keep the graph while the next layer runs.
            if replayed is None and self._call.holds_state and not self._graphs.is_used:
                span = self._to_boundary(layers, microbatch)
                done, arrived = len(span), _cut(self._run_all(span, microbatch, arrived.tree()), origins)
            elif replayed is None:
                done, arrived = 1, _cut(self._run(layer, microbatch, arrived.tree()), origins)
            else:
                done, arrived = replayed[0], _cut(replayed[1], origins)
            layers = layers[done:]
            self._packets.put_activations(layers.start, microbatch, arrived, origins)
            if layers and self._copier.carried_bytes >= _LARGE_BYTES:
                # No release of the stage's inputs: a layer may pass them through to the next one.
                self._pace(self._device.compute.record())

    def _run(self, layer: int, microbatch: int, tree: Any) -> Any:
        self._weights.bind(self._call.state.layers[layer], training=False)
        return self._layers.run(layer, microbatch, tree, recomputes=self._recomputes)

    def _run_all(self, layers: range, microbatch: int, tree: Any) -> Any:
        """Run layers one after another that have no graph to cut, and whose outputs nothing else takes."""
        for layer in layers:
            tree = self._run(layer, microbatch, tree)
        return tree

    def _replayed(self, layers: range, microbatch: int, arrived: Arrived) -> tuple[int, Any] | None:
        span = self._to_boundary(layers, microbatch)
        return self._graphs.run(span, microbatch, arrived.tree(), recomputes=self._recomputes)

    def _to_boundary(self, layers: range, microbatch: int) -> range:
        """The first of some layers, up to where another task takes activations."""
        stop = layers.start + 1
        while stop < layers.stop and not self._exchange.is_expected(Slot("input", stop, microbatch)):
            stop += 1
        return range(layers.start, stop)

    def _end_with_loss(self, layer: int, microbatch: int, tree: Any) -> None:
        output = self._layers.run(layer, microbatch, tree, recomputes=self._recomputes)
        self._packets.put_output(layer + 1, microbatch, output)
        self._loss(output, microbatch)

    # Forward, loss and backward

    def _fused(self, microbatch: int) -> None:
        layers = self._task.layers
        arrived, _ = self._packets.inputs(layers.start, microbatch)
        output = self._graph.forward(layers, microbatch, arrived.tree(), recomputes=False)
        self._packets.put_output(layers.stop, microbatch, output)
        if self._times is not None:
            self._times.enter_backward(layers[-1], self._device.compute)
        losses = self._loss(output, microbatch)
        self._activity.current = ("in the loss function, backward, microbatch {1}", -1, microbatch)
        del output
        self._graph.backward(losses, None, microbatch)
        grads = [None if grad_leaf is None else grad_leaf.grad for grad_leaf in arrived.grad_leaves]
        self._packets.put_grads(layers.start, microbatch, grads)

    def _loss(self, output: Any, microbatch: int) -> list[torch.Tensor]:
        label = self._packets.label(microbatch)
        self._activity.current = ("in the loss function, forward, microbatch {1}", -1, microbatch)
        loss_fn = self._call.loss_fn
        assert loss_fn is not None
        with self._place.span("loss function"):
            found = self._layers.seeded(
                RngConsumer("loss"), microbatch, lambda: loss_fn(output, label), recomputes=False
            )
        losses, treedef = check_losses(found, with_grad=self._call.with_grad)
        self._call.losses_seen.check(len(losses))
        self._packets.put_losses(microbatch, treedef, losses)
        return losses

    # Backward

    def _backward(self, microbatch: int) -> None:
        layers = self._task.layers
        grads = self._packets.grads(layers.stop, microbatch)
        whole = self._call.grain == "stage"
        for part in [layers] if whole else [range(layer, layer + 1) for layer in reversed(layers)]:
            grads = self._backward_through(part, microbatch, grads)
            if part.start > layers.start and self._copier.carried_bytes >= _LARGE_BYTES:
                # `grads` stay: they may be views of the gradients that arrived.
                self._end_of_part(still=grads)
        self._packets.put_grads(layers.start, microbatch, grads)

    def _backward_through(self, layers: range, microbatch: int, grads: Sequence[Any]) -> Sequence[Any]:
        arrived, _ = self._packets.inputs(layers.start, microbatch)
        output = self._graph.forward(layers, microbatch, arrived.tree(), recomputes=True)
        leaves = rp_batch.flatten(output)[0]
        pairs = [
            (leaf, grad)
            for leaf, grad in zip(leaves, grads, strict=True)
            if grad is not None and isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        del output, leaves
        self._device.compute.touch(
            read=[grad for _, grad in pairs if is_dense(grad)], what="gradients of activations"
        )
        if pairs:
            self._graph.backward([leaf for leaf, _ in pairs], [grad for _, grad in pairs], microbatch)
        return [None if grad_leaf is None else grad_leaf.grad for grad_leaf in arrived.grad_leaves]


def _cut(output: Any, origins: Origins) -> Arrived:
    """A layer's output without its graph, as what arrives at the next one."""
    leaves, treedef = rp_batch.flatten(output)
    grads = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
    inside, grad_leaves = enter(leaves, grads)
    for leaf, new in zip(leaves, inside, strict=True):
        host = origins.find(leaf)
        if host is not None and new is not leaf:
            origins.add(new, host)
    return Arrived(treedef, inside, grad_leaves)
