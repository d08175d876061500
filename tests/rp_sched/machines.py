"""Models and machines as they are found, drawn by number: what devices share counts in many of them."""

import random
from collections.abc import Iterator
from typing import NamedTuple

from rp_sched import Host, Infeasible, LayerCost, Limits, PricedPlan, Switch, plan
from rp_sched.planners.local_search import seeds
from rp_sched.planners.search_space import Space
from rp_sched.simulation.stage_costs import Loads

GB = 10**9


class Case(NamedTuple):
    """A plan of a drawn model, and the devices that run it."""

    priced_plan: PricedPlan
    devices: int


def cases(seed: int, count: int) -> Iterator[Case]:
    """Plans of round robin, undivided plans, divided ones and mixtures, on machines of two to eight devices."""
    draw = random.Random(seed)
    while count:
        costs, devices, microbatches, limits = _problem(draw)
        loads = Loads(costs, limits)
        try:
            loads.check_feasible("fused")
        except Infeasible:
            continue
        space = Space(loads, mode="fused", devices=devices, microbatches=microbatches)
        shapes = [shape for shape in seeds(space) if shape.tasks < 200]
        if not shapes:
            continue
        how = {"devices": devices, "microbatches": microbatches, "mode": "fused", "limits": limits}
        published = draw.random() < 0.25
        chosen = plan(costs, strategy="roundrobin", **how) if published else space.shaped(draw.choice(shapes))
        count -= 1
        yield Case(PricedPlan.unchecked(chosen, loads, "fused", microbatches), devices)


def _problem(draw: random.Random) -> tuple[list[LayerCost], int, int, Limits]:
    forward_ms, gb, launch_ms = (
        draw.uniform(2, 30),
        draw.choice([0.05, 0.1, 0.2, 0.44, 1.0]),
        draw.choice([0, 1, 3]),
    )
    launching = {"forward_launch_ms": 0.45 * launch_ms, "backward_launch_ms": 0.55 * launch_ms}
    layer = LayerCost(
        forward_ms,
        forward_ms * draw.uniform(1.8, 2.5),
        weight_bytes=round(gb * GB),
        boundary_bytes=draw.choice([10, 50]) * 10**6,
        kept_bytes=draw.choice([1, 5]) * GB // 10,
        **launching,
    )
    head = LayerCost(2 * forward_ms, weight_bytes=round(draw.uniform(1, 5) * gb * GB), kept_bytes=GB, **launching)
    costs = [*[layer] * draw.choice([8, 12, 16, 24, 32]), head]
    devices = draw.choice([2, 4, 8])
    return costs, devices, draw.choice([4, 8, 9, 16, 32]), _limits(draw, devices)


def _limits(draw: random.Random, devices: int) -> Limits:
    link, half = draw.choice([12, 25, 55]), devices // 2
    switches = [
        Switch(devices=tuple(cards), upload_gb_s=link * draw.choice([1, 2]), download_gb_s=link)
        for cards in (range(half), range(half, devices))
    ]
    return Limits(
        device_memory_bytes=draw.choice([24 * GB, 80 * GB, 139 * GB, None]),
        upload_gb_s=link,
        download_gb_s=link,
        hop_ms=draw.choice([0, 2]),
        switches=tuple(switches) if draw.random() < 0.4 else (),
        host=Host(
            memory_gb_s=draw.choice([100, 200, 400, None]),
            gil_ms_per_gb=draw.choice([0, 2, 7]),
            add_gb_s=draw.choice([12, 25, 50]),
            gradient_buffers=draw.choice([1, 2]),
            optimizer_gb_s=draw.choice([150, 300]),
        ),
    )
