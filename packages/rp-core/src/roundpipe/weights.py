"""A task's weights, gradients and buffers on its device, from their upload to their release."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from rp_transfer import Backend, Device, Event, Retainer, Ticket

from roundpipe.gradient import sum_dtype
from roundpipe.state import Block, LayerState
from roundpipe.twin import Twins


class Weights:
    """The blocks of one task on its device.

    `turns` and `gradient_turns` are the tickets that the calling thread took for it.
    """

    def __init__(
        self,
        backend: Backend,
        device: Device,
        retainer: Retainer,
        twins: Twins,
        turns: dict[Block, Ticket],
        gradient_turns: dict[Block, Ticket],
    ) -> None:
        self._backend = backend
        self._device = device
        self._retainer = retainer
        self._twins = twins
        self._turns = turns
        self._gradient_turns = gradient_turns
        self._arriving: dict[Block, tuple[torch.Tensor, Event]] = {}
        self._bound: dict[Block, torch.Tensor] = {}
        self._sums: dict[Block, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self._written: set[Block] = set()

    def prefetch(self) -> None:
        """Upload what has its turn already, in order, up to the first that has not."""
        for block, ticket in self._turns.items():
            if block not in self._arriving:
                if not ticket.open():
                    return
                self._upload(block, ticket)

    def upload(self) -> None:
        """Upload the rest; the thread blocks until those before have put their work on streams."""
        for block, ticket in self._turns.items():
            if block not in self._arriving:
                self._upload(block, ticket)

    def _upload(self, block: Block, ticket: Ticket) -> None:
        stream = self._device.weights_in
        ticket.enter(stream)
        memory = self._device.empty((block.layout.numel,), block.layout.dtype, stream=stream)
        for target, source in block.pieces(memory):
            stream.copy(target, source)
        event = stream.record()
        if block.kind != "buffer":
            ticket.leave(event)
        self._retainer.keep(event, memory, block.host_tensors())
        self._arriving[block] = (memory, event)

    def bind(self, layer: LayerState, *, training: bool) -> None:
        """Make a layer ready to run: its weights have arrived; `training`, its gradients have a place."""
        for block in layer.blocks:
            if block in self._bound:
                continue
            memory, arrived = self._arriving[block]
            self._device.compute.wait(arrived)
            self._device.compute.touch(
                read=(memory,), write=(memory,) if block.kind == "buffer" else (), what="weights"
            )
            self._twins.bind(block, memory)
            self._bound[block] = memory
            if block.kind == "trainable" and training:
                self._make_sums(block)

    def _make_sums(self, block: Block) -> None:
        layout = block.layout
        memory = self._device.empty((layout.numel,), sum_dtype(layout.dtype), stream=self._device.compute)
        memory.zero_()
        self._sums[block] = (memory, self._twins.bind_gradients(block, memory))

    # Buffers

    def buffers(self, layer: LayerState) -> dict[Block, torch.Tensor]:
        """The device memory of a layer's buffers."""
        return {block: self._bound[block] for block in layer.blocks if block.kind == "buffer"}

    def versions(self, blocks: Iterable[Block]) -> dict[Block, list[int]]:
        """The version counters of the buffers in these blocks."""
        return {block: [twin._version for twin in self._twins.tensors(block)] for block in blocks}

    def note_written(self, block: Block) -> None:
        """These buffers go home at the end of the task."""
        self._written.add(block)

    def return_buffers(self) -> None:
        """Send the buffers that were written home, and give up the turns of all."""
        for block, ticket in self._turns.items():
            if block.kind == "buffer":
                self._return_buffer(block, ticket)

    def _return_buffer(self, block: Block, ticket: Ticket) -> None:
        memory, event = self._arriving[block]
        if block in self._written:
            out = self._device.results_out
            self._device.compute.touch(write=(memory,), what="buffers")
            out.wait(self._device.compute.record())
            for source, target in block.pieces(memory):
                out.copy(target, source)
            event = out.record()
            self._retainer.keep(event, memory, block.host_tensors())
        ticket.leave(event)

    # Gradients

    def deliver(self) -> None:
        """Send the sums of all gradients home: rounded if they are the first, to be added on the host if not."""
        for block, (memory, views) in self._sums.items():
            ticket = self._gradient_turns[block]
            written = self._gather(block, views)
            ticket.enter(self._device.results_out)
            if written:
                self._deliver(block, memory, written)
            ticket.leave(self._device.results_out.record())

    def _gather(self, block: Block, views: list[torch.Tensor]) -> set[int]:
        written: set[int] = set()
        for index, (twin, view) in enumerate(zip(self._twins.tensors(block), views, strict=True)):
            if twin.grad is not None and twin.grad is not view:
                view.copy_(twin.grad)
            if view._version:
                written.add(index)
        return written

    def _deliver(self, block: Block, memory: torch.Tensor, written: set[int]) -> None:
        gradient = block.gradient
        assert gradient is not None
        if gradient.written:
            staged = self._backend.host_empty(memory.shape, memory.dtype, short_lived=True)
            self._send(staged, memory).synchronize()
            self._backend.host_touch(read=(staged,), what="staged gradients")
            gradient.add(staged)
        else:
            target = gradient.first()
            self._send(target, memory.to(target.dtype))
        gradient.written |= written

    def _send(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        out = self._device.results_out
        self._device.compute.touch(write=(source,), what="gradients")
        out.wait(self._device.compute.record())
        out.copy(target, source)
        sent = out.record()
        self._retainer.keep(sent, source, target)
        return sent

    # The end

    def release(self) -> None:
        """Let go of device memory once the compute stream is done with it."""
        for block in self._bound:
            self._twins.release(block)
        done = self._device.compute.record()
        sums = [memory for memory, _ in self._sums.values()]
        self._retainer.keep(done, list(self._bound.values()), list(self._arriving.values()), sums)
        self._bound, self._arriving, self._sums = {}, {}, {}

    def abandon(self) -> None:
        """Give up all turns; those behind still wait for what was begun with them."""
        begun = (self._device.weights_in.record(), self._device.results_out.record())
        for ticket in self.tickets():
            ticket.leave(*begun)

    def tickets(self) -> Iterable[Ticket]:
        """All tickets of the task."""
        yield from self._turns.values()
        yield from self._gradient_turns.values()
