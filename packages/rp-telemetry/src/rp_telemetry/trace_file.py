"""Convert spans to the Trace Event Format of Perfetto and ``chrome://tracing``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from rp_telemetry.tracing import (
    CALLER,
    DISK_READS,
    DISK_WAITS,
    DISK_WRITES,
    GATHER,
    HOST,
    OPTIMIZER,
    REDUCE,
    Span,
)

TraceEvent = dict[str, str | int | float | dict[str, str | int]]

_US_PER_S = 1e6
_ROWS = {
    HOST: (CALLER, OPTIMIZER, REDUCE, GATHER, DISK_READS, DISK_WRITES, DISK_WAITS),
    "": ("compute", "weights_in", "activations_in", "results_out", "gradients_out"),
}


def trace_events(spans: Sequence[Span]) -> dict[str, str | list[TraceEvent]]:
    """Convert spans: one process for the host and one for each device, one thread for each row.

    >>> trace = trace_events([Span("cpu:0", "compute", "task", "F[0:1] m0", 0.5, 0.75)])
    >>> [(event["name"], event["ts"], event["dur"]) for event in trace["traceEvents"] if event["ph"] == "X"]
    [('F[0:1] m0', 500000.0, 250000.0)]

    Source: the Trace Event Format, complete events (`ph` is X), in microseconds.
    """
    places = [HOST, *sorted({span.place for span in spans} - {HOST})]
    numbers = {place: number for number, place in enumerate(places)}
    used = {span.row for span in spans} | {CALLER, OPTIMIZER, *_ROWS[""]}
    names = [event for place, number in numbers.items() for event in _names(place, number, used)]
    return {"displayTimeUnit": "ms", "traceEvents": names + [_event(span, numbers[span.place]) for span in spans]}


def _names(place: str, number: int, used: Collection[str]) -> Iterator[TraceEvent]:
    yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": place}}
    yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
    for row, name in ((row, name) for row, name in enumerate(_rows(place)) if name in used):
        yield {"ph": "M", "name": "thread_name", "pid": number, "tid": row, "args": {"name": name}}


def _rows(place: str) -> tuple[str, ...]:
    return _ROWS[HOST] if place == HOST else _ROWS[""]


def _event(span: Span, number: int) -> TraceEvent:
    details: dict[str, str | int] = {}
    if span.nbytes:
        details["bytes"] = span.nbytes
    if span.kind == "wait":
        details["waited_for"] = span.reason
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": number,
        "tid": _rows(span.place).index(span.row),
        "ts": span.start_s * _US_PER_S,
        "dur": span.seconds * _US_PER_S,
        "args": details,
    }
