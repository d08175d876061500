"""How near the planner comes to ideal times for published layer times, and how long it takes to plan.

    uv run python benchmarks/plan.py

Five models on eight devices. A time over the ideal one: every layer but the head recomputed, no device idle; below
1 the fused stage recomputes less. The first table is calls that follow each other, links that keep up, and at most
7 GB of weights and 32-bit gradients a stage; "to reach" is what a simple search found, "bound" what work alone
takes. The second is one call alone beside the classic schedules, which keep their weights and so have no limit;
the third has links of 55 GB/s for weights and gradients. Then what devices share: the price of plans beside their
full simulation, on drawn machines. The last two are planning times: medians of turns, and the processor time of
large problems, with links alone and with all that a host shares, beside the published method in the same turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rp_sched import (
    Host,
    LayerCost,
    Limits,
    Plan,
    PricedPlan,
    Replanner,
    Search,
    check_order,
    plan,
    simulate,
    simulated_ms,
)
from rp_sched.planners.classic import CLASSIC, even_stages
from side_by_side import side_by_side

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "rp_sched"))
from machines import cases
from published import MODELS, Published

DEVICES = 8
MICROBATCHES = (9, 16)
LINK_GB_S = 55.0
HOST = Host(memory_gb_s=300, gil_ms_per_gb=5, add_gb_s=25, gradient_buffers=1, optimizer_gb_s=200)


def main() -> None:
    """Print all tables."""
    for title, rows in (
        ("calls that follow each other, over ideal", steady_rows()),
        ("one call alone, over ideal", alone_rows()),
        (f"calls that follow each other, links of {LINK_GB_S:g} GB/s each way, over ideal", linked_rows()),
        ("devices of 139 GB, Qwen3-1.7B, over ideal", whole_rows()),
        ("price of a plan over its full simulation, drawn machines", price_rows()),
        ("planning", planning_rows()),
        ("planning large problems, processor time", large_rows()),
    ):
        print(f"\n{title}\n")
        for row in rows:
            print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, (16, *[12] * 9), strict=False)))


def found(model: Published, microbatches: int, limits: Limits) -> PricedPlan:
    """The adaptive plan."""
    how = {"devices": DEVICES, "microbatches": microbatches, "mode": "fused", "limits": limits}
    return Search(model.costs, **how).finish()


def published(model: Published, microbatches: int, limits: Limits) -> PricedPlan:
    """The plan of the published method."""
    how = {"microbatches": microbatches, "mode": "fused", "limits": limits}
    return PricedPlan(plan(model.costs, devices=DEVICES, strategy="roundrobin", **how), model.costs, **how)


def over_ideal(model: Published, microbatches: int, ms: float) -> str:
    """A time as a part of the ideal one."""
    return f"{ms / model.ideal_ms(microbatches, DEVICES):.4f}"


def settings() -> Iterator[tuple[Published, int]]:
    """Every model with every number of microbatches."""
    for model in MODELS:
        for microbatches in MICROBATCHES:
            yield model, microbatches


def steady_rows() -> Iterator[Sequence[object]]:
    """Ours, what was to be reached, the published method, and the least that work alone takes."""
    yield "model", "microbatches", "adaptive", "to reach", "roundrobin", "bound", "stages", "tasks"
    for model, microbatches in settings():
        ours, theirs = (make(model, microbatches, model.limits) for make in (found, published))
        times = (ours.steady_ms(DEVICES), theirs.steady_ms(DEVICES), least_ms(model, microbatches))
        adaptive, roundrobin, bound = (over_ideal(model, microbatches, ms) for ms in times)
        reach = f"{model.to_reach[microbatches]:.3f}"
        yield model.name, microbatches, adaptive, reach, roundrobin, bound, stages(ours.plan), len(ours.jobs)


def least_ms(model: Published, microbatches: int) -> float:
    """All devices always busy, and the longest fused stage that fits."""
    forward, backward = model.layer_ms
    state_gb = [gb * (1 + 2 * model.trainable) for gb in (model.head_gb, model.layer_gb)]
    fused = min(int((7 - state_gb[0]) / state_gb[1]), model.layers)
    once = model.layers * (forward + backward) + sum(model.head_ms) + (model.layers - fused) * forward
    return once * microbatches / DEVICES


def stages(made: Plan) -> str:
    """Numbers of forward, fused and backward stages."""
    return f"{len(made.forward)}+1+{len(made.backward)}"


def alone_rows() -> Iterator[Sequence[object]]:
    """One call on idle devices; loops are the stages of each device."""
    loops = {"gpipe": 1, "1f1b": 1, "interleaved-1f1b": 2, "looped-bfs": 4}
    names = [name if count == 1 else f"{name[:9]} {count}" for name, count in loops.items()]
    yield "model", "microbatches", "adaptive", "roundrobin", *names
    for model, microbatches in settings():
        ours = [make(model, microbatches, model.limits).alone_ms(DEVICES) for make in (found, published)]
        classic = [classic_ms(model, microbatches, name, count) for name, count in loops.items()]
        cells = ["-" if ms is None else over_ideal(model, microbatches, ms) for ms in (*ours, *classic)]
        yield model.name, microbatches, *cells


def classic_ms(model: Published, microbatches: int, name: str, loops: int) -> float | None:
    """A classic schedule, if it takes so many microbatches."""
    try:
        tasks = CLASSIC[name](even_stages(model.costs, DEVICES * loops), DEVICES, microbatches)
    except ValueError:
        return None
    check_order(tasks, len(model.costs), microbatches, "fused", devices=DEVICES)
    how = {"devices": DEVICES, "microbatches": microbatches, "mode": "fused", "limits": model.limits}
    return simulate([tasks], model.costs, **how).makespan_ms


def linked_rows() -> Iterator[Sequence[object]]:
    """The same with weights and gradients that take time on the links of each device."""
    yield "model", "microbatches", "adaptive", "roundrobin", "stages", "tasks"
    for model, microbatches in settings():
        limits = replace(model.limits, upload_gb_s=LINK_GB_S, download_gb_s=LINK_GB_S)
        ours, theirs = (make(model, microbatches, limits) for make in (found, published))
        times = (over_ideal(model, microbatches, priced.steady_ms(DEVICES)) for priced in (ours, theirs))
        yield model.name, microbatches, *times, stages(ours.plan), len(ours.jobs)


def whole_rows() -> Iterator[Sequence[object]]:
    """Where a device holds the whole model."""
    yield "model", "microbatches", "adaptive", "stages", "tasks"
    model = MODELS[0]
    for microbatches in (8, 9, 16):
        ours = found(model, microbatches, Limits(device_memory_bytes=139 * 10**9, hop_ms=model.hop_ms))
        times = over_ideal(model, microbatches, ours.steady_ms(DEVICES))
        yield model.name, microbatches, times, stages(ours.plan), len(ours.jobs)


def planning_rows() -> Iterator[Sequence[object]]:
    """Seconds until there is a plan, until the search is over, and when nothing moved."""
    yield "model", "layers", "at once", "all", "cached"
    for model in MODELS:
        how = {"devices": DEVICES, "microbatches": 16, "mode": "fused", "limits": model.limits}
        replanner = Replanner(model.costs, **how)
        ways = {
            "at once": lambda how=how, model=model: Search(model.costs, **how),
            "all": lambda how=how, model=model: Search(model.costs, **how).finish(),
            "cached": replanner.priced_plan,
        }
        seconds = side_by_side(ways, rounds=7, warmup=1)
        cells = (f"{seconds[name] * 1e3:.1f} ms" for name in ("at once", "all"))
        yield model.name, len(model.costs), *cells, f"{seconds['cached'] * 1e6:.1f} us"


def price_rows() -> Iterator[Sequence[object]]:
    """Relative errors of prices: all, and by the resource that bounds the plan."""
    yield "bound by", "plans", "median", "90 %", "largest"
    errors: dict[str, list[float]] = {}
    for priced, devices in cases(seed=2, count=150):
        error = abs(priced.steady_ms(devices) / simulated_ms(priced, devices, calls=12) - 1)
        for name in ("all", priced.bottleneck(devices)):
            errors.setdefault(name, []).append(error)
    for name, found in errors.items():
        found.sort()
        picked = (statistics.median(found), found[int(0.9 * len(found))], found[-1])
        yield name, len(found), *(f"{error:.4f}" for error in picked)


def large_rows() -> Iterator[Sequence[object]]:
    """Seconds of processor time for whole searches."""
    yield "layers", "devices", "microbatches", "links", "host", "roundrobin"
    for count, devices, microbatches in ((94, 8, 16), (200, 64, 16), (200, 64, 64), (200, 64, 128)):
        how = {"devices": devices, "microbatches": microbatches, "mode": "fused"}
        limits = Limits(device_memory_bytes=40 * 10**9, upload_gb_s=25, download_gb_s=25)
        shared = replace(limits, host=HOST)
        ways = {
            "links": partial(plan, uneven(count), limits=limits, **how),
            "host": partial(plan, uneven(count), limits=shared, **how),
            "roundrobin": partial(plan, uneven(count), limits=shared, strategy="roundrobin", **how),
        }
        seconds = processor_seconds(ways)
        yield count, devices, microbatches, *(f"{seconds[name]:.3f} s" for name in ways)


def uneven(count: int) -> list[LayerCost]:
    """Layers whose times differ, as measured ones do, so that no plan is perfect."""
    return [
        LayerCost(
            10 + layer * 7919 % 100 / 100,
            20 + layer * 104729 % 100 / 50,
            weight_bytes=10**9,
            boundary_bytes=10**7,
            kept_bytes=5 * 10**8,
            forward_launch_ms=0.35,
            backward_launch_ms=0.4,
        )
        for layer in range(count)
    ]


def processor_seconds(ways: Mapping[str, Callable[[], object]], *, rounds: int = 3) -> dict[str, float]:
    """Median seconds of processor time, in turns: other work may share the machine."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.process_time()
            way()
            seconds[name].append(time.process_time() - start)
    return {name: statistics.median(found) for name, found in seconds.items()}


if __name__ == "__main__":
    main()
