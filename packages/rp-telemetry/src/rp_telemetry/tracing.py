"""Tracers: record spans of the engine's work on streams and threads, while a profile or NVTX ranges are active.

Code that launches work calls `current()` once, under the launch lock, and passes the tracer along with the work.
Otherwise the tracer is `SILENT`, which records nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from rp_errors import Busy
from rp_transfer import Device, Event, Stream

SpanKind = Literal[
    "task",
    "layer",
    "upload",
    "download",
    "wait",
    "step",
    "publication",
    "call",
    "reduce",
    "gather",
    "read",
    "write",
]
"""`task`: one microbatch of a task, from its first use of the device to its last. `layer`: one layer of that.
`upload`, `download`: a copy between host and device. `wait`: a stream or thread is blocked. `step`, `publication`:
work of the optimizer's thread. `call`: the caller is inside a model's method. `reduce`, `gather`: transfers of
gradients to the machine that owns them, and of new weights from there. `read`, `write`: of disks."""

HOST = "host"
CALLER = "caller"
OPTIMIZER = "optimizer"
REDUCE = "reduce"
GATHER = "gather"
DISK_READS, DISK_WRITES, DISK_WAITS = _DISKS = "disk reads", "disk writes", "waits for disks"
COMPUTE = "compute"
NOTHING = nullcontext()
# Nsight Systems sets the first in the processes it starts; users set the second.
_RANGE_VARIABLES = ("NSYS_PROFILING_SESSION_ID", "ROUNDPIPE_NVTX")


@dataclass(frozen=True, slots=True)
class Span:
    """A period of work or waiting on one row: a stream of a device, or a thread of the host.

    `place`: the device's name or ``host``. `start_s`, `end_s`: seconds since the profile began, by the device's
    clock for streams. `reason`: what a wait is for, in a word; `name` describes it.
    """

    place: str
    row: str
    kind: SpanKind
    name: str
    start_s: float
    end_s: float
    nbytes: int = 0
    reason: str = ""

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.end_s - self.start_s


class Followed(Protocol):
    """Work that goes on elsewhere, such as `rp_optim.jobs.Outcome`."""

    def wait(self) -> object:
        """Wait until it has ended, however it ends."""
        ...


@dataclass(frozen=True, slots=True)
class _Timed:
    """A stream's span before its times are read from its events."""

    device: Device
    span: Span
    first: Event
    last: Event


@dataclass(frozen=True, slots=True)
class _Clock:
    """Ties a device's clock to the host's: an event, and the host's time when it happened."""

    event: Event
    began_s: float


class Tracer:
    """The interface that the engine reports to, from any thread; this base class records nothing.

    `name`: the span's name, or a format string such as ``"weights of {}"`` for `parts`. It is formatted only if
    the span is recorded, since most spans occur for every layer and microbatch.
    """

    def on_stream(
        self,
        device: Device,
        stream: Stream,
        kind: SpanKind,
        name: str,
        *parts: object,
        nbytes: int = 0,
        reason: str = "",
    ) -> AbstractContextManager[None]:
        """Record a span of the work queued on a stream inside the context, or of a wait of its thread."""
        del device, stream, kind, name, parts, nbytes, reason
        return NOTHING

    def copying(
        self, device: Device, stream: Stream, kind: SpanKind, name: str, leaves: Iterable[object]
    ) -> AbstractContextManager[None]:
        """Record a span of the copies of the tensors among these leaves."""
        del device, stream, kind, name, leaves
        return NOTHING

    def on_host(self, row: str, kind: SpanKind, name: str, *, reason: str = "") -> AbstractContextManager[None]:
        """Record a span of the calling thread's work inside the context."""
        del row, kind, name, reason
        return NOTHING

    def past(
        self,
        row: str,
        kind: SpanKind,
        name: str,
        start_s: float,
        end_s: float,
        nbytes: int = 0,
        reason: str = "",
    ) -> None:
        """Record a span of work of other host threads between these times of `time.perf_counter`.

        Spans of one row do not overlap: each begins when the previous one has ended, at the earliest.
        """
        del row, kind, name, start_s, end_s, nbytes, reason

    def waiting(self, device: Device, reason: str, what: str, *parts: object) -> AbstractContextManager[None]:
        """Record a span of a wait for `what` in which the device's compute stream, or its thread, is idle."""
        del device, reason, what, parts
        return NOTHING

    def follow(self, work: Followed) -> None:
        """Make the end of the profile wait for this work."""
        del work


