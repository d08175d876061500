"""Execution of one task on its device: forward, backward, or forward, loss and backward of a range of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, assert_never, cast

import rp_batch
import torch
from rp_sched import Task, TaskKind
from rp_transfer import Backend, Event

from roundpipe.device.activations import Arrived, Courier, Origins, enter
from roundpipe.device.packet import Slot, is_dense
from roundpipe.device.randomness import Drawer
from roundpipe.device.recompute import Memory
from roundpipe.device.replica import Twins
from roundpipe.device.transfers import Delivery
from roundpipe.device.weights import Weights
from roundpipe.execution.call import Call
from roundpipe.execution.effects.buffers import LayerBuffers
from roundpipe.execution.lazy import computed, is_lazy, value_of
from roundpipe.execution.losses import check_losses
from roundpipe.execution.shortage.slots import TaskSlots
from roundpipe.runtime.runtime import Lane
from roundpipe.state.block import Block
from roundpipe.telemetry.layer_times import LayerTimes
from roundpipe.telemetry.tracing import NOTHING, Tracer

# After transfers of so many bytes a worker waits for its device between layers, or they would fill its memory.
_LARGE_BYTES = 64 << 20
# Gradients leave during backward in groups of so many bytes of weights: each departure takes the GIL from the
# thread that launches backward.
_DEPARTURE_BYTES = 128 << 20
_FORWARD = "in {0}, forward, microbatch {1}"
_RECOMPUTATION = "in {0}, recomputation, microbatch {1}"


class Outbox(Protocol):
    """Sends gradients to the host."""

    def send_home(self, delivery: Delivery, where: str) -> None:
        """Submit a delivery; `where` names it in words for an error's note."""
        ...


@dataclass(frozen=True, slots=True)
class Workplace:
    """Where the tasks of a call run on one device, and what they share there."""

    call: Call
    lane: Lane
    backend: Backend
    twins: Twins
    outbox: Outbox
    tracer: Tracer

    def stage(
        self,
        task: Task,
        weights: Weights,
        slots: TaskSlots,
        times: LayerTimes | None = None,
        *,
        again: bool = False,
        is_part: bool = False,
    ) -> Stage:
        """A task at this place; see `Stage`."""
        return Stage(self, task, weights, slots, times, again=again, is_part=is_part)


