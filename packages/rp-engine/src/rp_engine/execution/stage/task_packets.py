"""The packets of a task: what it takes from the exchange to its device, and what it puts there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import rp_batch
import torch

from rp_engine.device.activations import Arrived, Origins, enter
from rp_engine.device.packet import Slot
from rp_engine.execution.lazy import value_of
from rp_engine.execution.stage.running_task import RunningTask


class TaskPackets:
    """Takes activations, gradients and labels for a task, and puts what the task makes of them."""

    def __init__(self, running: RunningTask) -> None:
        self._call = running.place.call
        self._device = running.place.lane.device
        self._tracer = running.place.tracer
        self._task = running.task
        self._exchange = running.slots
        self._copier = running.copier
        self._activity = running.activity
        self._aliases = running.aliases

    # Taken

    def inputs(self, boundary: int, microbatch: int) -> tuple[Arrived, Origins]:
        """Take the activations before a layer, with their host copies."""
        self._activity.current = ("before {0}, microbatch {1}", boundary, microbatch)
        what = "this layer's inputs, from the stage before"
        with self._tracer.waiting(self._device, "stage before", what):
            packet = self._exchange.take(Slot("input", boundary, microbatch))
        grads = packet.grads if self._call.with_grad else [False] * len(packet.grads)
        inside, grad_leaves = enter(self._copier.bring(packet), grads)
        self._aliases.arrive(inside, packet.aliases)
        origins = Origins()
        for leaf, host in zip(inside, packet.leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                origins.add(leaf, host)
        return Arrived(packet.treedef, inside, grad_leaves), origins

    def grads(self, boundary: int, microbatch: int) -> Sequence[Any]:
        """Take the gradients of the activations at a boundary."""
        self._activity.current = ("after {0}, backward, microbatch {1}", boundary - 1, microbatch)
        what = "the gradients of this layer's outputs, from the stage before"
        with self._tracer.waiting(self._device, "stage before", what):
            packet = self._exchange.take(Slot("grad", boundary, microbatch))
        return self._copier.bring(packet)

    def label(self, microbatch: int) -> Any:
        """Take a microbatch's label."""
        packet = self._exchange.take(Slot("label", self._call.num_layers, microbatch))
        return rp_batch.unflatten(packet.treedef, self._copier.bring(packet))

    # Put

    def put_activations(self, boundary: int, microbatch: int, arrived: Arrived, origins: Origins) -> None:
        """Put a layer's output, if anything takes it, and add the host copies to `origins`."""
        slot = Slot("input", boundary, microbatch)
        if self._exchange.is_expected(slot):
            grads = [grad_leaf is not None for grad_leaf in arrived.grad_leaves]
            goes_on = boundary < self._task.layers.stop
            # The caller may write the outputs, so these are copies of their own, not memory that backward reads.
            known = origins if boundary < self._call.num_layers else Origins()
            if boundary == self._call.num_layers and self._call.output_stays:
                self._exchange.put(slot, self._copier.stay(arrived.treedef, arrived.inside, origins))
                return
            aliases = self._aliases.of(arrived.inside)
            packet = self._copier.send(
                arrived.treedef, arrived.inside, grads, known, in_use=goes_on, aliases=aliases
            )
            self._exchange.put(slot, packet)
            for leaf, host in zip(arrived.inside, packet.leaves, strict=True):
                if goes_on and isinstance(leaf, torch.Tensor):
                    origins.add(leaf, host)

    def put_output(self, boundary: int, microbatch: int, output: Any) -> None:
        """Put the output that a loss function will read, if the caller wants it too."""
        slot = Slot("input", boundary, microbatch)
        if self._exchange.is_expected(slot):
            found, treedef = rp_batch.flatten(output)
            leaves = list(map(value_of, found))
            packet = self._copier.send(treedef, leaves, [False] * len(leaves), Origins(), in_use=True)
            self._exchange.put(slot, packet)

    def put_losses(self, microbatch: int, treedef: Any, losses: Sequence[torch.Tensor]) -> None:
        """Put what the loss function has returned."""
        packet = self._copier.send(treedef, losses, [False] * len(losses), Origins())
        self._exchange.put(Slot("loss", self._call.num_layers, microbatch), packet)

    def put_grads(self, boundary: int, microbatch: int, grads: Sequence[torch.Tensor | None]) -> None:
        """Put the gradients of the task's inputs, if anything takes them."""
        slot = Slot("grad", boundary, microbatch)
        if self._exchange.is_expected(slot):
            packet = self._copier.send(None, grads, [False] * len(grads), Origins())
            self._exchange.put(slot, packet)