SILENT = Tracer()


class Recorder(Tracer):
    """Records spans from any thread: stores them if `keep`, emits them as NVTX ranges if `ranges`.

    A span whose body raises is not stored.
    """

    def __init__(self, *, keep: bool, ranges: bool) -> None:
        self._keep = keep
        self._ranges = ranges
        self._zero_s = time.perf_counter()
        self._spans: list[Span] = []
        self._past: list[Span] = []
        self._timed: list[_Timed] = []
        self._clocks: dict[Device, _Clock] = {}
        self._lock = threading.Lock()
        self._settling = threading.Lock()
        self._followed: deque[Followed] = deque()

    # What the engine calls

    @contextmanager
    def on_stream(
        self,
        device: Device,
        stream: Stream,
        kind: SpanKind,
        name: str,
        *parts: object,
        nbytes: int = 0,
        reason: str = "",
    ) -> Generator[None]:
        """See `Tracer.on_stream`; called on a thread of the device."""
        name = name.format(*parts)
        if not self._keep:
            with self._range(name):
                yield
            return
        self._start_clock(device, stream)
        first = stream.record(timed=True)
        with self._range(name):
            yield
        row = stream.name.rpartition("/")[2]
        span = Span(device.name, row, kind, name, 0.0, 0.0, nbytes, reason)
        timed = _Timed(device, span, first, stream.record(timed=True))
        with self._lock:
            self._timed.append(timed)

    @contextmanager
    def on_host(self, row: str, kind: SpanKind, name: str, *, reason: str = "") -> Generator[None]:
        """See `Tracer.on_host`."""
        start_s = self._now_s()
        with self._range(name):
            yield
        if self._keep:
            self._spans.append(Span(HOST, row, kind, name, start_s, self._now_s(), 0, reason))

    def past(
        self,
        row: str,
        kind: SpanKind,
        name: str,
        start_s: float,
        end_s: float,
        nbytes: int = 0,
        reason: str = "",
    ) -> None:
        """See `Tracer.past`."""
        if self._keep:
            # It may have begun before the profile.
            times_s = max(start_s - self._zero_s, 0.0), end_s - self._zero_s
            self._past.append(Span(HOST, row, kind, name, *times_s, nbytes, reason))

    def copying(
        self, device: Device, stream: Stream, kind: SpanKind, name: str, leaves: Iterable[object]
    ) -> AbstractContextManager[None]:
        """See `Tracer.copying`."""
        nbytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        return self.on_stream(device, stream, kind, name, nbytes=nbytes)

    def waiting(self, device: Device, reason: str, what: str, *parts: object) -> AbstractContextManager[None]:
        """See `Tracer.waiting`."""
        return self.on_stream(device, device.compute, "wait", f"wait for {what}", *parts, reason=reason)

    def follow(self, work: Followed) -> None:
        """See `Tracer.follow`."""
        if self._keep:
            self._followed.append(work)

    # The end

    def finish(self) -> list[Span]:
        """Wait for all followed work; return all spans, ordered by start."""
        while self._followed:
            # A task may add its gradient downloads to the queue while it is being waited for.
            self._followed.popleft().wait()
        self.settle(list(self._clocks))
        return sorted([*self._spans, *_without_overlap(self._past)], key=lambda span: (span.start_s, -span.end_s))

    def settle(self, devices: Iterable[Device]) -> None:
        """Read the times of these devices' spans; must run before the devices are closed."""
        with self._settling:
            for device in [device for device in devices if device in self._clocks]:
                device.synchronize()
                clock = self._clocks.pop(device)
                with self._lock:
                    done = [timed for timed in self._timed if timed.device is device]
                    self._timed = [timed for timed in self._timed if timed.device is not device]
                self._spans += [_measured(timed, clock) for timed in done]

    # Clocks and ranges

    def _now_s(self) -> float:
        return time.perf_counter() - self._zero_s

    def _start_clock(self, device: Device, stream: Stream) -> None:
        if device in self._clocks:
            return
        with self._lock:
            if device not in self._clocks:
                event = stream.record(timed=True)
                event.synchronize()
                self._clocks[device] = _Clock(event, self._now_s())

    def _range(self, name: str) -> AbstractContextManager[None]:
        return _nvtx_range(name) if self._ranges else NOTHING


