"""Packets in named slots: the data passed between the tasks and the caller of one call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from rp_sched import Task

from rp_engine.device.packet import Packet, Slot
from rp_engine.execution.call import Call

WaitUntil = Callable[[Callable[[float], bool]], None]
"""Calls a function repeatedly until it returns true; the function waits for up to the given seconds."""


class Aborted(Exception):
    """Another task of the same run failed; users never see it."""


class _PendingPacket:
    """Holds one packet for a known number of readers; its lock is held while it is empty."""

    __slots__ = ("_empty", "packet", "readers")

    def __init__(self) -> None:
        self.readers = 0
        self.packet: Packet | None = None
        self._empty = threading.Lock()
        self._empty.acquire()

    def fill(self, packet: Packet | None) -> None:
        """Store the packet, once, and wake the readers. None: the run has failed and no packet will arrive."""
        self.packet = packet
        self._empty.release()

    def is_filled(self, seconds: float) -> bool:
        """Wait for at most `seconds`; return whether it was filled, perhaps with None."""
        if not self._empty.acquire(timeout=seconds):
            return False
        self._empty.release()
        return True

    def wait(self) -> Packet:
        """Block until it is filled and return the packet. Raises `Aborted` if it was filled with None."""
        with self._empty:
            if self.packet is None:
                raise Aborted
            return self.packet


def _at_once(is_filled: Callable[[float], bool]) -> None:
    """Leave the wait to a slot's own lock."""


class Exchange:
    """The slots of one call, of two kinds.

    Expected slots are declared with `expect`, filled once with `put`, and read with `take`, which waits for `put`.
    Optional slots need no declaration: `keep` stores a packet, and `fetch` returns None if there is none, since a
    layer may have written or saved nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[Slot, _PendingPacket] = {}
        self._kept: dict[Slot, Packet] = {}
        self._recomputed: set[tuple[int, int]] = set()
        self._closed = False

    # Before the tasks are launched

    def expect(self, slots: Iterable[Slot]) -> None:
        """Add one reader to each of these slots."""
        for slot in slots:
            self._pending.setdefault(slot, _PendingPacket()).readers += 1

    def expect_tasks(self, call: Call, tasks: Iterable[Task]) -> None:
        """Expect the slots that these tasks of a call take."""
        for task in tasks:
            self.expect(taken_by(call, task))
            if task.recomputes:
                self._recomputed.update((layer, m) for m in task.microbatches for layer in task.layers)

    # While they run

    def is_expected(self, slot: Slot) -> bool:
        """Whether the slot has readers, so that it must be filled."""
        return slot in self._pending

    def will_recompute(self, layer: int, microbatch: int) -> bool:
        """Whether the layer will be recomputed for this microbatch."""
        return (layer, microbatch) in self._recomputed

    def put(self, slot: Slot, packet: Packet) -> None:
        """Fill an expected slot; do nothing after `close`."""
        with self._lock:
            if not self._closed:
                self._pending[slot].fill(packet)

    def take(self, slot: Slot, wait_until: WaitUntil = _at_once) -> Packet:
        """Block until the slot is filled and return its packet. The last reader removes the slot.

        `wait_until` replaces the blocking wait and may raise, for example the caller's interrupt.

        Raises `Aborted` once the run has failed.
        """
        with self._lock:
            if self._closed:
                raise Aborted
            pending = self._pending[slot]
        wait_until(pending.is_filled)
        packet = pending.wait()
        with self._lock:
            pending.readers -= 1
            if pending.readers == 0:
                self._pending.pop(slot, None)
        return packet

    def keep(self, slot: Slot, packet: Packet) -> None:
        """Store a packet in an optional slot, for `fetch`."""
        with self._lock:
            self._kept[slot] = packet

    def fetch(self, slot: Slot) -> Packet | None:
        """Remove and return the packet of an optional slot; None if it has none."""
        with self._lock:
            return self._kept.pop(slot, None)

    # The end

    def close(self) -> None:
        """End the exchange after a failure: every waiting or later `take` raises `Aborted`."""
        with self._lock:
            self._closed = True
            waiting = [pending for pending in self._pending.values() if pending.packet is None]
        for pending in waiting:
            pending.fill(None)

    def clear(self) -> None:
        """Release the packets that were not taken."""
        self._pending.clear()
        self._kept.clear()


def taken_by(call: Call, task: Task) -> Iterator[Slot]:
    """The slots that a task of a call takes."""
    for boundary in task.layers if call.by_layer and task.recomputes else task.layers[:1]:
        yield from (Slot("input", boundary, microbatch) for microbatch in task.microbatches)
    if task.takes_gradients:
        yield from (Slot("grad", task.layers.stop, microbatch) for microbatch in task.microbatches)
    if call.computes_loss(task):
        yield from (Slot("label", task.layers.stop, microbatch) for microbatch in task.microbatches)
