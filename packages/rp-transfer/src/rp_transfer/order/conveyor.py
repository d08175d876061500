"""Copies of whole blocks in chunks, so that what is urgent never waits long behind them.

A device's copy engine works off one stream's copies before it looks at the next one's: an activation waits for all
the gigabytes of weights that were queued before it, and, as long as more are queued, for those too. So blocks are
cut, less than two chunks are under way at once, and each part is queued behind the urgent copies that can start.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from rp_transfer.api import Backend, Device, Event, Stream

CHUNK_BYTES = 64 << 20
# A chunk is queued in parts of three quarters, two of them under way: one to go on with for 0.9 ms on a fast link,
# enough for an interrupt and for Python's lock (docs/performance.md), and what is urgent waits for less than two
# chunks even if a thread comes late.
_UNDER_WAY = 2
# What is left after a part goes with it, up to this share of it, rather than as a small one of its own.
_REST = 1 / 8
# Staged through the ring, a piece should fit the cores' caches: the host writes it, then the device reads it.
SLOT_BYTES = 16 << 20
_SLOTS = 4
# A copy of nothing takes some 2 µs, in which the link would move this much.
_COPY_COST_BYTES = 128 << 10
_URGENT = 64

Combine = Callable[[torch.Tensor, torch.Tensor], object]


@dataclass(slots=True)
class _Slot:
    """A piece of the ring, the copy that uses it, and whether the host has yet to empty it after that."""

    memory: torch.Tensor
    used_by: Event | None = None
    is_full: bool = False

    def is_free(self) -> bool:
        """Whether all that is over. Never blocks."""
        return not self.is_full and (self.used_by is None or self.used_by.query())


class Conveyor:
    """Carries blocks over one stream in chunks; one thread uses it.

    Host memory that is not pinned goes through a small pinned ring, filled and emptied by the calling thread with
    torch's intra-op threads.

    Args:
        chunk_bytes: size of a chunk; less than two are under way, so other copies wait for two at most.
        slot_bytes: most that each of the ring's four slots takes.

    Raises `ValueError` for sizes under one byte.

    >>> from rp_transfer import CpuBackend
    >>> backend = CpuBackend(1)
    >>> device = backend.devices[0]
    >>> conveyor = Conveyor(backend, device, device.weights_in)
    >>> block = device.empty((3,), torch.float32, stream=device.weights_in)
    >>> conveyor.upload(block, torch.ones(3))
    >>> conveyor.record().synchronize()
    >>> block
    tensor([1., 1., 1.])
    """

    def __init__(
        self,
        backend: Backend,
        device: Device,
        stream: Stream,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        if chunk_bytes < 1 or slot_bytes < 1:
            raise ValueError(f"chunk_bytes and slot_bytes must be >= 1, but are {chunk_bytes} and {slot_bytes}")
        self._backend = backend
        self._device = device
        self._stream = stream
        self._chunk_bytes = chunk_bytes
        self._slot_bytes = slot_bytes
        self._part_bytes = max(chunk_bytes * 3 // 4, 1)
        self._ring: deque[_Slot] = deque()
        # An idle conveyor forgets the oldest: they only come first, nothing depends on them.
        self._urgent: deque[tuple[Event | None, Event]] = deque(maxlen=_URGENT)
        # Events after each part of a chunk, and memory that must live until then.
        self._under_way: deque[tuple[Event, list[torch.Tensor]]] = deque()
        # What was queued since the last of them: its cost in bytes.
        self._open = 0
        self._kept: list[torch.Tensor] = []

    def let_pass(self, ready: Event | None, done: Event) -> None:
        """Queue no chunk before urgent copies that can start at `ready` and end at `done`; for any thread."""
        self._urgent.append((ready, done))

    def upload(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy from the host: (numel,) each, of one dtype.

        A pinned source is read until an event recorded afterwards; another one has been read on return.

        Raises `ValueError` for different sizes or dtypes.
        """
        _check("upload", destination, source, destination.dtype)
        if self._backend.is_pinned(source):
            self._send(destination, source)
        else:
            for there, here in _cut(destination, source, self._slot_bytes):
                self._upload_staged(there, here)

    def download(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy to the host: (numel,) each; another dtype is rounded to on the device.

        A pinned destination may be read after an event recorded afterwards; another one is written on return.

        Raises `ValueError` for different sizes.
        """
        _check("download", destination, source, source.dtype)
        if self._backend.is_pinned(destination):
            for here, there in _cut(destination, source, self._chunk_bytes):
                self._send_rounded(here, there, here.dtype)
        else:
            self._download_staged(destination, source, destination.dtype, _copy)

    def add(self, total: torch.Tensor, source: torch.Tensor) -> None:
        """Add the device's numbers to the host's, on the host: (numel,) each, of one dtype. Done on return.

        Raises `ValueError` for different sizes or dtypes.
        """
        _check("add", total, source, total.dtype)
        self._download_staged(total, source, total.dtype, torch.Tensor.add_)

    def record(self) -> Event:
        """An event after everything carried so far."""
        event = self._stream.record()
        self._close(event)
        return event

    def drain(self) -> None:
        """Wait for everything that was carried, and let go of it."""
        self.record().synchronize()
        self._under_way.clear()
        self._kept = []
        self._urgent.clear()
        # After a failure the host does not come back to empty them.
        for slot in self._ring:
            slot.is_full = False

    # In chunks

    def _send(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        start, size = 0, source.element_size()
        while start < source.numel():
            self._make_room()
            stop = self._end_of_part(start, source.numel(), size)
            self._stream.copy(destination[start:stop], source[start:stop])
            self._open += (stop - start) * size + _COPY_COST_BYTES
            start = stop
            if self._open >= self._part_bytes:
                self._close(self._stream.record())

    def _end_of_part(self, start: int, end: int, size: int) -> int:
        stop = start + max((self._part_bytes - self._open) // size, 1)
        return end if (end - stop) * size <= self._part_bytes * _REST else stop

    def _make_room(self) -> None:
        while len(self._under_way) >= _UNDER_WAY:
            # In this order: what the entry keeps must live until then.
            self._under_way[0][0].synchronize()
            self._under_way.popleft()
        while self._urgent:
            ready, done = self._urgent[0]
            # Those behind it are behind it on their own stream, too.
            if ready is not None and not ready.query():
                return
            self._urgent.popleft()
            self._stream.wait(done)

    def _close(self, event: Event) -> None:
        if self._open:
            self._under_way.append((event, self._kept))
            self._open, self._kept = 0, []

    def _send_rounded(self, destination: torch.Tensor, source: torch.Tensor, dtype: torch.dtype) -> None:
        if source.dtype == dtype:
            self._send(destination, source)
            return
        rounded = self._device.empty(source.shape, dtype, stream=self._stream)
        self._stream.cast(rounded, source)
        self._send(destination, rounded)
        # With what was queued last: its first bytes may be in a part before.
        self._kept.append(rounded)

    # Through the ring

    def _upload_staged(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        slot = self._slot(source.nbytes)
        memory = _like(slot.memory, source)
        self._backend.host_touch(read=(source,), write=(memory,), what="filling the ring")
        _copy(memory, source)
        self._send(destination, memory)
        slot.used_by = self._stream.record()

    def _download_staged(
        self, host: torch.Tensor, source: torch.Tensor, dtype: torch.dtype, combine: Combine
    ) -> None:
        on_the_way: deque[tuple[torch.Tensor, _Slot]] = deque()
        for here, there in _cut(host, source, self._slot_bytes):
            slot = self._slot(here.nbytes)
            slot.is_full = True
            self._send_rounded(_like(slot.memory, here), there, dtype)
            slot.used_by = self._stream.record()
            on_the_way.append((here, slot))
            if len(on_the_way) == _SLOTS - 1:
                self._empty(*on_the_way.popleft(), combine)
        while on_the_way:
            self._empty(*on_the_way.popleft(), combine)

    def _empty(self, host: torch.Tensor, slot: _Slot, combine: Combine) -> None:
        assert slot.used_by is not None
        slot.used_by.synchronize()
        staged = _like(slot.memory, host)
        self._backend.host_touch(read=(staged,), write=(host,), what="emptying the ring")
        with torch.no_grad():
            combine(host, staged)
        slot.is_full = False

    def _slot(self, nbytes: int) -> _Slot:
        """The slot that was used the longest ago, or a new one if that is still in use; no larger than needed."""
        if not self._ring or (len(self._ring) < _SLOTS and not self._ring[0].is_free()):
            self._ring.append(_Slot(self._backend.host_empty((nbytes,), torch.uint8)))
        else:
            self._ring.rotate(-1)
        slot = self._ring[-1]
        if slot.used_by is not None:
            slot.used_by.synchronize()
        if slot.memory.nbytes < nbytes:
            slot.memory = self._backend.host_empty((nbytes,), torch.uint8)
        return slot


def _check(what: str, destination: torch.Tensor, source: torch.Tensor, dtype: torch.dtype) -> None:
    if destination.numel() != source.numel() or source.dtype != dtype:
        raise ValueError(
            f"{what} needs {destination.numel()} numbers of {dtype}, but the source has {source.numel()} of "
            f"{source.dtype}"
        )


def _cut(one: torch.Tensor, other: torch.Tensor, nbytes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pieces of the same length, of at most `nbytes` in the dtype of the first."""
    most = max(nbytes // one.element_size(), 1)
    step = math.ceil(one.numel() / max(math.ceil(one.numel() / most), 1))
    for start in range(0, one.numel(), max(step, 1)):
        yield one[start : start + step], other[start : start + step]


def _like(memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return memory[: tensor.nbytes].view(tensor.dtype)


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        destination.copy_(source)
