"""A task's weights, gradients and buffers on its device, from their upload to their release."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from rp_optim.jobs import Outcome, wait_for_all
from rp_transfer import Event, Ticket

from roundpipe.gradient import sum_dtype
from roundpipe.measure import LayerTimes
from roundpipe.porter import Porter
from roundpipe.runtime import Lane
from roundpipe.state import Block, LayerState
from roundpipe.tracing import NOTHING, SpanKind, Tracer
from roundpipe.twin import Twins


@dataclass(frozen=True, slots=True)
class Delivery:
    """Sums of gradients on their way home; the porter that carries them enters the turns and leaves them.

    `made` is when the sums are complete. Each is a block, its sums on the device, the indices of the parameters
    that have any, and the turn.
    """

    porter: Porter
    made: Event
    sums: list[tuple[Block, torch.Tensor, set[int], Ticket]]
    tracer: Tracer | None = None

    @property
    def nbytes(self) -> int:
        """What the sums take on the device."""
        return sum(memory.nbytes for _, memory, _, _ in self.sums)

    def run(self) -> None:
        """Block by block; the sums may go when it is over."""
        conveyor = self.porter.conveyor
        with NOTHING if self.tracer is None else self._told(self.tracer, "wait", "backward"):
            self.porter.stream.wait(self.made)
        for block, memory, written, ticket in self.sums:
            with NOTHING if self.tracer is None else self._told(self.tracer, "wait", "turn", block):
                ticket.enter()
            if written and block.gradient is not None:
                with NOTHING if self.tracer is None else self._told(self.tracer, "download", "", block):
                    block.gradient.receive(memory, written, conveyor)
            ticket.leave(conveyor.record())
        conveyor.drain()

    def abandon(self) -> None:
        """After a failure: let what was begun end, so that the sums may go."""
        self.porter.conveyor.drain()

    def _told(
        self, tracer: Tracer, kind: SpanKind, reason: str, block: Block | None = None
    ) -> AbstractContextManager[None]:
        what = reason if block is None else f"gradients of {described(block)}"
        gradient = None if block is None or kind == "wait" else block.gradient
        nbytes = 0 if gradient is None else gradient.arriving_nbytes
        name = f"wait for {what}" if kind == "wait" else what
        return tracer.on_stream(self.porter.device, self.porter.stream, kind, name, nbytes=nbytes, reason=reason)

    def leave(self) -> None:
        """Give up the turns that are left; those behind still wait for what was begun."""
        begun = self.porter.conveyor.record()
        for *_, ticket in self.sums:
            ticket.leave(begun)


@dataclass(frozen=True, slots=True)
class _Additions:
    """How often was added to each gradient of a block by the end of a microbatch, and by that one alone."""

    seen: list[int]
    each: list[int]


class Weights:
    """The blocks of one task on its device.

    `turns` and `gradient_turns` are the tickets that the calling thread took for it; `spare_bytes` is what the
    sums of tasks before it may take on the device beside it.
    """

    def __init__(
        self,
        lane: Lane,
        twins: Twins,
        turns: dict[Block, Ticket],
        gradient_turns: dict[Block, Ticket],
        spare_bytes: int,
        times: LayerTimes | None,
        tracer: Tracer | None,
    ) -> None:
        self._times = times
        # While what calls take is measured, each must show what it takes alone.
        self._spare_bytes = spare_bytes if times is None else 0
        self._tracer = tracer
        self._lane = lane
        self._device = lane.device
        self._twins = twins
        self._turns = turns
        self._gradient_turns = gradient_turns
        self._arriving: dict[Block, tuple[torch.Tensor, Outcome[Event]]] = {}
        self._bound: dict[Block, torch.Tensor] = {}
        self._addresses: set[int] = set()
        self._trained: list[Block] = []
        self._delivered: list[Block] = []
        self._additions: dict[Block, _Additions] = {}
        self._sums: dict[Block, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self._written: set[Block] = set()

    def prefetch(self) -> None:
        """Send for what has its turn already, in order, up to the first that has not."""
        for block, ticket in self._turns.items():
            if block not in self._arriving:
                if not ticket.open():
                    return
                self._send_for(block, ticket)

    def upload(self) -> None:
        """Send for the rest; the porter waits for its turn."""
        for block, ticket in self._turns.items():
            if block not in self._arriving:
                self._send_for(block, ticket)

    def _send_for(self, block: Block, ticket: Ticket) -> None:
        stream = self._lane.inbox.stream
        memory = self._device.empty((block.layout.numel,), block.layout.dtype, stream=stream)
        arriving = self._lane.inbox.submit(
            _bring, self._lane.inbox, block, memory, ticket, self._times, self._tracer
        )
        self._arriving[block] = (memory, arriving)

    def bind(self, layer: LayerState, *, training: bool) -> None:
        """Make a layer ready to run: its weights have arrived; `training`, its gradients are wanted."""
        for block in layer.blocks:
            if block in self._bound:
                continue
            memory, arriving = self._arriving[block]
            with NOTHING if self._tracer is None else self._waiting(self._tracer, block):
                self._device.compute.wait(arriving.result())
            self._device.compute.touch(
                read=(memory,), write=(memory,) if block.kind == "buffer" else (), what="weights"
            )
            self._twins.bind(block, memory)
            self._bound[block] = memory
            self._addresses.add(memory.untyped_storage().data_ptr())
            if block.kind == "trainable" and training:
                self._trained.append(block)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor is that of a layer that is ready."""
        return tensor.untyped_storage().data_ptr() in self._addresses

    def _waiting(self, tracer: Tracer, block: Block) -> AbstractContextManager[None]:
        return tracer.waiting(self._device, "weights", f"weights of {described(block)} to arrive")

    def _make_sums(self) -> None:
        new = [block for block in self._trained if block not in self._sums and block not in self._delivered]
        if new:
            # As late as possible: those of tasks before take their room on the device until they have left.
            with NOTHING if self._tracer is None else self._waiting_for_room(self._tracer):
                self._lane.outbox.wait_for_room(self._spare_bytes)
        for block in new:
            self._sums[block] = self._zeros(block)

    def _waiting_for_room(self, tracer: Tracer) -> AbstractContextManager[None]:
        return tracer.waiting(self._device, "memory", "the gradients before these to leave the device")

    def _zeros(self, block: Block) -> tuple[torch.Tensor, list[torch.Tensor]]:
        layout = block.layout
        memory = self._device.empty((layout.numel,), sum_dtype(layout.dtype), stream=self._device.compute)
        memory.zero_()
        # Each with a version counter of its own, which tells whether anything was added.
        return memory, [view.data for view in layout.views(memory)]

    @contextmanager
    def adding(self) -> Generator[None]:
        """Within it, gradients are added to the sums."""
        self._make_sums()
        for block, (_, sums) in self._sums.items():
            self._twins.attach(block, sums)
        try:
            yield
        finally:
            for block, (_, sums) in self._sums.items():
                self._twins.detach(block, sums)
        self._refuse_late()

    def _refuse_late(self) -> None:
        for block in self._delivered:
            if any(twin.grad is not None for twin in self._twins.tensors(block)):
                raise RuntimeError(
                    f"{described(block)} got a gradient after the backward pass had left it; does it compute on "
                    "another device than its own? Then keep it out of the model"
                )

    def all_sums(self) -> list[Block]:
        """The blocks whose gradients are still here."""
        return list(self._sums)

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
                ticket.leave(self._return_buffer(block))

    def _return_buffer(self, block: Block) -> Event:
        memory, arriving = self._arriving[block]
        if block not in self._written:
            return arriving.result()
        out = self._device.results_out
        self._device.compute.touch(write=(memory,), what="buffers")
        out.wait(self._device.compute.record())
        with NOTHING if self._tracer is None else self._going_home(self._tracer, block):
            for source, target in block.pieces(memory):
                out.copy(target, source)
        event = out.record()
        self._lane.retainer.keep(event, memory, block.host_tensors())
        return event

    def _going_home(self, tracer: Tracer, block: Block) -> AbstractContextManager[None]:
        name = f"buffers of {described(block)}"
        return tracer.on_stream(self._device, self._device.results_out, "download", name, nbytes=block.nbytes)

    # Gradients

    def note_microbatch(self) -> None:
        """A microbatch is over: how often it added to each gradient, the last one will, too."""
        for block, (_, sums) in self._sums.items():
            seen = [gradient._version for gradient in sums]
            before = self._additions[block].seen if block in self._additions else [0] * len(seen)
            self._additions[block] = _Additions(seen, [a - b for a, b in zip(seen, before, strict=True)])

    def complete_above(self, layer: int, layers: range) -> list[Block]:
        """The blocks that get no more gradients, once the last backward through `layers` is down to `layer`.

        Autograd goes through what was made last first, so that all above the layer is done; except for what an
        earlier microbatch made, such as autocast's copies of weights. A gradient is added once all parts of it are
        there, so it is looked at, too; one that got nothing last time, as in a mixture of experts, tells nothing.
        """
        return [
            block
            for block in self._sums
            if all(user > layer for user in block.users if user in layers) and self._has_all(block)
        ]

    def _has_all(self, block: Block) -> bool:
        known = self._additions.get(block)
        if known is None or not all(known.each):
            return False
        seen = [gradient._version for gradient in self._sums[block][1]]
        return seen == [a + b for a, b in zip(known.seen, known.each, strict=True)]

    def deliver(self, blocks: Sequence[Block]) -> Delivery:
        """Hand the sums of these blocks' gradients over, to be sent home."""
        for block in blocks:
            self._twins.detach(block, self._sums[block][1])
        chosen = [(block, *self._sums.pop(block)) for block in blocks]
        sums = [
            (block, memory, _written(views), self._gradient_turns.pop(block)) for block, memory, views in chosen
        ]
        self._delivered += blocks
        self._device.compute.touch(write=[memory for _, memory, _, _ in sums], what="gradients")
        return Delivery(self._lane.outbox, self._device.compute.record(), sums, self._tracer)

    # The end

    def release(self) -> None:
        """Let go of device memory once the compute stream is done with it."""
        for block in self._bound:
            self._twins.release(block)
        done = self._device.compute.record()
        sums = [memory for memory, _ in self._sums.values()]
        self._lane.retainer.keep(done, list(self._bound.values()), list(self._arriving.values()), sums)
        self._bound, self._arriving, self._sums, self._trained = {}, {}, {}, []

    def abandon(self) -> None:
        """Give up all turns; those behind still wait for what was begun with them."""
        wait_for_all(arriving for _, arriving in self._arriving.values() if not arriving.cancel())
        begun = (self._lane.inbox.stream.record(), self._device.results_out.record())
        for ticket in self.tickets():
            ticket.leave(*begun)
        hosts = [block.host_tensors() for block in self._arriving]
        self._lane.retainer.keep(begun[0], list(self._arriving.values()), hosts)

    def tickets(self) -> Iterable[Ticket]:
        """The turns that the task itself has to give up."""
        yield from self._turns.values()
        yield from self._gradient_turns.values()


