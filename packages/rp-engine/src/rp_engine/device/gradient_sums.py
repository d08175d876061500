"""The gradient sums of a task's blocks on its device, from zero until they are delivered to the host."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import add, attrgetter, sub

import torch
from rp_state.block import Block, in_turn
from rp_state.gradient import sum_dtype
from rp_telemetry.tracing import Tracer
from rp_telemetry.transfer_times import UNTIMED, Untimed
from rp_transfer import Ticket

from rp_engine.device.memory.graph_store import NOT_FIXED, FixedBlock
from rp_engine.device.replica import Twins, attach, detach
from rp_engine.device.transfers import Delivery
from rp_engine.runtime.lane import Lane

_version = attrgetter("_version")
_LATE = (
    "{} got a gradient after the backward pass had left it, when its gradients were on their way to the host: it "
    "came in other parts than in the microbatch before. From now on they wait for the end of the backward pass; "
    "drop those of this call (zero_grad) and make the call again. Layers must compute on their own device: keep "
    "one that uses another device out of the model"
)


@dataclass(slots=True)
class _Sums:
    """The gradient sums of one block: `memory`, (numel,), and a view of it for each of the device's `twins`.

    `replayed`: how often graphs have added to each, which moves no version counter. `seen`: how often each was
    added to before the present microbatch.
    """

    memory: torch.Tensor
    views: list[torch.Tensor]
    twins: list[torch.Tensor]
    replayed: list[int]
    seen: list[int]

    def counts(self) -> list[int]:
        """How often each gradient was added to."""
        return list(map(add, map(_version, self.views), self.replayed))

    def additions(self) -> list[int]:
        """The same of the present microbatch."""
        return list(map(sub, self.counts(), self.seen))

    def written(self) -> set[int]:
        """Which gradients were added to."""
        return {index for index, count in enumerate(self.counts()) if count}


class GradientSums:
    """The sums of one task, or of a part of it, to which autograd adds.

    `tickets`: the turns of gradients that the calling thread took for this task; gradients of blocks without a
    ticket are dropped. `frozen`: the ids of parameters whose gradients are dropped. `spare_bytes`: how much device
    memory sums of earlier tasks may still occupy while this one runs. `times`: measures their transfers.
    """

    def __init__(
        self,
        lane: Lane,
        twins: Twins,
        tracer: Tracer,
        frozen: frozenset[int],
        tickets: dict[Block, Ticket],
        *,
        spare_bytes: int = 0,
        times: Untimed = UNTIMED,
    ) -> None:
        self.tickets = tickets
        self._device, self._outbox = lane.device, lane.outbox
        self._twins = twins
        self._tracer = tracer
        self._frozen = frozen
        self._spare_bytes = spare_bytes
        self._times = times
        self._trained: list[Block] = []
        self._delivered: list[Block] = []
        self._sums: dict[Block, _Sums] = {}
        # Bytes of the weights whose gradient sums are on the device.
        self.nbytes = 0
        # Memory that graphs know by address.
        self.fixed: Mapping[Block, FixedBlock] = {}

    def expect(self, block: Block) -> None:
        """Let `make` allocate the sums of a block whose weights are bound for training."""
        self._trained.append(block)

    def make(self) -> None:
        """Allocate the gradient sums, zero, of the blocks that are bound for training and have none yet."""
        new = [block for block in self._trained if block not in self._sums and block not in self._delivered]
        if new:
            # As late as possible: sums of earlier tasks occupy device memory until they are downloaded.
            with self._waiting_for_room():
                self._outbox.wait_for_room(self._spare_bytes)
        for block in new:
            self._sums[block] = self._zeros(block)
            self.nbytes += block.nbytes

    def _waiting_for_room(self) -> AbstractContextManager[None]:
        return self._tracer.waiting(self._device, "memory", "the gradients before these to leave the device")

    def _zeros(self, block: Block) -> _Sums:
        layout, memory = block.layout, self.fixed.get(block, NOT_FIXED).sums
        if memory is not None:
            self._device.compute.touch(write=(memory,), what="gradients of graphs")
        else:
            memory = self._device.empty((layout.numel,), sum_dtype(layout.dtype), stream=self._device.compute)
        memory.zero_()
        # Views with a version counter each, which counts the additions to each gradient.
        views = [view.data for view in layout.views(memory)]
        return _Sums(memory, views, self._twins.tensors(block), [0] * len(views), [0] * len(views))

    def begin_again(self) -> None:
        """Begin again with sums of zero, to which nothing was added yet."""
        for block in self._sums:
            self._sums[block] = self._zeros(block)

    def of(self, blocks: Iterable[Block]) -> list[torch.Tensor]:
        """The sums of those of some blocks that have any, (numel,) each."""
        return [self._sums[block].memory for block in blocks if block in self._sums]

    @contextmanager
    def adding(self) -> Generator[None]:
        """Let autograd add gradients to the sums within the context."""
        self.make()
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

    def owed(self) -> list[Block]:
        """The blocks whose gradient sums are still on the device and are to be delivered."""
        return in_turn(block for block in self._sums if block in self.tickets)

    def undelivered(self) -> dict[Block, Ticket]:
        """The tickets of the blocks whose gradients were not delivered."""
        return dict(self.tickets)

    def counts(self) -> dict[Block, list[int]]:
        """How often each gradient of the blocks that have sums was added to."""
        return {block: sums.counts() for block, sums in self._sums.items()}

    def count(self, replayed: Mapping[Block, Sequence[int]]) -> None:
        """Count additions to gradients that a graph makes."""
        for block, times in replayed.items():
            sums = self._sums[block]
            sums.replayed = list(map(add, sums.replayed, times))

    def note_microbatch(self) -> None:
        """Count a finished microbatch's additions to each gradient; the next one is expected to add as many."""
        for block, sums in self._sums.items():
            block.additions = sums.additions()
            sums.seen = sums.counts()

    def complete_above(self, layer: int, layers: range) -> list[Block]:
        """The blocks whose gradients are complete once the last backward through `layers` has reached `layer`.

        Autograd runs nodes newest first, so the nodes of the layers above are done, except for those that an
        earlier microbatch made, such as autocast's casts of weights. So a block also counts as complete only when
        each gradient was added to as often as by the microbatch before, which may be another call's. A gradient
        that got nothing there, such as an unused expert's, gives no such count: its block is left for the end of
        the task, and with it those that wait for its memory.
        """
        found: list[Block] = []
        for block in self.owed():
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
        leaving = [(block, leaving_memory[block], written[block], self.tickets.pop(block)) for block in blocks]
        for block in blocks:
            del self._sums[block]
        self.nbytes -= sum(block.nbytes for block in blocks)
        self._delivered += blocks
        return Delivery(self._outbox, made, leaving, self._times, self._tracer)

    def _out_of_fixed(self, block: Block) -> torch.Tensor:
        """The memory of a block's sums, or a copy of those that graphs add to: the next task zeroes them."""
        memory = self._sums[block].memory
        if memory is not self.fixed.get(block, NOT_FIXED).sums:
            return memory
        own = self._device.empty(memory.shape, memory.dtype, stream=self._device.compute)
        self._device.compute.touch(write=(own,), what="gradients")
        return own.copy_(memory)

    def _written_sums(self, block: Block) -> set[int]:
        """Return which gradients the task has summed; those of frozen parameters become zero, and are none."""
        sums = self._sums[block]
        written = sums.written()
        for index in [index for index in written if id(block.tensors[index]) in self._frozen]:
            sums.views[index].zero_()
            written.remove(index)
        return written

    def release(self) -> list[torch.Tensor]:
        """Forget all sums; return their memory, which the caller keeps until the device has passed this point."""
        memory = [each.memory for each in self._sums.values()]
        self._sums, self._trained, self.nbytes = {}, [], 0
        return memory
