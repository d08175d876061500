"""Summarize a profile: for each device, the time spent computing, copying and idle, by reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rp_telemetry.tables import readable_bytes, readable_ms, table
from rp_telemetry.tracing import COMPUTE, DISK_WAITS, HOST, OPTIMIZER, Span

Interval = tuple[float, float]

LAUNCH = "launch"
CALLER_BUSY = "between calls"


@dataclass(frozen=True, slots=True)
class DeviceSummary:
    """One device's times in seconds. `compute_s` and the values of `idle_s` add up to the profile's length.

    `upload_s` and `download_s`: time with copies in that direction, which may overlap with computing. `idle_s`: by
    reason: ``weights`` or ``activations`` are being uploaded; the ``stage before`` is still computing; ``memory``
    is short until gradients are downloaded; ``launch``: inside a call, but no task has reached this device yet or
    none is left; ``between calls``: the caller was not in a call.
    """

    name: str
    compute_s: float
    upload_s: float
    upload_bytes: int
    download_s: float
    download_bytes: int
    idle_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class DiskSummary:
    """What disks did: seconds with reads and with writes, which may be the same, and with a thread that waited."""

    read_s: float
    read_bytes: int
    write_s: float
    write_bytes: int
    wait_s: float

    def __str__(self) -> str:
        reads = f"{readable_ms(self.read_s)} ms of reads, {readable_bytes(self.read_bytes)}"
        writes = f"{readable_ms(self.write_s)} ms of writes, {readable_bytes(self.write_bytes)}"
        return f"disks: {reads}; {writes}; waited for {readable_ms(self.wait_s)} ms"


@dataclass(frozen=True, slots=True)
class ProfileSummary:
    """A profile's totals, from its first call to the end of the work that its calls launched; prints as a table.

    `num_calls`: of ``forward`` and ``forward_backward``. `num_steps`: of ``step``. `optimizer_s`: working time of
    steps and publications. `optimizer_wait_s`: their waiting time, not included; but that for disks is in
    `optimizer_s`. `disks`: zeros if nothing is on disk.
    """

    seconds: float
    num_calls: int
    num_steps: int
    devices: tuple[DeviceSummary, ...]
    optimizer_s: float
    optimizer_wait_s: float
    disks: DiskSummary

    def __str__(self) -> str:
        reasons = sorted({reason for device in self.devices for reason in device.idle_s})
        rows = [["compute", *(readable_ms(device.compute_s) for device in self.devices)]]
        rows += [[f"idle: {r}", *(readable_ms(d.idle_s.get(r, 0.0)) for d in self.devices)] for r in reasons]
        rows += [["uploads", *(readable_ms(device.upload_s) for device in self.devices)]]
        rows += [["  size", *(readable_bytes(device.upload_bytes) for device in self.devices)]]
        rows += [["downloads", *(readable_ms(device.download_s) for device in self.devices)]]
        rows += [["  size", *(readable_bytes(device.download_bytes) for device in self.devices)]]
        work, waits = readable_ms(self.optimizer_s), readable_ms(self.optimizer_wait_s)
        return "\n".join(
            [
                f"{self.num_calls} calls and {self.num_steps} steps in {readable_ms(self.seconds)} ms",
                table(["ms", *(device.name for device in self.devices)], rows),
                f"optimizer: {work} ms of work, {waits} ms of waits",
                *[str(self.disks)] * bool(self.disks.read_bytes or self.disks.write_bytes),
            ]
        )


def summarize(spans: Sequence[Span]) -> ProfileSummary:
    """Add up spans, by device and reason.

    >>> spans = [
    ...     Span("host", "caller", "call", "forward of m", 0.0, 4.0),
    ...     Span("cpu:0", "compute", "task", "F[0:1] m0", 1.0, 4.0),
    ...     Span("cpu:0", "compute", "wait", "wait for weights", 1.0, 2.5, reason="weights"),
    ... ]
    >>> summary = summarize(spans)
    >>> summary.devices[0].compute_s, dict(summary.devices[0].idle_s)
    (1.5, {'weights': 1.5, 'launch': 1.0})
    """
    start_s = min((span.start_s for span in spans), default=0.0)
    whole = (start_s, max((span.end_s for span in spans), default=0.0))
    calls = [span for span in spans if span.kind == "call"]
    names = sorted({span.place for span in spans if span.place != HOST})
    optimizer = [span for span in spans if span.row == OPTIMIZER]
    waits_s = _length(_union(_intervals(span for span in optimizer if span.kind == "wait")))
    return ProfileSummary(
        seconds=whole[1] - whole[0],
        num_calls=sum(_method(span) in ("forward", "forward_backward", "loss") for span in calls),
        num_steps=sum(_method(span) == "step" for span in calls),
        devices=tuple(_device(name, spans, _union(_intervals(calls)), whole) for name in names),
        optimizer_s=_length(_union(_intervals(optimizer))) - waits_s,
        optimizer_wait_s=waits_s,
        disks=_disks(spans),
    )


def _disks(spans: Sequence[Span]) -> DiskSummary:
    reads = [span for span in spans if span.kind == "read"]
    writes = [span for span in spans if span.kind == "write"]
    return DiskSummary(
        read_s=_length(_union(_intervals(reads))),
        read_bytes=sum(span.nbytes for span in reads),
        write_s=_length(_union(_intervals(writes))),
        write_bytes=sum(span.nbytes for span in writes),
        wait_s=_length(_union(_intervals(span for span in spans if span.row == DISK_WAITS))),
    )


def _method(call: Span) -> str:
    """Return the name of the called method, with which `in_call` begins its span's name."""
    return call.name.partition(" of ")[0]


def _device(name: str, spans: Sequence[Span], calls: Sequence[Interval], whole: Interval) -> DeviceSummary:
    own = [span for span in spans if span.place == name]
    computing = [span for span in own if span.row == COMPUTE]
    tasks = _union(_intervals(span for span in computing if span.kind == "task"))
    waits = [span for span in computing if span.kind == "wait"]
    waiting = _union(_intervals(waits))
    idle = {
        reason: _length(_union(_intervals(span for span in waits if span.reason == reason)))
        for reason in dict.fromkeys(span.reason for span in waits)
    }
    outside = _without([whole], _union([*tasks, *waiting]))
    idle[LAUNCH] = _length(outside) - _length(_without(outside, calls))
    idle[CALLER_BUSY] = _length(_without(outside, calls))
    uploads = [span for span in own if span.kind == "upload"]
    downloads = [span for span in own if span.kind == "download"]
    return DeviceSummary(
        name=name,
        compute_s=_length(_without(tasks, waiting)),
        upload_s=_length(_union(_intervals(uploads))),
        upload_bytes=sum(span.nbytes for span in uploads),
        download_s=_length(_union(_intervals(downloads))),
        download_bytes=sum(span.nbytes for span in downloads),
        idle_s={reason: seconds for reason, seconds in idle.items() if seconds},
    )


# Unions of time intervals: sorted, disjoint


def _intervals(spans: Iterable[Span]) -> list[Interval]:
    return [(span.start_s, span.end_s) for span in spans]


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _without(intervals: Iterable[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """Subtract `holes`, which must be sorted and disjoint, from intervals."""
    left: list[Interval] = []
    for start, end in intervals:
        at = start
        for hole_start, hole_end in holes:
            if hole_end <= at or hole_start >= end:
                continue
            if hole_start > at:
                left.append((at, hole_start))
            at = max(at, hole_end)
        if at < end:
            left.append((at, end))
    return left