def _written(sums: Iterable[torch.Tensor]) -> set[int]:
    return {index for index, gradient in enumerate(sums) if gradient._version}


def _bring(
    porter: Porter,
    block: Block,
    memory: torch.Tensor,
    ticket: Ticket,
    times: LayerTimes | None,
    tracer: Tracer | None,
) -> Event:
    """Upload a block; its turn is over when it has arrived, but for buffers, which the layers may write."""
    with NOTHING if tracer is None else _told(tracer, porter, block, "wait"):
        ticket.enter(None if block.is_staged else porter.stream)
    with (
        NOTHING if tracer is None else _told(tracer, porter, block, "upload"),
        NOTHING if times is None else times.upload(block.nbytes, porter.stream),
    ):
        for target, source in block.pieces(memory):
            porter.conveyor.upload(target, source)
    arrived = porter.conveyor.record()
    if block.kind != "buffer":
        ticket.leave(arrived)
    return arrived


def _told(
    tracer: Tracer, porter: Porter, block: Block, kind: Literal["wait", "upload"]
) -> AbstractContextManager[None]:
    name = f"weights of {described(block)}"
    if kind == "wait":
        return tracer.on_stream(porter.device, porter.stream, kind, f"wait for the turn of {name}", reason="turn")
    return tracer.on_stream(porter.device, porter.stream, kind, name, nbytes=block.nbytes)


def described(block: Block) -> str:
    """The layers that use a block, in words."""
    layers = sorted(block.users)
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
