"""Measure the transfers of one launch: bytes and times by device and direction, and porters' processor time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from rp_transfer import Event, Stream

Way = Literal["up", "down", "add"]
"""To the device, from it, or from it and added to gradients on the host."""


class Unmoved:
    """A transfer in progress that nobody measures."""

    def end(self, way: Way, nbytes: int, *, is_staged: bool = False) -> None:
        """Note that the whole transfer is queued, or done if the host took part: `is_staged`, or it was added."""


class Untimed:
    """Of a launch whose transfers nobody measures."""

    def begin(self, device: str, stream: Stream) -> Unmoved:
        """Begin a transfer that the calling thread, a porter, queues on `stream`."""
        return _UNMOVED


_UNMOVED = Unmoved()
UNTIMED = Untimed()


@dataclass(slots=True)
class Transfers(Untimed):
    """The transfers of blocks in one launch. Times may be read once the transfers are over.

    `processor`: the calling thread's processor time, in seconds. All threads of a launch add to it.
    """

    processor: Callable[[], float] = time.thread_time
    _moved: list[_Moved] = field(default_factory=list["_Moved"])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, device: str, stream: Stream) -> Moving:
        """Begin a transfer that the calling thread, a porter, queues on `stream`."""
        return Moving(self, device, stream, stream.record(timed=True), self.processor())

    def add(self, moved: _Moved) -> None:
        """Record a transfer that has ended."""
        with self._lock:
            self._moved.append(moved)

    def moved(self, way: Way) -> dict[str, tuple[int, float]]:
        """Return, by device, the bytes moved and the milliseconds that it took."""
        totals: dict[str, tuple[int, float]] = {}
        for one in self._moved:
            if one.way == way:
                nbytes, ms = totals.get(one.device, (0, 0.0))
                totals[one.device] = nbytes + one.nbytes, ms + one.ms()
        return totals

    def carried(self) -> tuple[int, float]:
        """Return the bytes that porters copied directly, and the ms of processor time that it took them."""
        direct = [one for one in self._moved if one.is_direct]
        return sum(one.nbytes for one in direct), sum(one.processor_ms for one in direct)


@dataclass(frozen=True, slots=True)
class Moving(Unmoved):
    """A transfer in progress; end it on the thread that began it."""

    _owner: Transfers
    _device: str
    _stream: Stream
    _first: Event
    _processor_s: float

    def end(self, way: Way, nbytes: int, *, is_staged: bool = False) -> None:
        """Note that the whole transfer is queued, or done if the host took part: `is_staged`, or it was added."""
        processor_ms = (self._owner.processor() - self._processor_s) * 1e3
        is_direct = way != "add" and not is_staged
        events = self._first, self._stream.record(timed=True)
        self._owner.add(_Moved(way, self._device, nbytes, events, processor_ms, is_direct))


@dataclass(frozen=True, slots=True)
class _Moved:
    way: Way
    device: str
    nbytes: int
    events: tuple[Event, Event]
    processor_ms: float
    is_direct: bool

    def ms(self) -> float:
        """Return its duration on the device's clock. The last event is recorded after the host's part."""
        first, last = self.events
        return max(last.seconds_since(first), 0.0) * 1e3
