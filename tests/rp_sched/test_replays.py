"""Graphs launch layers: what that costs, and the memory that it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import MODES, models, plans
from rp_sched import Host, LayerCost, Limits, Plan, PricedPlan, Search, simulated_ms

LAYER = LayerCost(2.0, 3.0, forward_launch_ms=4.0, backward_launch_ms=6.0, replay_launch_ms=0.5)
patient = settings(deadline=None)
# Sums of times that are added in another order.
ALMOST = 1 + 1e-9


@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_microbatches_take_what_the_device_takes(microbatches: int):
    priced = PricedPlan(Plan(fused=range(4)), [LAYER] * 4, mode="fused", microbatches=microbatches)

    # By Python four layers of 10 ms bound a microbatch; the last layer's loss is launched by Python always.
    assert priced.steady_ms(1) == pytest.approx(microbatches * 20)
    assert simulated_ms(priced, 1) == pytest.approx(microbatches * 20)
    assert priced.loads_ms(1)["GIL"] == pytest.approx(microbatches * (3 * 1 + 10))


def test_a_task_without_gradients_launches_by_graphs_too():
    priced = PricedPlan(Plan([range(4)]), [LAYER] * 4, mode="infer", microbatches=4)

    assert priced.steady_ms(1) == pytest.approx(4 * 8)


def test_devices_that_share_the_gil_gain_what_one_would_not():
    devices, limits = 4, Limits(host=Host(launch_gil_share=0.5))
    # Each device takes 5 ms for a layer, its thread 4, and four threads hold the GIL for 8.
    eager = LayerCost(2.0, 3.0, forward_launch_ms=2.0, backward_launch_ms=2.0)
    by_graphs = replace(eager, replay_launch_ms=0.1)
    groups = [range(at, at + 8) for at in range(0, 32, 8)]
    plan = Plan(fused=range(6), groups=groups)
    before, after = (
        simulated_ms(PricedPlan(plan, [cost] * 6, mode="fused", microbatches=32, limits=limits), devices)
        for cost in (eager, by_graphs)
    )

    assert before == pytest.approx(32 * 6 * 4 * 0.5)
    assert after == pytest.approx(8 * 6 * 5, rel=0.01)


def with_graphs(costs: list[LayerCost], data: st.DataObject) -> list[LayerCost]:
    """Some layers with graphs that launch in no more time than Python does."""
    launches = [data.draw(st.tuples(*[st.integers(0, 6)] * 3)) for _ in costs]
    return [
        replace(
            cost,
            forward_launch_ms=each[0],
            backward_launch_ms=each[1],
            recompute_launch_ms=each[0],
            replay_launch_ms=data.draw(st.none() | st.integers(0, min(each[:2]))),
        )
        for cost, each in zip(costs, launches, strict=True)
    ]


@patient
@given(models(), st.sampled_from(MODES), st.integers(1, 6), st.integers(1, 3), st.data())
def test_graphs_make_no_plan_dearer_and_no_plan_beats_the_bound(
    costs: list[LayerCost], mode: str, microbatches: int, devices: int, data: st.DataObject
):
    replayed = with_graphs(costs, data)
    chosen = replace(data.draw(plans(len(costs), microbatches, mode)), in_turn=True, devices=None)
    how = {"mode": mode, "microbatches": microbatches}
    launched = [replace(cost, replay_launch_ms=None) for cost in replayed]
    eager, by_graphs = (PricedPlan(chosen, each, **how) for each in (launched, replayed))  # type: ignore[arg-type]

    assert by_graphs.steady_ms(devices) <= eager.steady_ms(devices) * ALMOST
    search = Search(replayed, devices=devices, **how)  # type: ignore[arg-type]
    bound = search._bound_ms(devices)
    assert simulated_ms(by_graphs, devices) * ALMOST >= bound
    assert search.best_ms * ALMOST >= bound


def test_graphs_take_a_pool_for_activations_and_copies_of_gradients_that_leave():
    eager = LayerCost(1.0, weight_bytes=10, kept_bytes=3)
    by_graphs = replace(eager, replay_launch_ms=0.0)
    plan, how = Plan(fused=range(2)), {"mode": "fused", "microbatches": 4}

    def fits(cost: LayerCost, nbytes: int) -> bool:
        return PricedPlan(plan, [cost] * 2, limits=Limits(device_memory_bytes=nbytes), **how).fits  # type: ignore[arg-type]

    # Weights and twice their bytes of sums, what is kept, and the next call's weights.
    assert (fits(eager, 86), fits(eager, 85)) == (True, False)
    assert (fits(by_graphs, 126), fits(by_graphs, 125)) == (True, False)
    assert (eager.graph_bytes, by_graphs.graph_bytes) == (0, 20)
