"""Convert timelines to the trace format of Chrome and Perfetto."""

from collections.abc import Iterator

from rp_sched.simulation.timeline import TaskSpan, Timeline

Event = dict[str, str | int | float | dict[str, str | int]]
US_PER_MS = 1e3
# Rows of each device in the viewer.
_COMPUTE, _WEIGHTS, _IDLE = 0, 1, 2


def trace(timeline: Timeline) -> dict[str, list[Event] | str]:
    """Convert a timeline to JSON data: a process per device, with rows for compute, weights and idle time.

    >>> from rp_sched import LayerCost, Task, simulate
    >>> tasks = [Task.parse("F[0:1] m0:1 @0")]
    >>> played = simulate([tasks], [LayerCost(1.0)], devices=1, microbatches=1, mode="infer")
    >>> [event["name"] for event in trace(played)["traceEvents"] if event["ph"] == "X"]
    ['F[0:1] m0']

    Source: the Trace Event Format, complete events (`ph` is X), in microseconds.
    """
    return {"displayTimeUnit": "ms", "traceEvents": list(_events(timeline))}


def _events(timeline: Timeline) -> Iterator[Event]:
    for device in range(timeline.devices):
        yield {"ph": "M", "name": "process_name", "pid": device, "args": {"name": f"device {device}"}}
        for row, name in ((_COMPUTE, "compute"), (_WEIGHTS, "weights"), (_IDLE, "idle")):
            yield {"ph": "M", "name": "thread_name", "pid": device, "tid": row, "args": {"name": name}}
    for span in timeline.spans:
        yield from _of_span(span)
    for idle in timeline.idle:
        yield _event(idle.reason, idle.device, _IDLE, idle.start_ms, idle.end_ms, {})


def _of_span(span: TaskSpan) -> Iterator[Event]:
    task, device = span.task, span.task.device
    about: dict[str, str | int] = {"task": repr(task), "call": span.call}
    for microbatch, (start_ms, end_ms) in zip(task.microbatches, span.microbatches, strict=True):
        name = f"{task.kind}[{task.layers.start}:{task.layers.stop}] m{microbatch}"
        yield _event(name, device, _COMPUTE, start_ms, end_ms, about)
    if span.fetched_ms > span.fetch_ms:
        yield _event(f"weights of {task!r}", device, _WEIGHTS, span.fetch_ms, span.fetched_ms, about)


def _event(name: str, device: int, row: int, start_ms: float, end_ms: float, about: dict[str, str | int]) -> Event:
    start_us, duration_us = start_ms * US_PER_MS, (end_ms - start_ms) * US_PER_MS
    return {"ph": "X", "name": name, "pid": device, "tid": row, "ts": start_us, "dur": duration_us, "args": about}