def _without_overlap(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield the spans of each row, shortened so that none begins before the previous one has ended.

    Of a row the previous one is that which ended before. Of disks it is that which began before: what reads beside
    a longer read takes no time of its own.
    """
    ended_s: dict[str, float] = {}
    for span in sorted(spans, key=_place_in_row):
        before_s = ended_s.get(span.row, 0.0)
        ended_s[span.row] = max(before_s, span.end_s)
        yield replace(span, start_s=min(max(span.start_s, before_s), span.end_s))


def _place_in_row(span: Span) -> tuple[float, float]:
    return (span.start_s, span.end_s) if span.row in _DISKS else (span.end_s, 0.0)


def _measured(timed: _Timed, clock: _Clock) -> Span:
    start_s, end_s = (clock.began_s + event.seconds_since(clock.event) for event in (timed.first, timed.last))
    return replace(timed.span, start_s=start_s, end_s=end_s)


@contextmanager
def _nvtx_range(name: str) -> Generator[None]:
    # Not `torch.cuda.nvtx.range`: it formats the name, so braces in it would be replaced.
    torch.cuda.nvtx.range_push(name)  # pyright: ignore[reportUnknownMemberType]
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


def ranges_wanted() -> bool:
    """Return whether to emit NVTX ranges: CUDA is available, and Nsight or ``ROUNDPIPE_NVTX=1`` requests them.

    >>> ranges_wanted()
    False
    """
    is_requested = any(os.environ.get(name, "0") not in ("", "0") for name in _RANGE_VARIABLES)
    return is_requested and torch.cuda.is_available()


class _Switch:
    """The process's active profile.

    `launching`: the recorder that new launches use. `tracer`: the recorder until the profile has ended, including
    while it only waits for work launched earlier. `where`: its destination.
    """

    def __init__(self) -> None:
        self.launching: Recorder | None = None
        self.tracer: Recorder | None = None
        self.where = ""
        self.lock = threading.Lock()
        self._ranges: list[Tracer] = []

    def ranges(self) -> Tracer:
        """Return the tracer to use when no profile is active; reads the environment once."""
        if not self._ranges:
            self._ranges.append(Recorder(keep=False, ranges=True) if ranges_wanted() else SILENT)
        return self._ranges[0]


_SWITCH = _Switch()


def current() -> Tracer:
    """Return the tracer for work that is launched now."""
    return _SWITCH.launching or _SWITCH.ranges()


def of_profile() -> Tracer:
    """Return the tracer for work of which nobody knows whether it was launched before the profile or in it."""
    return _SWITCH.tracer or SILENT


def in_call(what: str, name: str) -> AbstractContextManager[None]:
    """Record a span of the launcher's work for one call of a model's method."""
    return current().on_host(CALLER, "call", f"{what} of {name}")


def switch_on(where: str, *, ranges: bool) -> Recorder:
    """Begin a profile. `where`: its destination, for error messages.

    Raises `Busy` while another profile is active.
    """
    with _SWITCH.lock:
        if _SWITCH.tracer is not None:
            raise Busy(
                f"a profile is already active, for {_SWITCH.where}; end it first: a process takes one profile "
                "at a time, and profiles do not nest"
            )
        _SWITCH.where = where
        _SWITCH.launching = _SWITCH.tracer = Recorder(keep=True, ranges=ranges or ranges_wanted())
        return _SWITCH.tracer


def stop_launches() -> None:
    """Stop recording new launches: the profile is about to end."""
    _SWITCH.launching = None


def switch_off() -> None:
    """End the profile."""
    with _SWITCH.lock:
        _SWITCH.launching = _SWITCH.tracer = None


def devices_go(devices: Iterable[Device]) -> None:
    """Read the profile's times of devices that are about to be closed and have no work queued."""
    if _SWITCH.tracer is not None:
        _SWITCH.tracer.settle(devices)
