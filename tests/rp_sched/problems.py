"""Models, limits and task lists for properties; all numbers are whole, so that times are exact."""

from itertools import pairwise

from hypothesis import strategies as st
from rp_sched import LayerCost, Limits, Plan, Task

MODES = ("infer", "train", "fused")
# A byte takes 1 ms, 0.5 ms or no time.
SPEEDS = (None, 1e-6, 2e-6)


@st.composite
def layers(draw: st.DrawFn, bytes_up_to: int = 6) -> LayerCost:
    weight_bytes = draw(st.integers(0, bytes_up_to))
    return LayerCost(
        draw(st.integers(0, 6)),
        draw(st.integers(0, 9)),
        weight_bytes=weight_bytes,
        trainable_bytes=draw(st.integers(0, weight_bytes)),
        boundary_bytes=draw(st.integers(0, 3)),
        kept_bytes=draw(st.integers(0, bytes_up_to)),
    )


def models(least: int = 1, most: int = 5) -> st.SearchStrategy[list[LayerCost]]:
    return st.integers(least, most).flatmap(lambda count: st.lists(layers(), min_size=count, max_size=count))


@st.composite
def limits(draw: st.DrawFn, costs: list[LayerCost], *, links: bool) -> Limits:
    """Limits that a single layer keeps."""
    each = [cost.weight_bytes + cost.gradient_bytes + cost.kept_bytes for cost in costs]
    device = draw(st.none() | st.integers(max(1, *each), max(1, 2 * sum(each))) if costs else st.none())
    most = max(1, sum(each)) if device is None else device // 2
    stage = draw(st.none() | st.integers(1, most)) if most else None
    ahead = draw(st.none() | st.integers(1, most)) if most and stage is None else None
    return Limits(
        device_memory_bytes=device,
        stage_bytes=stage,
        ahead_bytes=ahead,
        upload_gb_s=draw(st.sampled_from(SPEEDS)) if links else None,
        download_gb_s=draw(st.sampled_from(SPEEDS)) if links else None,
        hop_ms=draw(st.integers(0, 2)),
    )


def cut(layers: range, marks: set[int]) -> list[range]:
    edges = sorted({layers.start, layers.stop} | {mark for mark in marks if mark in layers})
    return [range(a, b) for a, b in pairwise(edges)]


@st.composite
def plans(draw: st.DrawFn, num_layers: int, microbatches: int, mode: str) -> Plan:
    """Any valid plan."""
    marks = st.sets(st.integers(1, 5))
    below = draw(st.integers(0, num_layers - 1)) if mode == "fused" else num_layers
    forward, backward = ([span for span in cut(range(below), draw(marks)) if span] for _ in range(2))

    def groups(wanted: bool) -> list[range]:
        return cut(range(microbatches), draw(marks)) if wanted and draw(st.booleans()) else []

    return Plan(
        forward,
        range(below, num_layers) if mode == "fused" else None,
        backward[::-1] if mode != "infer" else (),
        groups(mode == "fused"),
        groups(bool(forward)),
        groups(bool(backward) and mode != "infer"),
        draw(st.booleans()),
        draw(st.none() | st.integers(1, 3)),
    )


@st.composite
def roads(draw: st.DrawFn, num_layers: int, group: range, mode: str) -> list[Task]:
    """How one group of microbatches goes through the model and back."""
    marks, devices = st.sets(st.integers(1, 4)), st.integers(0, 2)
    below = draw(st.integers(0, num_layers - 1)) if mode == "fused" else num_layers
    road = [Task("F", span, group, draw(devices)) for span in cut(range(below), draw(marks)) if span]
    if mode == "fused":
        road.append(Task("FB", range(below, num_layers), group, draw(devices)))
    if mode != "infer":
        road += [Task("B", span, group, draw(devices)) for span in cut(range(below), draw(marks))[::-1] if span]
    return road


@st.composite
def calls(draw: st.DrawFn, num_layers: int, microbatches: int, mode: str) -> list[Task]:
    """A task list in which groups of microbatches go different ways, mixed with each other; three devices."""
    groups = cut(range(microbatches), draw(st.sets(st.integers(1, 2))))
    waiting = [draw(roads(num_layers, group, mode)) for group in groups]
    listed: list[Task] = []
    while any(waiting):
        ready = [road for road in waiting if road]
        if mode == "train" and any(road[0].kind == "F" for road in ready):
            ready = [road for road in ready if road[0].kind == "F"]
        listed.append(draw(st.sampled_from(ready)).pop(0))
    return listed
