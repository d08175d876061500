"""`plan` gives what was asked for; the published strategy balances its stages as well as its knobs allow."""

import pickle
from itertools import product

import pytest
from examples import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import MODES, limits, models
from rp_sched import Infeasible, LayerCost, Limits, Mode, Plan, PricedPlan, RoundRobin, check_order, order, plan
from test_search import all_plans, fits

# Other work shares the machine, so no example has a deadline.
thorough = settings(max_examples=examples(150), deadline=None)
ALMOST = 1 + 1e-6

numbers = st.integers(1, 5)
thresholds = st.sampled_from((1.0, 1.1, 1.5, 3.0))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[LayerCost], Mode, Limits]:
    costs = draw(models())
    return costs, draw(st.sampled_from(("fused", *MODES))), draw(limits(costs, links=draw(st.booleans())))


Problem = tuple[list[LayerCost], Mode, Limits]


def stages(made: Plan) -> list[tuple[str, range]]:
    fused = [("FB", made.fused)] if made.fused is not None else []
    return [*(("F", span) for span in made.forward), *fused, *(("B", span) for span in made.backward)]


def busy_ms(costs: list[LayerCost], stage: range, kind: str, microbatches: int, allowed: Limits) -> float:
    """The slowest of arithmetic, link up and link down."""
    chosen = [costs[layer] for layer in stage]
    compute = sum(cost.forward_ms + (0 if kind == "F" else cost.backward_ms) for cost in chosen)
    up = sum(cost.weight_bytes for cost in chosen) / (allowed.upload_gb_s or float("inf")) / 1e6
    down = sum(cost.trainable_bytes for cost in chosen) / (allowed.download_gb_s or float("inf")) / 1e6
    return max(microbatches * compute, up, 0 if kind == "F" else down)


def slowest_ms(costs: list[LayerCost], made: Plan, microbatches: int, allowed: Limits) -> float:
    return max(busy_ms(costs, stage, kind, microbatches, allowed) for kind, stage in stages(made))


def cap_ms(costs: list[LayerCost], mode: Mode, microbatches: int, allowed: Limits, threshold: float) -> float:
    kind = "F" if mode == "infer" else "B"
    each = (busy_ms(costs, range(at, at + 1), kind, microbatches, allowed) for at in range(len(costs)))
    return threshold * max(each)


@thorough
@given(problems(), numbers, numbers, thresholds)
def test_a_published_plan_covers_the_model_and_keeps_limits_and_threshold(
    problem: Problem, devices: int, microbatches: int, threshold: float
):
    costs, mode, allowed = problem
    made = plan(
        costs,
        devices=devices,
        microbatches=microbatches,
        mode=mode,
        limits=allowed,
        strategy=RoundRobin(upper_threshold=threshold),
    )
    made.check(len(costs), mode)
    assert made.in_turn
    listed = order(made, mode=mode, devices=devices, microbatches=microbatches)
    check_order(listed, len(costs), microbatches, mode, devices=devices)
    assert all(fits(costs, stage, kind, allowed) for kind, stage in stages(made))
    cap = cap_ms(costs, mode, microbatches, allowed, threshold)
    assert slowest_ms(costs, made, microbatches, allowed) <= cap * ALMOST


@thorough
@given(problems(), numbers, numbers, thresholds)
def test_no_plan_with_as_many_stages_under_the_threshold_has_a_faster_slowest_stage(
    problem: Problem, devices: int, microbatches: int, threshold: float
):
    costs, mode, allowed = problem
    assume(mode == "fused")
    made = RoundRobin(upper_threshold=threshold)
    chosen = plan(costs, devices=devices, microbatches=microbatches, mode=mode, limits=allowed, strategy=made)
    longest = len(costs) - min(devices, len(costs)) // 2
    cap = cap_ms(costs, mode, microbatches, allowed, threshold)
    others = [
        slowest_ms(costs, other, microbatches, allowed)
        for other in all_plans(costs, 1, mode, allowed)
        if len(stages(other)) <= len(stages(chosen))
        and other.fused is not None
        and (len(other.fused) <= longest)
        and len(other.fused) < len(costs)
    ]
    fastest = min([ms for ms in others if ms <= cap * ALMOST], default=float("inf"))
    assert slowest_ms(costs, chosen, microbatches, allowed) <= fastest * ALMOST


@thorough
@given(problems(), numbers, numbers, numbers)
def test_there_are_min_stages_if_there_are_that_many_layers(
    problem: Problem, devices: int, microbatches: int, min_stages: int
):
    costs, mode, allowed = problem
    strategy = RoundRobin(min_stages=min_stages)
    made = plan(costs, devices=devices, microbatches=microbatches, mode=mode, limits=allowed, strategy=strategy)
    wanted = min(min_stages, len(costs))
    if mode == "fused":
        assert len(stages(made)) >= wanted
    else:
        assert len(made.forward) >= wanted
        assert mode == "infer" or len(made.backward) >= wanted


def test_half_of_the_model_memory_limit_is_for_a_stage():
    costs = [LayerCost(1.0, weight_bytes=10**9, trainable_bytes=0)] * 6
    strategy = RoundRobin(model_memory_limit=4.0, upper_threshold=10.0, min_stages=1)
    made = plan(costs, devices=1, microbatches=1, mode="infer", strategy=strategy)
    assert [len(stage) for stage in made.forward] == [2, 2, 2]


