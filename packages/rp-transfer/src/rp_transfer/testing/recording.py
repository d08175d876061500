"""`Recording`: a backend wrapper that records each stream operation's time and size, and which ones overlap."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from rp_transfer.api import Backend, Device, Event, MemoryUse, Stream
from rp_transfer.cpu.race_detector import Clock, join

_STREAMS = ("compute", "weights_in", "activations_in", "results_out", "gradients_out")


@dataclass(frozen=True, slots=True)
class Operation:
    """One copy, conversion, declared use (`Stream.touch`) or `computing` block on a stream.

    `start_s`, `end_s`: seconds on the device's clock since the recording began. `clock`: for each stream, how many
    operations come before this one in every run, by the waits alone. `index`: its own stream's place in `clock`,
    whose entry counts this operation too.
    """

    device: int
    stream: str
    what: str
    nbytes: int
    start_s: float
    end_s: float
    clock: tuple[int, ...]
    index: int

    def overlapped(self, other: Operation) -> bool:
        """Return whether both ran at the same time, on different streams of one device."""
        same = self.device == other.device and self.stream != other.stream
        return same and self.start_s < other.end_s and other.start_s < self.end_s

    def may_overlap(self, other: Operation) -> bool:
        """Return whether no wait orders them, so that a fast enough device could run them at the same time."""
        return not (self._before(other) or other._before(self))

    def _before(self, other: Operation) -> bool:
        return self.clock[self.index] <= other.clock[self.index]


class Recording:
    """A backend that wraps another one and records what its streams run; use it in place of the wrapped one.

    >>> from rp_transfer import CpuBackend
    >>> recording = Recording(CpuBackend(1))
    >>> device = recording.devices[0]
    >>> there = device.empty((4,), torch.float32, stream=device.weights_in)
    >>> source = torch.ones(4)
    >>> device.weights_in.copy(there, source)
    >>> [(operation.stream, operation.what, operation.nbytes) for operation in recording.operations()]
    [('cpu:0/weights_in', 'copy', 16)]
    """

    def __init__(self, backend: Backend) -> None:
        self._log = _Log(len(backend.devices) * len(_STREAMS))
        self.abilities = backend.abilities
        self.devices = tuple(
            RecordedDevice(device, number, self._log) for number, device in enumerate(backend.devices)
        )
        self.host_empty = backend.host_empty
        self.host_blocks = backend.host_blocks
        self.host_touch = backend.host_touch
        self.is_pinned = backend.is_pinned
        self.register = backend.register
        self.host_memory = backend.host_memory
        self.close = backend.close

    def operations(self) -> list[Operation]:
        """Wait for all operations so far, and return them in the order in which they were enqueued."""
        for device in self.devices:
            device.synchronize()
        return [entry.measured() for entry in list(self._log.entries)]

    def chart(self, width: int = 96) -> str:
        """Draw a timeline: one line for each stream that ran anything, time from left to right."""
        operations = self.operations()
        end = max((operation.end_s for operation in operations), default=0.0) or 1.0
        rows = {operation.stream: [" "] * width for operation in operations}
        for operation in operations:
            first, last = (int(seconds / end * (width - 1)) for seconds in (operation.start_s, operation.end_s))
            rows[operation.stream][first : last + 1] = operation.what[0] * (last + 1 - first)
        lines = [f"{name:>22} |{''.join(row)}|" for name, row in sorted(rows.items())]
        return "\n".join(
            [*lines, f"{'':>22}  0 to {end * 1000:.3f} ms; (c)opy, (r)ounding, (w)ork, and uses by their names"]
        )


@dataclass(frozen=True, slots=True)
class _Entry:
    operation: Operation
    base: Event
    first: Event
    last: Event

    def measured(self) -> Operation:
        start, end = self.first.seconds_since(self.base), self.last.seconds_since(self.base)
        return replace(self.operation, start_s=start, end_s=end)


class _Log:
    def __init__(self, num_streams: int) -> None:
        self.lock = threading.RLock()
        self.entries: list[_Entry] = []
        self.num_streams = num_streams
        # The operations that host threads have waited for: they precede all work enqueued afterwards.
        self.host: Clock = [0] * num_streams


class RecordedEvent:
    """An event of the wrapped backend, with the vector clock of its stream."""

    def __init__(self, inner: Event, clock: tuple[int, ...], log: _Log) -> None:
        self.inner = inner
        self.clock = clock
        self._log = log

    def query(self) -> bool:
        """See `Event`."""
        over = self.inner.query()
        if over:
            self._join_host()
        return over

    def synchronize(self) -> None:
        """See `Event`."""
        self.inner.synchronize()
        self._join_host()

    def seconds_since(self, earlier: Event) -> float:
        """See `Event`."""
        return self.inner.seconds_since(earlier.inner if isinstance(earlier, RecordedEvent) else earlier)

    def _join_host(self) -> None:
        with self._log.lock:
            join(self._log.host, self.clock)


class RecordedStream:
    """A stream of the wrapped backend that times what is enqueued on it."""

    def __init__(self, inner: Stream, device: int, index: int, base: Event, log: _Log) -> None:
        self.inner = inner
        self.name = inner.name
        self._device = device
        self._index = index
        self._log = log
        self._clock: Clock = [0] * log.num_streams
        self._base = base

    def wait(self, event: Event) -> None:
        """See `Stream`."""
        self.inner.wait(event.inner if isinstance(event, RecordedEvent) else event)
        if isinstance(event, RecordedEvent):
            with self._log.lock:
                join(self._clock, event.clock)

    def record(self, *, timed: bool = False) -> RecordedEvent:
        """See `Stream`."""
        inner = self.inner.record(timed=timed)
        with self._log.lock:
            join(self._clock, self._log.host)
            return RecordedEvent(inner, tuple(self._clock), self._log)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """See `Stream`."""
        with self.during("copy", source.nbytes):
            self.inner.copy(destination, source)

    def copy_part(self, destination: torch.Tensor, source: torch.Tensor, part: range) -> None:
        """See `Stream`."""
        with self.during("copy", len(part) * source.element_size()):
            self.inner.copy_part(destination, source, part)

    def cast(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """See `Stream`."""
        with self.during("rounding", source.nbytes):
            self.inner.cast(destination, source)

    def touch(
        self, *, read: Iterable[torch.Tensor] = (), write: Iterable[torch.Tensor] = (), what: str = ""
    ) -> None:
        """See `Stream`."""
        with self.during(what or "use", 0):
            self.inner.touch(read=read, write=write, what=what)

    @contextmanager
    def during(self, what: str, nbytes: int) -> Generator[None]:
        """Record all work enqueued inside this context as one operation."""
        first = self.inner.record(timed=True)
        with self._log.lock:
            join(self._clock, self._log.host)
            self._clock[self._index] += 1
            clock = tuple(self._clock)
        yield
        operation = Operation(self._device, self.name, what, nbytes, 0.0, 0.0, clock, self._index)
        with self._log.lock:
            self._log.entries.append(_Entry(operation, self._base, first, self.inner.record(timed=True)))


class RecordedDevice:
    """A device of the wrapped backend with recorded streams."""

    def __init__(self, inner: Device, number: int, log: _Log) -> None:
        self._inner = inner
        self.name = inner.name
        self.torch_device = inner.torch_device
        self.attach_thread = inner.attach_thread
        self.generator = inner.generator
        self.reset_peak_memory = inner.reset_peak_memory
        self.synchronize = inner.synchronize
        self.release_unused = inner.release_unused
        self.obtainable_bytes = inner.obtainable_bytes
        self.graph_pool = inner.graph_pool
        self.capture = inner.capture
        base = inner.compute.record(timed=True)
        self.compute, self.weights_in, self.activations_in, self.results_out, self.gradients_out = (
            RecordedStream(getattr(inner, name), number, number * len(_STREAMS) + offset, base, log)
            for offset, name in enumerate(_STREAMS)
        )

    @contextmanager
    def computing(self) -> Generator[None]:
        """See `Device`."""
        with self._inner.computing(), self.compute.during("work", 0):
            yield

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, stream: Stream) -> torch.Tensor:
        """See `Device`."""
        owner = stream.inner if isinstance(stream, RecordedStream) else stream
        return self._inner.empty(shape, dtype, stream=owner)

    def memory(self) -> MemoryUse:
        """See `Device`."""
        return self._inner.memory()
