"""`Conveyor`: copy large blocks in chunks, so that urgent copies (activations) never wait long behind them.

A device's copy engine finishes the queued copies of one stream before it turns to another. Without chunks an
activation would wait for gigabytes of weights queued before it, and for more that are queued meanwhile. So blocks
are cut into chunks, of which fewer than two are in flight at once. Each part of a chunk is queued behind the
urgent copies that can start.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from rp_transfer.api import Backend, Device, Event, Stream
from rp_transfer.checks import check_plain
from rp_transfer.order.read_ahead import Expected, Piece, ReadAhead

CHUNK_BYTES = 64 << 20
# Copies are queued in parts of three quarters of a chunk, two of them in flight. While the second one runs (0.9 ms
# on a fast link) the thread has time for an interrupt and the GIL before it queues the next. An urgent
# copy waits for less than two chunks, even if its thread is late (benchmarks/results/performance.md).
_MOST_IN_FLIGHT = 2
# A remainder of up to this share of a part joins the part before it instead of becoming a small copy of its own.
_REST = 1 / 8
# A slot of the ring should fit the cores' caches: the host writes it, then the device reads it.
SLOT_BYTES = 16 << 20
_SLOTS = 4
# An empty copy takes some 2 µs, in which the link would move this many bytes.
_COPY_COST_BYTES = 128 << 10
_URGENT = 64

# Combines pieces of host blocks, which it may write, with the matching piece that has arrived from a device.
Combine = Callable[[Sequence[torch.Tensor], torch.Tensor], object]


@dataclass(slots=True)
class _Slot:
    """A buffer of the ring. `used_by`: the event after its last copy. `is_full`: the host has not read it yet."""

    memory: torch.Tensor
    used_by: Event | None = None
    is_full: bool = False

    def is_free(self) -> bool:
        """Return whether the buffer can be reused now. Never blocks."""
        return not self.is_full and (self.used_by is None or self.used_by.query())


class Conveyor:
    """Copies blocks between host and device over one stream, in chunks; one thread uses it.

    Unpinned host memory is copied through a small pinned ring, which the calling thread fills and empties with
    torch's intra-op threads.

    Args:
        chunk_bytes: size of a chunk. An urgent copy waits for less than two chunks.
        slot_bytes: maximum size of each of the ring's four slots.

    Raises `ValueError` for sizes below one byte.

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
        self._read_ahead = ReadAhead(backend, slot_bytes)
        # Bounded, since an idle conveyor does not consume it. Dropping an entry costs priority, not correctness.
        self._urgent: deque[tuple[Event | None, Event]] = deque(maxlen=_URGENT)
        # For each part in flight: the event after it, and memory that must live until then.
        self._in_flight: deque[tuple[Event, list[torch.Tensor]]] = deque()
        # The cost so far, in bytes, of the part being queued.
        self._open_bytes = 0
        self._open_tensors: list[torch.Tensor] = []

    def let_pass(self, ready: Event | None, done: Event) -> None:
        """Announce urgent copies: chunks queued later wait for them. Any thread may call this.

        Args:
            ready: the event after which the urgent copies can start; None if they can start now.
            done: the event after them. Once `ready` has finished, the next part waits for `done`.
        """
        self._urgent.append((ready, done))

    def upload(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy from host to device: (numel,) each, of one dtype.

        A pinned source must live until an event recorded afterwards has finished; an unpinned one is read on
        return.

        Raises `ValueError` for different sizes or dtypes.
        """
        destination, source = _checked("upload", destination, source, destination.dtype)
        if self._backend.is_pinned(source):
            self._send(destination, source)
        else:
            for there, here in _cut(self._slot_bytes, destination, source):
                self._upload_staged(there, here)

    def announce(self, pieces: Iterable[Piece]) -> Expected:
        """Note that `upload_read` will be called for these pieces, after those announced before.

        They are read as early as there is room in a pinned ring of eight slots. Any thread may call this. Dropping
        the result takes it back.
        """
        return self._read_ahead.announce(pieces)

    def upload_read(self, expected: Expected) -> None:
        """Read what was announced, as far as that is not done yet, and queue its copies to the device.

        Raises what a source raises.
        """
        self._read_ahead.upload(expected, self._send_read)

    def download(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy from device to host, (numel,) each. The device converts the numbers if the dtypes differ.

        A pinned destination is readable once an event recorded afterwards has finished; an unpinned one on return.

        Raises `ValueError` for different sizes.
        """
        destination, source = _checked("download", destination, source, source.dtype)
        if not self._backend.is_pinned(destination):
            self._download_staged((destination,), source, _overwrite)
        elif source.dtype == destination.dtype:
            self._send(destination, source)
        else:
            for here, there in _cut(self._chunk_bytes, destination, source):
                if not self._send_rounded(here, there, here.dtype):
                    self._download_staged((here,), there, _overwrite, there.dtype)

    def add(self, total: torch.Tensor, source: torch.Tensor) -> None:
        """Add `source`, on the device, to `total`, on the host: (numel,) each, of one dtype. Finished on return.

        Raises `ValueError` for different sizes or dtypes.
        """
        total, source = _checked("add", total, source, total.dtype)
        self._download_staged((total,), source, _add)

    def combine(self, totals: Sequence[torch.Tensor], source: torch.Tensor, combine: Combine) -> None:
        """Call ``combine(pieces, arrived)`` for matching pieces of `totals` and of `source`. Finished on return.

        `totals`: blocks on the host, (numel,) each, of one dtype; `combine` may write them. `source`: (numel,) on
        the device, converted there to their dtype.

        Raises `ValueError` for different sizes, and for `totals` that is empty or has several dtypes.
        """
        if not totals:
            raise ValueError("combine needs at least one block on the host, but has none")
        flat = [_checked("combine", total, source, source.dtype) for total in totals]
        for total in totals:
            _checked("combine", totals[0], total, totals[0].dtype)
        self._download_staged([total for total, _ in flat], flat[0][1], combine)

    def record(self) -> Event:
        """Record an event after everything queued so far."""
        event = self._stream.record()
        self._close(event)
        return event

    def drain(self) -> None:
        """Wait for everything queued so far, and release its memory."""
        self.record().synchronize()
        self._in_flight.clear()
        self._open_tensors = []
        self._urgent.clear()
        # After a failure the host never reads the slots, so they would stay full.
        for slot in self._ring:
            slot.is_full = False

    # Copies in chunks

    def _send(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        # Once for all parts: each look releases the GIL, as does making views, which only checking devices do.
        check_plain(destination, source)
        start, size = 0, source.element_size()
        while start < source.numel():
            self._make_room()
            stop = self._end_of_part(start, source.numel(), size)
            self._stream.copy_part(destination, source, range(start, stop))
            self._open_bytes += (stop - start) * size + _COPY_COST_BYTES
            start = stop
            if self._open_bytes >= self._part_bytes:
                self._close(self._stream.record())

    def _end_of_part(self, start: int, end: int, size: int) -> int:
        stop = start + max((self._part_bytes - self._open_bytes) // size, 1)
        return end if (end - stop) * size <= self._part_bytes * _REST else stop

    def _make_room(self) -> None:
        while len(self._in_flight) >= _MOST_IN_FLIGHT:
            # Wait first, then drop: the entry keeps memory alive until its event has finished.
            self._in_flight[0][0].synchronize()
            self._in_flight.popleft()
        while self._urgent:
            ready, done = self._urgent[0]
            # Later urgent copies wait behind this one on their own stream, so stop here.
            if ready is not None and not ready.query():
                return
            self._urgent.popleft()
            self._stream.wait(done)

    def _close(self, event: Event) -> None:
        if self._open_bytes:
            self._in_flight.append((event, self._open_tensors))
            self._open_bytes, self._open_tensors = 0, []

    def _send_rounded(self, destination: torch.Tensor, source: torch.Tensor, dtype: torch.dtype) -> bool:
        """Queue a copy, rounded to `dtype` on the device; return False if the device has no memory for that."""
        if source.dtype == dtype:
            self._send(destination, source)
            return True
        try:
            rounded = self._device.empty(source.shape, dtype, stream=self._stream)
        except torch.OutOfMemoryError:
            return False
        self._stream.cast(rounded, source)
        self._send(destination, rounded)
        # Keep it until the last part: earlier parts, which may hold its first bytes, finish before.
        self._open_tensors.append(rounded)
        return True

    # Copies through the ring

    def _send_read(self, destination: torch.Tensor, staged: torch.Tensor) -> Event:
        self._send(destination, staged)
        return self._stream.record()

    def _upload_staged(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        slot = self._slot(source.nbytes)
        memory = _like(slot.memory, source)
        self._backend.host_touch(read=(source,), write=(memory,), what="filling the ring")
        _copy(memory, source)
        self._send(destination, memory)
        slot.used_by = self._stream.record()

    def _download_staged(
        self,
        hosts: Sequence[torch.Tensor],
        source: torch.Tensor,
        combine: Combine,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Copy `source` through the ring, and combine each piece that arrives with its pieces of `hosts`.

        `dtype`: the dtype in the ring. None: that of `hosts`, unless the device has no memory to round to it.
        """
        dtype = hosts[0].dtype if dtype is None else dtype
        arriving: deque[tuple[Sequence[torch.Tensor], _Slot, torch.dtype]] = deque()
        for there, *here in _cut(self._slot_bytes, source, *hosts, dtype=dtype):
            slot = self._slot(there.numel() * dtype.itemsize)
            if not self._send_rounded(_like(slot.memory, there, dtype), there, dtype):
                while arriving:
                    self._combine(*arriving.popleft(), combine)
                # The host rounds as the device would.
                self._download_staged(here, there, combine, there.dtype)
                continue
            slot.is_full = True
            slot.used_by = self._stream.record()
            arriving.append((here, slot, dtype))
            if len(arriving) == _SLOTS - 1:
                self._combine(*arriving.popleft(), combine)
        while arriving:
            self._combine(*arriving.popleft(), combine)

    def _combine(self, hosts: Sequence[torch.Tensor], slot: _Slot, dtype: torch.dtype, combine: Combine) -> None:
        assert slot.used_by is not None
        slot.used_by.synchronize()
        staged = _like(slot.memory, hosts[0], dtype)
        self._backend.host_touch(read=(staged,), write=hosts, what="emptying the ring")
        with torch.no_grad():
            combine(hosts, staged.to(hosts[0].dtype))
        slot.is_full = False

    def _slot(self, nbytes: int) -> _Slot:
        """Return the least recently used slot, of at least `nbytes`, once its last copy has finished.

        If that slot is in use and the ring has fewer than `_SLOTS`, return a new slot.
        """
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


def _checked(
    what: str, destination: torch.Tensor, source: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both flat. Raises `ValueError` for other sizes or another dtype, and for other strides."""
    if destination.numel() != source.numel() or source.dtype != dtype:
        raise ValueError(
            f"{what} needs {destination.numel()} numbers of {dtype}, but the source has {source.numel()} of "
            f"{source.dtype}"
        )
    if destination.dim() == source.dim() == 1:
        return destination, source
    check_plain(destination, source)
    return destination.view(-1), source.view(-1)


def _cut(
    nbytes: int, *tensors: torch.Tensor, dtype: torch.dtype | None = None
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield matching pieces of all tensors, about equally long, of at most `nbytes` in `dtype` (the first's)."""
    numel = tensors[0].numel()
    most = max(nbytes // (tensors[0].dtype if dtype is None else dtype).itemsize, 1)
    step = math.ceil(numel / max(math.ceil(numel / most), 1))
    for start in range(0, numel, max(step, 1)):
        yield tuple(tensor[start : start + step] for tensor in tensors)


def _like(memory: torch.Tensor, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    dtype = tensor.dtype if dtype is None else dtype
    return memory[: tensor.numel() * dtype.itemsize].view(dtype)


def _overwrite(totals: Sequence[torch.Tensor], arrived: torch.Tensor) -> None:
    totals[0].copy_(arrived)


def _add(totals: Sequence[torch.Tensor], arrived: torch.Tensor) -> None:
    totals[0].add_(arrived)


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        destination.copy_(source)