def test_a_model_memory_limit_above_the_device_is_none_with_room_ahead_either():
    costs = [LayerCost(1.0, weight_bytes=10, trainable_bytes=0)] * 6
    limits = Limits(device_memory_bytes=40, ahead_bytes=10)
    strategy = RoundRobin(model_memory_limit=4.0, upper_threshold=10.0, min_stages=1)
    made = plan(costs, devices=1, microbatches=1, mode="infer", limits=limits, strategy=strategy)
    assert [len(stage) for stage in made.forward] == [2, 2, 2]


def test_the_fused_stage_may_be_larger_than_the_room_ahead():
    costs = [LayerCost(0), LayerCost(0), LayerCost(0, 1), LayerCost(0, 1), LayerCost(0, weight_bytes=2)]
    limits = Limits(ahead_bytes=1)
    made = plan(
        costs,
        devices=1,
        microbatches=1,
        mode="fused",
        limits=limits,
        strategy=RoundRobin(upper_threshold=3.0, min_stages=3),
    )
    assert made == Plan((range(0, 3),), range(3, 5), (range(0, 3),))


def test_a_stage_takes_at_most_the_threshold_times_the_slowest_layer():
    costs = [LayerCost(1.0)] * 6 + [LayerCost(2.0)]
    made = {
        threshold: plan(
            costs,
            devices=1,
            microbatches=1,
            mode="infer",
            strategy=RoundRobin(upper_threshold=threshold, min_stages=1),
        ).forward
        for threshold in (1.0, 1.5, 4.0)
    }
    assert [len(cut) for cut in made.values()] == [4, 3, 1]


def test_layers_that_take_no_time_are_divided_by_number():
    made = plan([LayerCost(0)] * 6, devices=3, microbatches=4, mode="infer", strategy="roundrobin")
    assert made.forward == (range(0, 2), range(2, 4), range(4, 6))


@pytest.mark.parametrize("strategy", ["adaptive", "roundrobin"])
def test_a_layer_larger_than_a_device_is_named_with_need_and_limit(strategy: str):
    costs = [LayerCost(1.0), LayerCost(1.0, weight_bytes=100, trainable_bytes=50, kept_bytes=7)]
    how = {"devices": 2, "microbatches": 2, "limits": Limits(device_memory_bytes=206), "strategy": strategy}
    with pytest.raises(Infeasible, match=r"layer 1 needs 207 bytes .*device_memory_bytes is 206; split") as caught:
        plan(costs, mode="fused", **how)  # type: ignore[arg-type]
    assert (caught.value.layer, caught.value.need_bytes, caught.value.limit_bytes) == (1, 207, 206)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    plan(costs, mode="infer", **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["adaptive", "roundrobin"])
def test_a_model_larger_than_the_host_is_refused_with_need_and_limit(strategy: str):
    costs = [LayerCost(1.0, weight_bytes=100)] * 2
    with pytest.raises(Infeasible, match=r"the model needs 400 bytes on the host, but .* is 399") as caught:
        plan(
            costs,
            devices=1,
            microbatches=1,
            mode="fused",
            limits=Limits(host_memory_bytes=399),
            strategy=strategy,  # type: ignore[arg-type]
        )
    assert (caught.value.layer, caught.value.need_bytes, caught.value.limit_bytes) == (None, 400, 399)


def test_a_single_layer_may_take_the_room_of_the_next_one():
    costs = [LayerCost(1.0, weight_bytes=size, trainable_bytes=0) for size in (1, 9, 1)]
    for strategy in ("adaptive", "roundrobin"):
        made = plan(
            costs,
            devices=1,
            microbatches=1,
            mode="infer",
            limits=Limits(device_memory_bytes=10),
            strategy=strategy,
        )
        assert made.forward == (range(0, 1), range(1, 2), range(2, 3))


@pytest.mark.parametrize(("num_layers", "mode"), list(product((1, 2, 7), MODES)))
def test_more_devices_than_layers_and_microbatches_are_no_mistake(num_layers: int, mode: Mode):
    costs = [LayerCost(1.0)] * num_layers
    made = plan(costs, devices=16, microbatches=2, mode=mode)
    assert PricedPlan(made, costs, mode=mode, microbatches=2).steady_ms(16) > 0


def test_bad_arguments_are_refused_in_words():
    costs = [LayerCost(1.0)]
    for strategy in ("adaptive", "roundrobin"):
        how = {"devices": 1, "microbatches": 1, "mode": "infer", "strategy": strategy}
        with pytest.raises(ValueError, match="devices must be at least 1, but is 0"):
            plan(costs, **{**how, "devices": 0})
        with pytest.raises(ValueError, match="microbatches must be at least 1, but is 0"):
            plan(costs, **{**how, "microbatches": 0})
        with pytest.raises(ValueError, match="mode must be one of 'infer', 'train', 'fused', but is 'eval'"):
            plan(costs, **{**how, "mode": "eval"})
        with pytest.raises(ValueError, match="costs must name at least one layer"):
            plan([], **how)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"costs\[1\] must be a LayerCost, but is 3"):
            plan([*costs, 3], **how)  # type: ignore[list-item, arg-type]
    with pytest.raises(
        ValueError, match="strategy must be 'adaptive', 'roundrobin' or a RoundRobin, but is 'best'"
    ):
        plan(costs, devices=1, microbatches=1, mode="infer", strategy="best")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"min_stages": 0}, "min_stages must be at least 1, but is 0"),
        ({"upper_threshold": 0.9}, "upper_threshold must be at least 1"),
        ({"upper_threshold": float("nan")}, "upper_threshold must be"),
        ({"model_memory_limit": 0}, "model_memory_limit must be a finite size in GB, above zero"),
    ],
)
def test_knobs_that_cannot_be_are_refused_by_name(knobs: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        RoundRobin(**knobs)  # type: ignore[arg-type]
