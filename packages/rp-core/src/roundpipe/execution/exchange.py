"""What the tasks of one call hand to each other, and its caller to them: packets in named slots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from rp_sched import Task

from roundpipe.device.packet import Packet, Slot

WaitUntil = Callable[[Callable[[float], bool]], None]
"""Calls a function, which waits for so many seconds, until it returns true."""


class Aborted(Exception):
    """Another task of the same run failed; users never see it."""


class _Place:
    """Holds one packet for a known number of readers; locked while it is empty."""

    __slots__ = ("_empty", "packet", "readers")

    def __init__(self) -> None:
        self.readers = 0
        self.packet: Packet | None = None
        self._empty = threading.Lock()
        self._empty.acquire()

    def fill(self, packet: Packet | None) -> None:
        """Once; None where nothing will come."""
        self.packet = packet
        self._empty.release()

    def is_filled(self, seconds: float) -> bool:
        """Wait so long at most; whether it is filled, perhaps with nothing."""
        if not self._empty.acquire(timeout=seconds):
            return False
        self._empty.release()
        return True

    def wait(self) -> Packet:
        """Block until it is filled; raise `Aborted` where nothing will come."""
        with self._empty:
            if self.packet is None:
                raise Aborted
            return self.packet


class Exchange:
    """The slots of one call.

    Those that `expect` was told of are filled once, and `take` blocks until they are; the others are kept for
    whoever comes (`keep` and `fetch`): what a layer wrote or saved may be nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[Slot, _Place] = {}
        self._kept: dict[Slot, Packet] = {}
        self._recomputed: set[tuple[int, int]] = set()
        self._closed = False

    # Before the tasks are launched

    def expect(self, slots: Iterable[Slot]) -> None:
        """One more reader for each of these slots."""
        for slot in slots:
            self._places.setdefault(slot, _Place()).readers += 1

    def expect_tasks(self, tasks: Iterable[Task], *, by_layer: bool) -> None:
        """Make the slots that these tasks take; `by_layer`: a backward task recomputes one layer at a time."""
        for task in tasks:
            self.expect(_taken_by(task, by_layer=by_layer))
            if task.recomputes:
                self._recomputed.update((layer, m) for m in task.microbatches for layer in task.layers)

    # While they run

    def is_expected(self, slot: Slot) -> bool:
        """Whether somebody takes what is put there."""
        return slot in self._places

    def will_recompute(self, layer: int, microbatch: int) -> bool:
        """Whether the layer will be run again."""
        return (layer, microbatch) in self._recomputed

    def put(self, slot: Slot, packet: Packet) -> None:
        """Fill a slot that is expected."""
        with self._lock:
            if not self._closed:
                self._places[slot].fill(packet)

    def take(self, slot: Slot, wait_until: WaitUntil | None = None) -> Packet:
        """Block until the slot is filled, and return what is in it. The last reader empties it.

        `wait_until` waits in place of a lock, and may raise: a caller's interrupt ends it.

        Raises `Aborted` once the run has failed.
        """
        with self._lock:
            if self._closed:
                raise Aborted
            place = self._places[slot]
        if wait_until is not None:
            wait_until(place.is_filled)
        packet = place.wait()
        with self._lock:
            place.readers -= 1
            if place.readers == 0:
                self._places.pop(slot, None)
        return packet

    def keep(self, slot: Slot, packet: Packet) -> None:
        """Keep a packet for whoever fetches it."""
        with self._lock:
            self._kept[slot] = packet

    def fetch(self, slot: Slot) -> Packet | None:
        """What was kept there, once."""
        with self._lock:
            return self._kept.pop(slot, None)

    # The end

    def close(self) -> None:
        """Nothing comes any more: wake everybody who waits."""
        with self._lock:
            self._closed = True
            waiting = [place for place in self._places.values() if place.packet is None]
        for place in waiting:
            place.fill(None)

    def clear(self) -> None:
        """Let go of what nobody took."""
        self._places.clear()
        self._kept.clear()


def _taken_by(task: Task, *, by_layer: bool) -> Iterator[Slot]:
    boundaries = task.layers if by_layer and task.recomputes else task.layers[:1]
    for microbatch in task.microbatches:
        yield from (Slot("input", boundary, microbatch) for boundary in boundaries)
        if task.takes_gradients:
            yield Slot("grad", task.layers.stop, microbatch)
        if task.computes_loss:
            yield Slot("label", task.layers.stop, microbatch)
