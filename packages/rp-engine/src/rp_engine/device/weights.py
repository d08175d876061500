"""A task's weights and buffers on its device, from upload to release."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from rp_optim.jobs import Outcome, wait_for_all
from rp_state.block import Block
from rp_state.layers import LayerState
from rp_telemetry.tracing import Tracer
from rp_telemetry.transfer_times import UNTIMED, Untimed
from rp_transfer import Event, Ticket

from rp_engine.device.gradient_sums import GradientSums
from rp_engine.device.memory.fp8_twins import Fp8Products
from rp_engine.device.memory.graph_store import NOT_FIXED, FixedBlock
from rp_engine.device.memory.weight_cache import NO_WEIGHT_CACHE, WeightCache
from rp_engine.device.replica import Twins
from rp_engine.device.transfers import bring, bring_again, save, upload_from_disk, upload_from_host
from rp_engine.runtime.lane import Lane


@dataclass(frozen=True, slots=True)
class UploadContext:
    """What the tasks of a run on one device share: its lane, and the layers' copies there.

    `frozen`: the ids of parameters whose gradients are dropped. `may_outlive`: the model may be gone before the
    device has read its blocks, which are then kept until it has. `kept`: the blocks that stay there from call to
    call; `call` and `version`: the call's number, and the version of the weights that it reads. `products`:
    which linear layers multiply in FP8. `coded`: the blocks that travel with codes in place of some weights.
    """

    lane: Lane
    twins: Twins
    tracer: Tracer
    frozen: frozenset[int] = frozenset()
    may_outlive: bool = False
    kept: WeightCache = NO_WEIGHT_CACHE
    call: int = 0
    version: int = 0
    products: Fp8Products | None = None
    coded: frozenset[Block] = frozenset()


class Weights:
    """The blocks of one task, or of a part of it, on its device.

    `turns`: the tickets that the calling thread took for this task. `gradient_turns`, `spare_bytes`: see
    `GradientSums`. `saved`: blocks, (numel,) on the host, that are uploaded instead of the model's;
    None: read from disk once more. `times`: measures their transfers.
    """

    def __init__(
        self,
        on: UploadContext,
        turns: dict[Block, Ticket],
        gradient_turns: dict[Block, Ticket],
        *,
        spare_bytes: int = 0,
        times: Untimed = UNTIMED,
        saved: dict[Block, torch.Tensor | None],
    ) -> None:
        self.on = on
        self.saved = saved
        self._times = times
        self._tracer = on.tracer
        self._lane = on.lane
        self._device = on.lane.device
        self._twins = on.twins
        self.turns = turns
        self.sums = GradientSums(
            on.lane, on.twins, on.tracer, on.frozen, gradient_turns, spare_bytes=spare_bytes, times=times
        )
        self._arriving: dict[Block, tuple[torch.Tensor, Outcome[Event]]] = {}
        self._bound: dict[Block, torch.Tensor] = {}
        self._addresses: set[int] = set()
        self._written: set[Block] = set()
        self._fixed: Mapping[Block, FixedBlock] = {}

    def use_fixed(self, fixed: Mapping[Block, FixedBlock]) -> None:
        """Let weights and sums lie where graphs know them by address."""
        self._fixed = self.sums.fixed = fixed

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
        """Take the blocks that are on the device, or on their way, from before the call."""
        self.on.kept.begin(self.on.call, self.on.version)
        for block, ticket in self.turns.items():
            is_wanted = block not in self._arriving and block not in self.on.coded
            if is_wanted and (found := self.on.kept.find(block)) is not None:
                self._arriving[block] = found
                if not ticket.writes:
                    ticket.leave()

    def _send_for(self, block: Block, ticket: Ticket) -> None:
        stream = self._lane.inbox.stream
        numel, dtype = block.form(coded=block in self.on.coded)
        memory = self._device.empty((numel,), dtype, stream=stream)
        self.on.kept.bring(block.nbytes)
        inbox, upload = self._lane.inbox, self._upload_of(block, memory)
        if block in self.saved:
            arriving = inbox.submit(bring_again, inbox, upload)
        else:
            arriving = inbox.submit(bring, inbox, block, memory, ticket, self._times, self._tracer, upload)
        self._arriving[block] = (memory, arriving)

    def _upload_of(self, block: Block, memory: torch.Tensor) -> Callable[[], None]:
        inbox = self._lane.inbox
        if block.on_disk:
            expected = inbox.conveyor.announce(block.pieces_on_disk(memory))
            return partial(upload_from_disk, inbox, block, expected)
        if (saved := self.saved.get(block)) is not None:
            return partial(inbox.conveyor.upload, memory, saved)
        return partial(upload_from_host, inbox, block, memory)

    def bind(self, layer: LayerState, *, training: bool) -> None:
        """Make a layer ready to run: wait for its blocks and point its twin at them.

        `training`: its gradients will be computed.
        """
        for block in layer.blocks:
            if block in self._bound:
                if block in self._fixed:
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
                self.sums.expect(block)
        if self.on.products is not None or self._twins.has_fp8:
            self._twins.prepare_products(layer.index, self.on.products, for_backward=training)

    def _point_at(self, block: Block, memory: torch.Tensor) -> None:
        self._twins.bind(block, memory)
        self._bound[block] = memory
        self._addresses.add(memory.untyped_storage().data_ptr())

    def _in_fixed(self, block: Block, memory: torch.Tensor) -> torch.Tensor:
        """Copy weights that have arrived to where graphs read them, if any do; return where they are."""
        fixed = self._fixed.get(block, NOT_FIXED).of(memory.dtype)
        if fixed is None or fixed is memory:
            return memory
        self._device.compute.touch(write=(fixed,), what="weights of graphs")
        fixed.copy_(memory)
        # What they came in is free again. It does not stay for later calls: those whose weights do have no graphs.
        self._lane.retainer.keep(self._device.compute.record(), memory)
        self._arriving[block] = (fixed, self._arriving[block][1])
        return fixed

    def _move_to_fixed(self, block: Block) -> None:
        bound = self._bound[block]
        if (fixed := self._in_fixed(block, bound)) is not bound:
            self._point_at(block, fixed)

    def stays(self, block: Block) -> bool:
        """Whether a block is on the device since an earlier call."""
        return self.on.kept.is_ready(block, self._arriving[block][0])

    def place_of(self, block: Block) -> int:
        """The address of a block that is on the device, or on its way."""
        return self._arriving[block][0].data_ptr()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the memory of a bound block."""
        return tensor.untyped_storage().data_ptr() in self._addresses

    def _waiting(self, block: Block) -> AbstractContextManager[None]:
        return self._tracer.waiting(self._device, "weights", "weights of {} to arrive", block)

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
        sums = self.sums.release()
        hosts = [block.read_tensors() for block in self._bound] if self.on.may_outlive else []
        self._lane.retainer.keep(done, list(self._bound.values()), list(self._arriving.values()), sums, hosts)
        self._bound, self._arriving = {}, {}

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
        hosts = [block.read_tensors() for block in self._arriving]
        self._lane.retainer.keep(begun[0], list(self._arriving.values()), hosts)

    def tickets(self) -> Iterable[Ticket]:
        """The tickets that the task itself must leave; a delivery leaves those it was given."""
        yield from self.turns.values()
        yield from self.sums.tickets.values()
