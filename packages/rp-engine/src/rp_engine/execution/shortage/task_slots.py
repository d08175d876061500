"""The slots of a call as one task uses them: what it takes lives until it is over, since it may run again."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

from rp_sched import Task

from rp_engine.device.packet import Packet, Slot
from rp_engine.execution.call import Call
from rp_engine.execution.exchange import Exchange, taken_by


class TaskSlots:
    """One task's view of an exchange, over all attempts to run the task or parts of it; see `Exchange`.

    A packet that was taken or fetched once can be taken again, and one that was put is not put again: another
    task may have taken it. Between its own parts, packets are passed on here.
    """

    def __init__(self, call: Call, exchange: Exchange) -> None:
        self._call = call
        self._exchange = exchange
        self._taken: dict[Slot, Packet] = {}
        self._fetched: dict[Slot, Packet | None] = {}
        self._put: set[Slot] = set()
        self._kept: set[Slot] = set()
        # What parts of the task take, and the layers that they recompute.
        self._inner: set[Slot] = set()
        self._recomputed: set[int] = set()
        # The layers and microbatches whose data for their recomputation other tasks may have fetched.
        self._done: set[tuple[int, int]] = set()

    def expect(self, parts: Iterable[Task]) -> None:
        """Expect the slots that these parts of the task take."""
        for part in parts:
            self._inner.update(taken_by(self._call, part))
            if part.recomputes:
                self._recomputed.update(part.layers)

    # What every task takes and gives

    def take(self, slot: Slot) -> Packet:
        """See `Exchange.take`."""
        if slot not in self._taken:
            self._taken[slot] = self._exchange.take(slot)
        return self._taken[slot]

    def is_expected(self, slot: Slot) -> bool:
        """Whether the slot has readers that still lack its packet."""
        return slot in self._inner or (slot not in self._put and self._exchange.is_expected(slot))

    def put(self, slot: Slot, packet: Packet) -> None:
        """See `Exchange.put`; only the first packet counts, as the task computes the same again."""
        if slot in self._inner:
            self._taken[slot] = packet
        if slot not in self._put and self._exchange.is_expected(slot):
            self._put.add(slot)
            self._exchange.put(slot, packet)

    # What layers keep for their recomputation

    def will_recompute(self, layer: int, microbatch: int) -> bool:
        """See `Exchange.will_recompute`."""
        return layer in self._recomputed or self._exchange.will_recompute(layer, microbatch)

    def keep(self, slot: Slot, packet: Packet) -> None:
        """See `Exchange.keep`."""
        if (slot.at, slot.microbatch) in self._done:
            return
        self._kept.add(slot)
        if slot.at in self._recomputed:
            self._fetched[slot] = packet
        else:
            self._exchange.keep(slot, packet)

    def drop(self, slot: Slot) -> None:
        """Remove the packet that an earlier try of a layer has kept."""
        if slot in self._kept and (slot.at, slot.microbatch) not in self._done:
            self._kept.discard(slot)
            self._fetched.pop(slot, None)
            self._exchange.fetch(slot)

    def fetch(self, slot: Slot) -> Packet | None:
        """See `Exchange.fetch`."""
        if slot not in self._fetched:
            self._fetched[slot] = self._exchange.fetch(slot)
        return self._fetched[slot]

    # Progress

    def note_done(self, layers: range, microbatch: int) -> None:
        """These layers have run forward for a microbatch: what they kept stays as it is."""
        self._done.update(zip(layers, repeat(microbatch)))

    def let_go(self, microbatch: int) -> None:
        """Release what was taken for a microbatch, which will not be run again."""
        for slot in [slot for slot in self._taken if slot.microbatch == microbatch]:
            del self._taken[slot]

    def clear(self) -> None:
        """Release everything: the task is over."""
        self._taken.clear()
        self._fetched.clear()
