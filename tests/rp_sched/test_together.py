"""Models that share devices get plans that fit together."""

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import MODES, models
from rp_sched import Infeasible, LayerCost, Limits, Mode, Plan, PricedPlan, RoundRobin, plan, plan_together
from rp_sched.simulation.makespan import pace

patient = settings(max_examples=examples(40), deadline=None)
ALMOST = 1 + 1e-6


@patient
@given(
    st.lists(models(most=6), min_size=1, max_size=3), st.integers(1, 3), st.integers(1, 3), st.sampled_from(MODES)
)
def test_together_they_are_never_slower_than_published_plans(
    costs: list[list[LayerCost]], devices: int, microbatches: int, mode: Mode
):
    how = {"mode": mode, "microbatches": microbatches}
    together = plan_together(*costs, devices=devices, **how)  # type: ignore[arg-type]
    published = [plan(each, devices=devices, strategy="roundrobin", **how) for each in costs]  # type: ignore[arg-type]

    def call_ms(plans) -> float:
        return pace([PricedPlan(*pair, **how) for pair in zip(plans, costs, strict=True)], devices).call_ms

    assert call_ms(together) <= call_ms(published) * ALMOST
    for each, made in zip(costs, together, strict=True):
        made.check(len(each), mode)


def test_the_call_of_one_model_fills_the_gaps_of_the_other():
    costs = [LayerCost(1.0)] * 4
    alone = plan(costs, devices=4, microbatches=2, mode="fused", limits=Limits(stage_bytes=1))
    both = plan_together(costs, costs, devices=4, microbatches=2, mode="fused", limits=Limits(stage_bytes=1))
    priced_plans = [PricedPlan(made, costs, mode="fused", microbatches=2) for made in both]
    one_ms = PricedPlan(alone, costs, mode="fused", microbatches=2).steady_ms(4)
    assert pace(priced_plans, 4).call_ms <= 2 * one_ms


def test_one_model_by_itself_is_planned_as_ever():
    costs = [LayerCost(1.0 + layer) for layer in range(5)]
    (made,) = plan_together(costs, devices=2, microbatches=3, mode="fused")
    assert made == plan(costs, devices=2, microbatches=3, mode="fused")


def test_the_hosts_limit_is_for_all_models_together():
    costs = [LayerCost(1.0, weight_bytes=100)] * 2
    assert plan_together(
        costs, costs, devices=1, microbatches=1, mode="fused", limits=Limits(host_memory_bytes=800)
    )
    with pytest.raises(Infeasible, match="the model needs 800 bytes on the host"):
        plan_together(costs, costs, devices=1, microbatches=1, mode="fused", limits=Limits(host_memory_bytes=799))


def test_no_model_is_refused():
    with pytest.raises(ValueError, match="needs the costs of at least one model"):
        plan_together(devices=1, microbatches=1, mode="infer")


@patient
@given(st.lists(models(most=8), min_size=1, max_size=3), st.integers(1, 4), st.sampled_from(MODES))
def test_published_plans_of_several_models_are_even_across_them(
    costs: list[list[LayerCost]], wanted: int, mode: Mode
):
    how = {"devices": 2, "microbatches": 2, "mode": mode}
    made = plan_together(*costs, strategy=RoundRobin(min_stages=wanted, upper_threshold=1.5), **how)  # type: ignore[arg-type]
    slowest = max(
        cost.forward_ms + (mode != "infer") * cost.forward_ms + cost.backward_ms for row in costs for cost in row
    )
    for row, each in zip(costs, made, strict=True):
        each.check(len(row), mode)
        for stage in (*each.forward, *each.backward):
            up_ms = sum(row[layer].forward_ms for layer in stage)
            assert up_ms <= 1.5 * slowest * ALMOST
    counts = [len(each.forward) + len(each.backward) + (each.fused is not None) for each in made]
    assert sum(counts) >= min(wanted, sum(map(len, costs)))


@given(models(most=8), st.integers(1, 4), st.sampled_from(MODES))
def test_one_published_plan_is_the_one_it_has_alone(costs: list[LayerCost], wanted: int, mode: Mode):
    how = {"devices": 2, "microbatches": 2, "mode": mode, "strategy": RoundRobin(min_stages=wanted)}
    assert plan_together(costs, **how) == (plan(costs, **how),)  # type: ignore[arg-type]


def test_a_small_model_beside_a_large_one_gets_few_long_stages():
    small, large = [LayerCost(1.0)] * 8, [LayerCost(8.0)] * 8
    made = plan_together(small, large, devices=4, microbatches=1, mode="infer", strategy="roundrobin")
    assert made == (Plan([range(8)]), Plan([range(layer, layer + 1) for layer in range(8)]))


def test_published_plans_of_several_models_keep_the_limit_of_the_host():
    costs = [LayerCost(1.0, weight_bytes=100)] * 4
    with pytest.raises(Infeasible):
        plan_together(
            costs,
            costs,
            devices=2,
            microbatches=2,
            mode="fused",
            strategy="roundrobin",
            limits=Limits(host_memory_bytes=900),
        )
