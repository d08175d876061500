"""`ReadAhead`: bytes that are not in host memory, such as a file's, in a ring of pinned memory on their way."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from rp_transfer.api import Backend, Event
from rp_transfer.memory.raw import bytes_of

# So many slots hide the latency of a disk; beyond them nothing is faster.
SLOTS = 8


class Reading(Protocol):
    """A read under way."""

    def wait(self) -> int:
        """Wait for all bytes; return where in the memory they begin.

        Raises what the read has failed with; the memory may still be in use then, and nobody uses it again.
        """
        ...


class ByteSource(Protocol):
    """Bytes that are read into host memory for each upload."""

    @property
    def alignment(self) -> int:
        """What addresses of the memory must be multiples of; reads take as much room before and after them."""
        ...

    def begin(self, start: int, stop: int, memory: memoryview) -> Reading:
        """Begin to read the bytes ``[start, stop)`` into memory of ``stop - start + 2 * alignment`` bytes."""
        ...


# Where bytes go on a device, (numel,), and where they come from.
Piece = tuple[torch.Tensor, ByteSource]
# Queues the copy of what has arrived, (numel,) each; returns the event after it.
Send = Callable[[torch.Tensor, torch.Tensor], Event]


class Expected:
    """Pieces that were announced. Who drops it no longer expects them."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = tuple(pieces)


@dataclass(slots=True)
class _Slot:
    """Memory of the ring, (nbytes,) uint8. `used_by`: the event after its last copy."""

    memory: torch.Tensor
    used_by: Event | None = None


@dataclass(slots=True)
class _Part:
    """A range of elements of a piece, no larger than a slot; once its read has begun, with its slot."""

    expected: weakref.ref[Expected]
    piece: int
    start: int
    stop: int
    slot: _Slot | None = None
    reading: Reading | None = None


class ReadAhead:
    """Reads what was announced, in that order, into pinned slots, ahead of the copies to a device.

    Any thread may `announce`; one other thread uploads, in the order of the announcements. Announcements that were
    dropped are passed over. At most `slots` slots of `slot_bytes` are pinned.

    Raises `ValueError` for fewer than one slot or byte.
    """

    def __init__(self, backend: Backend, slot_bytes: int, slots: int = SLOTS) -> None:
        if slot_bytes < 1 or slots < 1:
            raise ValueError(f"slot_bytes and slots must be >= 1, but are {slot_bytes} and {slots}")
        self._backend = backend
        self._slot_bytes = slot_bytes
        self._slots = slots
        # Of the parts so far: slots are no larger than they need to be.
        self._largest_bytes = 0
        self._coming: deque[_Part] = deque()
        self._begun: deque[_Part] = deque()
        # In the order of their last use.
        self._free: deque[_Slot] = deque()

    def announce(self, pieces: Iterable[Piece]) -> Expected:
        """Note that these pieces will be uploaded after those announced before."""
        expected = Expected(pieces)
        for index, (destination, _) in enumerate(expected.pieces):
            most = max(self._slot_bytes // destination.element_size(), 1)
            largest = min(most, destination.numel()) * destination.element_size()
            self._largest_bytes = max(self._largest_bytes, largest)
            for start in range(0, destination.numel(), most):
                stop = min(start + most, destination.numel())
                self._coming.append(_Part(weakref.ref(expected), index, start, stop))
        return expected

    def upload(self, expected: Expected, send: Send) -> None:
        """Have all pieces sent. Raises what a read has failed with; the rest of them is then passed over."""
        self._pass_over(expected)
        try:
            while self._is_next(expected):
                self._send_first(expected, send)
        except BaseException:
            self._begin_anew(expected)
            raise
        self._read_more()

    def _is_next(self, expected: Expected) -> bool:
        parts = self._begun or self._coming
        return bool(parts) and parts[0].expected() is expected

    def _send_first(self, expected: Expected, send: Send) -> None:
        self._read_more()
        part = self._begun[0]
        assert part.slot is not None
        assert part.reading is not None
        first = part.reading.wait()
        destination = expected.pieces[part.piece][0][part.start : part.stop]
        staged = part.slot.memory[first : first + destination.nbytes].view(destination.dtype)
        self._backend.host_touch(write=(staged,), what="reading ahead")
        part.slot.used_by = send(destination, staged)
        self._free.append(part.slot)
        self._begun.popleft()

    def _read_more(self) -> None:
        """Begin to read what is coming, while slots are free; at least one part if none is under way."""
        while self._coming:
            part = self._coming[0]
            expected = part.expected()
            if expected is not None:
                destination, source = expected.pieces[part.piece]
                slot = self._slot(source.alignment, must=not self._begun)
                if slot is None:
                    return
                size = destination.element_size()
                part.slot = slot
                part.reading = source.begin(part.start * size, part.stop * size, bytes_of(slot.memory))
                self._begun.append(part)
            self._coming.popleft()

    def _slot(self, alignment: int, *, must: bool) -> _Slot | None:
        if self._free and self._is_idle(self._free[0]):
            return self._fitting(self._free.popleft(), alignment)
        if len(self._free) + len(self._begun) < self._slots:
            return self._new(alignment)
        if not must:
            return None
        slot = self._free.popleft()
        if slot.used_by is not None:
            slot.used_by.synchronize()
        return self._fitting(slot, alignment)

    def _is_idle(self, slot: _Slot) -> bool:
        return slot.used_by is None or slot.used_by.query()

    def _fitting(self, slot: _Slot, alignment: int) -> _Slot:
        is_aligned = slot.memory.data_ptr() % alignment == 0
        is_large = slot.memory.nbytes >= self._largest_bytes + 2 * alignment
        return slot if is_aligned and is_large else self._new(alignment)

    def _new(self, alignment: int) -> _Slot:
        nbytes = self._largest_bytes + 2 * alignment
        memory = self._backend.host_empty((nbytes + alignment,), torch.uint8)
        first = -memory.data_ptr() % alignment
        return _Slot(memory[first : first + nbytes])

    def _pass_over(self, expected: Expected) -> None:
        """Drop what was announced before and is expected no longer; nobody else uploads."""
        while self._begun and self._begun[0].expected() is not expected:
            part = self._begun.popleft()
            assert part.slot is not None
            assert part.reading is not None
            # Memory of a read that has failed may still be in use.
            with suppress(Exception):
                part.reading.wait()
                self._free.append(part.slot)
        while not self._begun and self._coming and self._coming[0].expected() is not expected:
            self._coming.popleft()

    def _begin_anew(self, failed: Expected) -> None:
        """After a failure read again what comes later, into other memory: the disk may still write to this."""
        later = [part for part in self._begun if part.expected() not in (failed, None)]
        self._begun.clear()
        while self._coming and self._coming[0].expected() is failed:
            self._coming.popleft()
        for part in reversed(later):
            part.slot = part.reading = None
            self._coming.appendleft(part)