class Stage:
    """Runs one task on its lane's device.

    `again`: a forward task that recomputes. `is_part`: other parts of the same task follow; the next task's
    weights are not fetched meanwhile. `next_microbatch`: from which one on the task runs again if this fails.
    """

    def __init__(
        self,
        place: Workplace,
        task: Task,
        weights: Weights,
        slots: TaskSlots,
        times: LayerTimes | None,
        *,
        again: bool,
        is_part: bool,
    ) -> None:
        call, lane = place.call, place.lane
        self._times = times
        self._tracer = place.tracer
        self._call = call
        self._task = task
        self._again = again
        self._is_part = is_part
        self._lane = lane
        self._device = lane.device
        self._twins = place.twins
        self._weights = weights
        self._exchange = slots
        self._outbox = place.outbox
        self._courier = Courier(place.backend, lane, weights.holds, place.tracer)
        self._memory = Memory(lane.device.torch_device, self._courier, slots)
        self.next_microbatch = task.microbatches.start
        # Once buffers are on their way, the host no longer has those that a second run would start from.
        self._is_returning = False
        # Current activity, layer and microbatch; `where` formats the layer's name as ``{0}``, the microbatch as
        # ``{1}``.
        self._place: tuple[str, int, int] | None = None
        self._buffers = LayerBuffers(call, task, weights, self._courier, slots)

    def where(self) -> str:
        """Name the last activity in words, for an error's note."""
        if self._place is None:
            return f"{self._task!r}, on {self._device.name}"
        words, layer, microbatch = self._place
        number = microbatch + self._call.first_microbatch
        return f"{words.format(self._call.where(layer), number)}, on {self._device.name}"

    def run(self) -> None:
        """Run all microbatches, then send the gradients and buffers to the host."""
        body = self._body()
        with self._device.computing(), self._call.ambience():
            self._lane.retainer.flush()
            self._weights.upload()
            for microbatch in self._task.microbatches:
                with NOTHING if self._times is None else self._times.microbatch(self._task):
                    with self._told(microbatch):
                        body(microbatch)
                    self._note_done(microbatch)
                    self._end_of_microbatch()
            self._check_layers()
            self._is_returning = True
            self._weights.return_buffers()
            if self._task.adds_gradients:
                self._send_home(self._weights.all_sums())
            self._weights.release()

    @property
    def may_run_again(self) -> bool:
        """Whether the task can be run again after a failure."""
        return not (self._is_returning and self._weights.has_written)

    def withdraw(self) -> None:
        """After a failure, free all device memory; the task keeps its turns and will run again."""
        with self._device.computing():
            self._courier.let_go(self._device.compute.record())
            self._weights.withdraw()

    def _note_done(self, microbatch: int) -> None:
        if not self._task.sends_outputs or self._again:
            return
        self._exchange.note_done(self._task.layers, microbatch)
        # A second run starts from the buffers on the host, which are those before the first microbatch.
        if not self._is_part and not self._weights.has_written:
            self._exchange.let_go(microbatch)
            self.next_microbatch = microbatch + 1

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

    def _send_home(self, blocks: Sequence[Block]) -> None:
        where = f"{self._task!r}, sending gradients to the host, from {self._device.name}"
        self._outbox.send_home(self._weights.deliver(blocks), where)

    def _check_layers(self) -> None:
        for layer in self._task.layers:
            self._place = ("in {0}, after its last microbatch", layer, -1)
            self._twins.check(layer)

    # Spans for the tracer

    def _told(self, microbatch: int) -> AbstractContextManager[None]:
        task, device = self._task, self._device
        parts = (task.kind, task.layers.start, task.layers.stop, microbatch)
        return self._tracer.on_stream(device, device.compute, "task", "{}[{}:{}] m{}", *parts)

    def _part(self, name: str, *parts: object) -> AbstractContextManager[None]:
        return self._tracer.on_stream(self._device, self._device.compute, "layer", name, *parts)

    def _waiting(self, reason: str, what: str) -> AbstractContextManager[None]:
        return self._tracer.waiting(self._device, reason, what)

    def step_aside(self) -> None:
        """Release the task's device memory after the work already queued there. For a run that has failed."""
        with self._device.computing():
            self._courier.let_go(self._device.compute.record())
            self._weights.abandon()
            self._weights.release()

    def _end_of_microbatch(self) -> None:
        self._weights.note_microbatch()
        self._end_of_part()
        if not self._is_part:
            self._lane.prefetch_next()

    def _end_of_part(self, still: Sequence[Any] = ()) -> None:
        done = self._device.compute.record()
        self._courier.let_go(done, still)
        self._pace(done)

    def _pace(self, done: Event) -> None:
        self._courier.carried_bytes = 0
        self._lane.pace(done)
        if self._is_part:
            self._lane.settle_device()

    # Forward: each layer's graph is dropped at once; it only shows which results require grad.

    def _forward(self, microbatch: int) -> None:
        arrived, origins = self._arrive(self._task.layers.start, microbatch)
        for layer in self._task.layers:
            self._weights.bind(self._call.state.layers[layer], training=False)
            # No name for the output: it would keep the graph while the next layer runs.
            arrived = self._cut(self._layer(layer, microbatch, arrived.tree(), again=self._again), origins)
            self._hand_over(layer + 1, microbatch, arrived, origins)
            if layer + 1 < self._task.layers.stop and self._courier.carried_bytes >= _LARGE_BYTES:
                # No release of the stage's inputs: a layer may pass them through to the next one.
                self._pace(self._device.compute.record())

    def _cut(self, output: Any, origins: Origins) -> Arrived:
        leaves, treedef = rp_batch.flatten(output)
        grads = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
        inside, doors = enter(leaves, grads)
        for leaf, new in zip(leaves, inside, strict=True):
            host = origins.find(leaf)
            if host is not None and new is not leaf:
                origins.add(new, host)
        return Arrived(treedef, inside, doors)

    def _hand_over(self, boundary: int, microbatch: int, arrived: Arrived, origins: Origins) -> None:
        slot = Slot("input", boundary, microbatch)
        if self._exchange.is_expected(slot):
            grads = [door is not None for door in arrived.doors]
            goes_on = boundary < self._task.layers.stop
            # The caller may write the outputs, so these are copies of their own, not memory that backward reads.
            known = origins if boundary < self._call.num_layers else Origins()
            packet = self._courier.send(arrived.treedef, arrived.inside, grads, known, in_use=goes_on)
            self._exchange.put(slot, packet)
            for leaf, host in zip(arrived.inside, packet.leaves, strict=True):
                if goes_on and isinstance(leaf, torch.Tensor):
                    origins.add(leaf, host)

    def _arrive(self, boundary: int, microbatch: int) -> tuple[Arrived, Origins]:
        self._place = ("before {0}, microbatch {1}", boundary, microbatch)
        with self._waiting("stage before", "this layer's inputs, from the stage before"):
            packet = self._exchange.take(Slot("input", boundary, microbatch))
        grads = packet.grads if self._call.with_grad else [False] * len(packet.grads)
        inside, doors = enter(self._courier.bring(packet), grads)
        origins = Origins()
        for leaf, host in zip(inside, packet.leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                origins.add(leaf, host)
        return Arrived(packet.treedef, inside, doors), origins

    # One layer

    def _layer(self, layer: int, microbatch: int, tree: Any, *, again: bool) -> Any:
        self._place = (_RECOMPUTATION if again else _FORWARD, layer, microbatch)
        twin, state = self._twins.module(layer, self._call.flags[layer]), self._call.state.layers[layer]

        call: tuple[tuple[Any, ...], dict[str, Any]] = tree if layer == 0 else ((tree,), {})
        if self._twins.prepares(layer):
            call = (call[0], {**call[1], "prepared": self._prepared(layer, microbatch, twin, call, again=again)})
        enter_memory = self._memory.again if again else self._memory.first

        def body() -> Any:
            with (
                self._part("forward of {}", state),
                self._timed(layer, again),
                enter_memory(layer, microbatch),
                self._twins.expanded(layer),
            ):
                return self._twins.outside(layer, twin(*call[0], **call[1]))

        def seeded(run: Callable[[], Any]) -> Any:
            return self._seeded(Drawer("layer", layer), microbatch, run, again=again)

        has_buffers = self._buffers.has(layer)
        output = self._buffers.run(layer, microbatch, body, seeded, again=again) if has_buffers else seeded(body)
        if has_buffers or microbatch == self._task.microbatches.start:
            self._twins.check(layer)
        return output if self._is_for_loss(layer) else computed(output)

    def _is_for_loss(self, layer: int) -> bool:
        """Whether the loss function is what reads a layer's output."""
        return self._task.computes_loss and layer + 1 == self._call.num_layers

    def _timed(self, layer: int, again: bool) -> AbstractContextManager[None]:
        times, stream = self._times, self._device.compute
        return NOTHING if times is None else times.forward(layer, stream, again=again)

    def _prepared(
        self,
        layer: int,
        microbatch: int,
        twin: torch.nn.Module,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        *,
        again: bool,
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

        found = self._seeded(Drawer("prepare", layer), microbatch, body, again=False)
        if self._weights.versions(buffers) != versions:
            raise TypeError("prepare wrote a buffer, but recomputation does not call it; write it in forward")
        return self._memory.keep_prepared(layer, microbatch, found)

    def _seeded(self, drawer: Drawer, microbatch: int, body: Callable[[], Any], *, again: bool) -> Any:
        randomness = self._call.randomness
        if randomness is None:
            return body()
        run = randomness.again if again else randomness.forward
        return run(self._device.generator(), drawer, microbatch, body)

    def _through(self, layers: Iterable[int], microbatch: int, tree: Any, *, again: bool) -> Any:
        for layer in layers:
            self._weights.bind(self._call.state.layers[layer], training=True)
            if self._is_part:
                # Before the layer allocates: a hole that its largest temporaries leave would be split for them.
                self._weights.make_sums()
            before = self._used_bytes(microbatch)
            tree = self._layer(layer, microbatch, tree, again=again)
            if self._times is not None and before is not None:
                self._times.keep(layer, (self._used_bytes(microbatch) or 0) - before)
            self._mark_backward(layer, microbatch, tree)
        return tree

    def _used_bytes(self, microbatch: int) -> int | None:
        # Measured on the first microbatch: no later one is larger.
        is_measured = self._times is not None and microbatch == self._task.microbatches.start
        # What stays expanded of the layer before goes when the next one is expanded.
        return self._device.memory().used_bytes - self._twins.expansions.nbytes if is_measured else None

    def _mark_backward(self, layer: int, microbatch: int, output: Any) -> None:
        place = ("in {0}, backward, microbatch {1}", layer, microbatch)

        def enter_layer(grad: torch.Tensor | None = None) -> None:
            del grad
            self._place = place
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

    def _send_complete(self, layer: int) -> None:
        # Backward runs through later layers first: it has passed all layers above this one.
        blocks = self._weights.complete_above(layer, self._task.layers)
        if sum(block.nbytes for block in blocks) >= _DEPARTURE_BYTES:
            self._send_home(blocks)

    # Forward, loss and backward

    def _fused(self, microbatch: int) -> None:
        layers = self._task.layers
        arrived, _ = self._arrive(layers.start, microbatch)
        output = self._through(layers, microbatch, arrived.tree(), again=False)
        if self._exchange.is_expected(Slot("input", layers.stop, microbatch)):
            found, treedef = rp_batch.flatten(output)
            leaves = list(map(value_of, found))
            packet = self._courier.send(treedef, leaves, [False] * len(leaves), Origins(), in_use=True)
            self._exchange.put(Slot("input", layers.stop, microbatch), packet)
        if self._times is not None:
            self._times.enter_backward(layers[-1], self._device.compute)
        losses = self._loss(output, microbatch)
        del output
        self._propagate(losses, None)
        self._return_grads(layers.start, microbatch, [None if d is None else d.grad for d in arrived.doors])

    def _loss(self, output: Any, microbatch: int) -> list[torch.Tensor]:
        labels = self._exchange.take(Slot("label", self._call.num_layers, microbatch))
        label = rp_batch.unflatten(labels.treedef, self._courier.bring(labels))
        self._place = ("in the loss function, forward, microbatch {1}", -1, microbatch)
        loss_fn = self._call.loss_fn
        assert loss_fn is not None
        with self._part("loss function"):
            found = self._seeded(Drawer("loss"), microbatch, lambda: loss_fn(output, label), again=False)
        losses, treedef = check_losses(found)
        packet = self._courier.send(treedef, losses, [False] * len(losses), Origins())
        self._exchange.put(Slot("loss", self._call.num_layers, microbatch), packet)
        self._place = ("in the loss function, backward, microbatch {1}", -1, microbatch)
        return losses

    # Backward

    def _backward(self, microbatch: int) -> None:
        layers = self._task.layers
        grads = self._arriving_grads(layers.stop, microbatch)
        whole = self._call.grain == "stage"
        for part in [layers] if whole else [range(layer, layer + 1) for layer in reversed(layers)]:
            grads = self._backward_through(part, microbatch, grads)
            if part.start > layers.start and self._courier.carried_bytes >= _LARGE_BYTES:
                # `grads` stay: they may be views of the gradients that arrived.
                self._end_of_part(still=grads)
        self._return_grads(layers.start, microbatch, grads)

    def _arriving_grads(self, boundary: int, microbatch: int) -> Sequence[Any]:
        self._place = ("after {0}, backward, microbatch {1}", boundary - 1, microbatch)
        with self._waiting("stage before", "the gradients of this layer's outputs, from the stage before"):
            packet = self._exchange.take(Slot("grad", boundary, microbatch))
        return self._courier.bring(packet)

    def _backward_through(self, layers: range, microbatch: int, grads: Sequence[Any]) -> Sequence[Any]:
        arrived, _ = self._arrive(layers.start, microbatch)
        output = self._through(layers, microbatch, arrived.tree(), again=True)
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
            self._propagate([leaf for leaf, _ in pairs], [grad for _, grad in pairs])
        return [None if door is None else door.grad for door in arrived.doors]

    def _propagate(self, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor] | None) -> None:
        with self._call.without_autocast(), self._part("backward"), self._weights.adding():
            torch.autograd.backward(tensors, grads)
        self._twins.expansions.forget()
        if self._times is not None:
            self._times.leave_backward(self._device.compute)

    def _return_grads(self, boundary: int, microbatch: int, grads: Sequence[torch.Tensor | None]) -> None:
        slot = Slot("grad", boundary, microbatch)
        if self._exchange.is_expected(slot):
            packet = self._courier.send(None, grads, [False] * len(grads), Origins())
            self._exchange.put(slot, packet)
