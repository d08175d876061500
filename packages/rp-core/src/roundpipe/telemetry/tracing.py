"""What the engine tells about its work while somebody asks: spans of streams and of threads.

Whoever launches work asks `current()` once, under the launch lock, and hands the tracer on with the work. It is
`SILENT` unless a profile is being taken or NVTX ranges are wanted.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from rp_optim.jobs import Outcome
from rp_transfer import Device, Event, Stream

from roundpipe.errors import Busy

SpanKind = Literal["task", "layer", "upload", "download", "wait", "step", "publication", "call"]
"""`task`: one microbatch of a task, from its first use of the device to its last. `layer`: a part of that. `wait`:
nothing could be done. `step`, `publication`: the optimizer's. `call`: the caller is inside a model's method."""

HOST = "host"
CALLER = "caller"
OPTIMIZER = "optimizer"
COMPUTE = "compute"
NOTHING = nullcontext()
# Nsight Systems sets the first in the processes it starts; the second is for people who ask.
_ASKING = ("NSYS_PROFILING_SESSION_ID", "ROUNDPIPE_NVTX")


@dataclass(frozen=True, slots=True)
class Span:
    """Something that went on, or somebody who waited, on one row of a device or of the host.

    `start_s` and `end_s` are seconds since the profile began; of streams, by the device's clock. `reason` is what
    a wait was for, in a word; `name` says it in full.
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
        """How long."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class _Timed:
    """A span of a stream, whose times the device knows."""

    device: Device
    span: Span
    first: Event
    last: Event


@dataclass(frozen=True, slots=True)
class _Clock:
    """A device's clock: an event, and the host's time when it happened."""

    event: Event
    began_s: float


class Tracer:
    """Is told what the engine does, from any thread; this one keeps none of it."""

    def on_stream(
        self,
        device: Device,
        stream: Stream,
        kind: SpanKind,
        name: str,
        *,
        nbytes: int = 0,
        reason: str = "",
    ) -> AbstractContextManager[None]:
        """Around what is put on the stream, and what its thread waits for."""
        del device, stream, kind, name, nbytes, reason
        return NOTHING

    def on_host(self, row: str, kind: SpanKind, name: str, *, reason: str = "") -> AbstractContextManager[None]:
        """Around what the calling thread does."""
        del row, kind, name, reason
        return NOTHING

    def waiting(self, device: Device, reason: str, what: str) -> AbstractContextManager[None]:
        """Around a wait in which the device's compute stream, or the thread that feeds it, is idle."""
        return self.on_stream(device, device.compute, "wait", f"wait for {what}", reason=reason)

    def follow(self, work: Outcome[Any]) -> None:
        """Count this work among what the end of a profile waits for."""
        del work


SILENT = Tracer()


class Recorder(Tracer):
    """Takes spans in from any thread: keeps them if `keep`, and shows them as NVTX ranges if `ranges`.

    Spans within which something was raised are left out.
    """

    def __init__(self, *, keep: bool, ranges: bool) -> None:
        self._keep = keep
        self._ranges = ranges
        self._zero_s = time.perf_counter()
        self._spans: list[Span] = []
        self._timed: list[_Timed] = []
        self._clocks: dict[Device, _Clock] = {}
        self._lock = threading.Lock()
        self._settling = threading.Lock()
        self._followed: deque[Outcome[Any]] = deque()

    # What the engine calls

    @contextmanager
    def on_stream(
        self,
        device: Device,
        stream: Stream,
        kind: SpanKind,
        name: str,
        *,
        nbytes: int = 0,
        reason: str = "",
    ) -> Generator[None]:
        """See `Tracer.on_stream`; on a thread of the device."""
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

    def follow(self, work: Outcome[Any]) -> None:
        """See `Tracer.follow`."""
        if self._keep:
            self._followed.append(work)

    # The end

    def finish(self) -> list[Span]:
        """All spans in the order of their start, once all that was followed is over."""
        while self._followed:
            # Tasks hand gradients over while they are waited for, so more may come.
            self._followed.popleft().wait()
        self.settle(list(self._clocks))
        return sorted(self._spans, key=lambda span: (span.start_s, -span.end_s))

    def settle(self, devices: Iterable[Device]) -> None:
        """Ask the devices' clocks, before they go."""
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


def _measured(timed: _Timed, clock: _Clock) -> Span:
    start_s, end_s = (clock.began_s + event.seconds_since(clock.event) for event in (timed.first, timed.last))
    return replace(timed.span, start_s=start_s, end_s=end_s)


@contextmanager
def _nvtx_range(name: str) -> Generator[None]:
    # Torch's own context manager takes braces in the name for places to fill in.
    torch.cuda.nvtx.range_push(name)  # pyright: ignore[reportUnknownMemberType]
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


def ranges_wanted() -> bool:
    """Whether this process runs under Nsight Systems or was asked for NVTX ranges (``ROUNDPIPE_NVTX=1``).

    >>> ranges_wanted()
    False
    """
    asked = any(os.environ.get(name, "0") not in ("", "0") for name in _ASKING)
    return asked and torch.cuda.is_available()


class _Switch:
    """Who is told of launches, and the recorder of the profile that is being taken until it has ended."""

    def __init__(self) -> None:
        self.told: Recorder | None = None
        self.tracer: Recorder | None = None
        self.where = ""
        self.lock = threading.Lock()
        self._ranges: list[Tracer] = []

    def ranges(self) -> Tracer:
        """The tracer without a profile; the environment is read once."""
        if not self._ranges:
            self._ranges.append(Recorder(keep=False, ranges=True) if ranges_wanted() else SILENT)
        return self._ranges[0]


_SWITCH = _Switch()


def current() -> Tracer:
    """Who is told about what is launched now."""
    return _SWITCH.told or _SWITCH.ranges()


def in_call(what: str, name: str) -> AbstractContextManager[None]:
    """Around what the launcher does for one call of a model's method."""
    return current().on_host(CALLER, "call", f"{what} of {name}")


def switch_on(where: str, *, ranges: bool) -> Recorder:
    """Begin a profile; `where` it goes, in words.

    Raises `Busy` while another one is being taken.
    """
    with _SWITCH.lock:
        if _SWITCH.tracer is not None:
            raise Busy(
                f"a profile is being taken already, for {_SWITCH.where}; end that one first: there is one at a "
                "time in a process, and they do not nest"
            )
        _SWITCH.where = where
        _SWITCH.told = _SWITCH.tracer = Recorder(keep=True, ranges=ranges or ranges_wanted())
        return _SWITCH.tracer


def stop_launches() -> None:
    """What is launched from now on is not told: the profile is about to end."""
    _SWITCH.told = None


def switch_off() -> None:
    """The profile has ended."""
    with _SWITCH.lock:
        _SWITCH.told = _SWITCH.tracer = None


def devices_go(devices: Iterable[Device]) -> None:
    """These devices are about to be closed; nothing is under way on them."""
    if _SWITCH.tracer is not None:
        _SWITCH.tracer.settle(devices)
