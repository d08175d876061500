"""A task's weights, gradient sums and buffers on its device, from upload to release."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import attrgetter, sub

import torch
from rp_optim.jobs import Outcome, wait_for_all
from rp_state.block import Block, in_turn
from rp_state.gradient import sum_dtype
from rp_state.layers import LayerState
from rp_telemetry.layer_times import LayerTimes
from rp_telemetry.tracing import Tracer
from rp_transfer import Event, Ticket

from rp_engine.device.memory.fp8_twins import Fp8Products
from rp_engine.device.memory.graph_store import FixedBlock
from rp_engine.device.memory.kept_weights import Kept, NoneKept
from rp_engine.device.replica import Twins, attach, detach
from rp_engine.device.transfers import Delivery, bring, save
from rp_engine.runtime.lane import Lane

_version = attrgetter("_version")
_LATE = (
    "{} got a gradient after the backward pass had left it, when its gradients were on their way to the host: it "
    "came in other parts than in the microbatch before. From now on they wait for the end of the backward pass; "
    "drop those of this call (zero_grad) and make the call again. Layers must compute on their own device: keep "
    "one that uses another device out of the model"
)


@dataclass(frozen=True, slots=True)
class OnDevice:
    """What the tasks of a run on one device share: its lane, and the layers' copies there.

    `frozen`: the ids of parameters whose gradients are dropped. `may_outlive`: the model may be gone before the
    device has read its blocks, which are then kept until it has. `kept`: the blocks that stay there from call to
    call; `call` and `version`: the call's number, and the version of the weights that it reads. `products`:
    which linear layers multiply in FP8.
    """

    lane: Lane
    twins: Twins
    tracer: Tracer
    frozen: frozenset[int] = frozenset()
    may_outlive: bool = False
    kept: Kept = NoneKept()  # noqa: RUF009 - it has no state
    call: int = 0
    version: int = 0
    products: Fp8Products | None = None


@dataclass(slots=True)
class _Sums:
    """The gradient sums of one block: `memory`, (numel,), and a view of it for each of the device's `twins`.

    `seen`: how often each was added to before the present microbatch.
    """

    memory: torch.Tensor
    views: list[torch.Tensor]
    twins: list[torch.Tensor]
    seen: list[int]

    def additions(self) -> list[int]:
        """How often each gradient was added to, in the present microbatch."""
        return list(map(sub, map(_version, self.views), self.seen))

    def written(self) -> set[int]:
        """Which gradients were added to."""
        return {index for index, gradient in enumerate(self.views) if gradient._version}


class Weights:
    """The blocks of one task, or of a part of it, on its device.

    `turns` and `gradient_turns`: the tickets that the calling thread took for this task; gradients of blocks
    without a ticket are dropped. `spare_bytes`: how much device memory gradient sums of earlier tasks may still
    occupy while this one runs. `saved`: blocks, (numel,) on the host, that are uploaded instead of the model's;
    None: read from disk once more.
    `times`: measures their transfers; None: it does not.
    """

    def __init__(
        self,
        on: OnDevice,
        turns: dict[Block, Ticket],
        gradient_turns: dict[Block, Ticket],
        *,
        spare_bytes: int = 0,
        times: LayerTimes | None = None,
        saved: dict[Block, torch.Tensor | None] | None = None,
    ) -> None:
        self.on = on
        self.saved: dict[Block, torch.Tensor | None] = {} if saved is None else saved
        self._times = times
        self._spare_bytes = spare_bytes
        self._tracer = on.tracer
        self._lane = on.lane
        self._device = on.lane.device
        self._twins = on.twins
        self.turns = turns
        self._gradient_turns = gradient_turns
        self._arriving: dict[Block, tuple[torch.Tensor, Outcome[Event]]] = {}
        self._bound: dict[Block, torch.Tensor] = {}
        self._addresses: set[int] = set()
        self._trained: list[Block] = []
        self._delivered: list[Block] = []
        self._sums: dict[Block, _Sums] = {}
        # Of the weights whose gradient sums are on the device.
        self.summed_bytes = 0
        self._written: set[Block] = set()
        # Memory that graphs know by address.
        self.fixed: Mapping[Block, FixedBlock] = {}

    def prefetch(self) -> None:
        """Queue uploads, in order, of the blocks whose turn is open; stop at the first that is not."""
        self._find()
        for block, ticket in self.turns.items():
            if block not in self._arriving:
                if not ticket.open():
                    return
                self._send_for(block, ticket)

    def upload(self) -> None:
        """Queue uploads of the remaining blocks; the porter waits for their turns."""
        self._find()
        for block, ticket in self.turns.items():
            if block not in self._arriving:
                self._send_for(block, ticket)
        self.on.kept.start()

    def _find(self) -> None:
        """Take the blocks that are on the device from a call before."""
        self.on.kept.begin(self.on.call, self.on.version)
        for block, ticket in self.turns.items():
            if block not in self._arriving and (found := self.on.kept.find(block)) is not None:
                self._arriving[block] = found
                if not ticket.writes:
                    ticket.leave()

    def _send_for(self, block: Block, ticket: Ticket) -> None:
        stream = self._lane.inbox.stream
        memory = self._device.empty((block.layout.numel,), block.layout.dtype, stream=stream)
        self.on.kept.bring(block.nbytes)
        inbox = self._lane.inbox
        expected = inbox.conveyor.announce(block.pieces_on_disk(memory)) if block.on_disk else None
        arriving = inbox.submit(
            bring,
            inbox,
            block,
            memory,
            ticket,
            self._times,
            self._tracer,
            self.saved.get(block),
            expected,
            is_again=block in self.saved,
        )
        self._arriving[block] = (memory, arriving)

    def bind(self, layer: LayerState, *, training: bool) -> None:
        """Make a layer ready to run: wait for its blocks and point its twin at them.

        `training`: its gradients will be computed.
        """
        for block in layer.blocks:
            if block in self._bound:
                self._move_to_fixed(block)
                continue
            memory, arriving = self._arriving[block]
            if not self.on.kept.is_ready(block, memory):
                with self._waiting(block):
                    self._device.compute.wait(arriving.result())
                self._device.compute.touch(
                    read=(memory,), write=(memory,) if block.kind == "buffer" else (), what="weights"
                )
            self._point_at(block, self._in_fixed(block, memory))
            if block.kind == "trainable" and training:
                self._trained.append(block)
        self._twins.prepare_products(layer.index, self.on.products, for_backward=training)

    def _point_at(self, block: Block, memory: torch.Tensor) -> None:
        self._twins.bind(block, memory)
        self._bound[block] = memory
        self._addresses.add(memory.untyped_storage().data_ptr())

    def _in_fixed(self, block: Block, memory: torch.Tensor) -> torch.Tensor:
        """Copy weights that have arrived to where graphs read them, if any do; return where they are."""
        fixed = self.fixed.get(block)
        if fixed is None:
            return memory
        self._device.compute.touch(write=(fixed.memory,), what="weights of graphs")
        fixed.memory.copy_(memory)
        # What they came in is free again.
        self._lane.retainer.keep(self._device.compute.record(), memory)
        self._arriving[block] = (fixed.memory, self._arriving[block][1])
        return fixed.memory

    def _move_to_fixed(self, block: Block) -> None:
        fixed, bound = self.fixed.get(block), self._bound[block]
        if fixed is not None and bound is not fixed.memory:
            self._point_at(block, self._in_fixed(block, bound))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the memory of a bound block."""
        return tensor.untyped_storage().data_ptr() in self._addresses

    def _waiting(self, block: Block) -> AbstractContextManager[None]:
        return self._tracer.waiting(self._device, "weights", "weights of {} to arrive", block)

    def make_sums(self) -> None:
        """Allocate the gradient sums, zero, of the blocks that are bound for training and have none yet."""
        new = [block for block in self._trained if block not in self._sums and block not in self._delivered]
        if new:
            # As late as possible: sums of earlier tasks occupy device memory until they are downloaded.
            with self._waiting_for_room():
                self._lane.outbox.wait_for_room(self._spare_bytes)
        for block in new:
            self._sums[block] = self._zeros(block)
            self.summed_bytes += block.nbytes

    def _waiting_for_room(self) -> AbstractContextManager[None]:
        return self._tracer.waiting(self._device, "memory", "the gradients before these to leave the device")

    def _zeros(self, block: Block) -> _Sums:
        layout, fixed = block.layout, self.fixed.get(block)
        if fixed is not None and fixed.sums is not None:
            memory = fixed.sums
            self._device.compute.touch(write=(memory,), what="gradients of graphs")
        else:
            memory = self._device.empty((layout.numel,), sum_dtype(layout.dtype), stream=self._device.compute)
        memory.zero_()
        # Views with a version counter each, which counts the additions to each gradient.
        views = [view.data for view in layout.views(memory)]
        return _Sums(memory, views, self._twins.tensors(block), [0] * len(views))

    def make_new_sums(self) -> None:
        """Begin again with sums of zero, to which nothing was added yet."""
        for block in self._sums:
            self._sums[block] = self._zeros(block)

    def sums_of(self, blocks: Iterable[Block]) -> list[torch.Tensor]:
        """The sums of those of some blocks that have any, (numel,) each."""
        return [self._sums[block].memory for block in blocks if block in self._sums]

    @contextmanager
    def adding(self) -> Generator[None]:
        """Let autograd add gradients to the sums within the context."""
        self.make_sums()
        for block, sums in self._sums.items():
            attach(block, sums.twins, sums.views)
        try:
            yield
        finally:
            for sums in self._sums.values():
                detach(sums.twins, sums.views)
        self._refuse_late()

    def _refuse_late(self) -> None:
        late = [block for block in self._delivered if self._twins.with_gradient(block)]
        for block in late:
            block.leaves_early = False
        if late:
            raise RuntimeError(_LATE.format(late[0]))

    def all_sums(self) -> list[Block]:
        """The blocks whose gradient sums are still on the device and are to be delivered."""
        return in_turn(block for block in self._sums if block in self._gradient_turns)

    def undelivered(self) -> dict[Block, Ticket]:
        """The tickets of the blocks whose gradients were not delivered."""
        return dict(self._gradient_turns)

    # Buffers

    def buffers(self, layer: LayerState) -> dict[Block, torch.Tensor]:
        """The device memory of each of a layer's buffer blocks."""
        return {block: self._bound[block] for block in layer.blocks if block.kind == "buffer"}

    def versions(self, blocks: Iterable[Block]) -> dict[Block, list[int]]:
        """The version counters of the tensors in these blocks."""
        return {block: [twin._version for twin in self._twins.tensors(block)] for block in blocks}

    def tensors(self, blocks: Iterable[Block]) -> tuple[torch.Tensor, ...]:
        """The device tensors in these blocks."""
        return tuple(twin for block in blocks for twin in self._twins.tensors(block))

    def note_written(self, block: Block) -> None:
        """Mark a buffer block as written: `return_buffers` downloads it at the end of the task."""
        self._written.add(block)
        self.on.kept.forget(block)

    @property
    def has_written(self) -> bool:
        """Whether any buffer was written."""
        return bool(self._written)

    def return_buffers(self) -> None:
        """Download the buffers that were written, and leave the turns on those that layers may write."""
        for block, ticket in self.turns.items():
            if ticket.writes:
                ticket.leave(self._return_buffer(block))

    def _return_buffer(self, block: Block) -> Event:
        memory, arriving = self._arriving[block]
        if block not in self._written:
            return arriving.result()
        out = self._device.results_out
        self._device.compute.touch(write=(memory,), what="buffers")
        out.wait(self._device.compute.record())
        with self._going_home(block):
            for source, target in block.pieces(memory):
                out.copy(target, source)
        event = out.record()
        self._lane.retainer.keep(event, memory, block.host_tensors())
        return event

    def _going_home(self, block: Block) -> AbstractContextManager[None]:
        out = self._device.results_out
        return self._tracer.on_stream(self._device, out, "download", "buffers of {}", block, nbytes=block.nbytes)

    # Gradients

    def note_microbatch(self, uncounted: Collection[Block] = ()) -> None:
        """Count a finished microbatch's additions to each gradient; the next one is expected to add as many.

        `uncounted`: blocks to which graphs have added, which moves no counter.
        """
        for block, sums in self._sums.items():
            if block not in uncounted:
                block.additions = sums.additions()
            sums.seen = list(map(_version, sums.views))

    def complete_above(self, layer: int, layers: range) -> list[Block]:
        """The blocks whose gradients are complete once the last backward through `layers` has reached `layer`.

        Autograd runs nodes newest first, so the nodes of the layers above are done, except for those that an
        earlier microbatch made, such as autocast's casts of weights. So a block also counts as complete only when
        each gradient was added to as often as by the microbatch before, which may be another call's. A gradient
        that got nothing there, such as an unused expert's, gives no such count: its block is left for the end of
        the task, and with it those that wait for its memory.
        """
        found: list[Block] = []
        for block in self.all_sums():
            if all(user > layer for user in block.users if user in layers) and self._has_all(block):
                found.append(block)
            elif block.passes_gradients_on:
                break
        return found

    def _has_all(self, block: Block) -> bool:
        before = block.additions
        return block.leaves_early and all(before) and self._sums[block].additions() == before

    def deliver(self, blocks: Sequence[Block]) -> Delivery:
        """Detach the gradient sums of these blocks and return the delivery that downloads them."""
        chosen = [self._sums[block] for block in blocks]
        self._device.compute.touch(write=[sums.memory for sums in chosen], what="gradients")
        for sums in chosen:
            detach(sums.twins, sums.views)
        written = {block: self._written_sums(block) for block in blocks}
        leaving_memory = {block: self._out_of_fixed(block) for block in blocks}
        # First: if it fails, the turns are still here.
        made = self._device.compute.record()
        leaving = [
            (block, leaving_memory[block], written[block], self._gradient_turns.pop(block)) for block in blocks
        ]
        for block in blocks:
            del self._sums[block]
        self.summed_bytes -= sum(block.nbytes for block in blocks)
        self._delivered += blocks
        return Delivery(self._lane.outbox, made, leaving, self._times, self._tracer)

    def _out_of_fixed(self, block: Block) -> torch.Tensor:
        """The memory of a block's sums, or a copy of those that graphs add to: the next task zeroes them."""
        memory, fixed = self._sums[block].memory, self.fixed.get(block)
        if fixed is None or memory is not fixed.sums:
            return memory
        own = self._device.empty(memory.shape, memory.dtype, stream=self._device.compute)
        self._device.compute.touch(write=(own,), what="gradients")
        return own.copy_(memory)

    def _written_sums(self, block: Block) -> set[int]:
        """Return which gradients the task has summed; those of frozen parameters become zero, and are none."""
        sums = self._sums[block]
        written = sums.written()
        for index in [index for index in written if id(block.tensors[index]) in self.on.frozen]:
            sums.views[index].zero_()
            written.remove(index)
        return written

    # The end

    def end(self, num_layers: int) -> None:
        """After a task of so many layers, free all device memory but that of blocks that stay for later calls."""
        arrived = {block: self._arriving[block] for block in self._bound if block not in self._written}
        for block in self.on.kept.keep(arrived, num_layers, self._twins.release_from):
            del self._bound[block], self._arriving[block]
        self.release()

    def release(self) -> None:
        """Free all device memory once the compute stream has passed this point."""
        for block in self._bound:
            self._twins.release(block)
        done = self._device.compute.record()
        sums = [each.memory for each in self._sums.values()]
        hosts = [block.host_tensors() for block in self._bound] if self.on.may_outlive else []
        self._lane.retainer.keep(done, list(self._bound.values()), list(self._arriving.values()), sums, hosts)
        self._bound, self._arriving, self._sums, self._trained = {}, {}, {}, []
        self.summed_bytes = 0

    def withdraw(self) -> None:
        """Free all device memory, to begin again later; blocks whose turns are left already are saved first."""
        self._stop_uploads()
        # Recomputation sets buffers on the device.
        now = self._device.compute.record()
        for block, (memory, arriving) in self._arriving.items():
            is_left = not self.turns[block].writes and arriving.exception() is None
            if is_left and block.on_disk:
                self.saved[block] = None
            elif is_left and block not in self.saved:
                saving = self._lane.outbox.submit(save, self._lane.outbox, memory, (arriving.result(), now))
                self.saved[block] = saving.result()
        self.release()

    def _stop_uploads(self) -> None:
        wait_for_all(arriving for _, arriving in self._arriving.values() if not arriving.cancel())

    def abandon(self) -> None:
        """Leave all turns after a failure; later turns still wait for the copies already queued."""
        self._stop_uploads()
        begun = (self._lane.inbox.stream.record(), self._device.results_out.record())
        for ticket in self.tickets():
            ticket.leave(*begun)
        hosts = [block.host_tensors() for block in self._arriving]
        self._lane.retainer.keep(begun[0], list(self._arriving.values()), hosts)

    def tickets(self) -> Iterable[Ticket]:
        """The tickets that the task itself must leave; a delivery leaves those it was given."""
        yield from self.turns.values()
        yield from self._gradient_turns.values()
