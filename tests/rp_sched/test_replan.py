"""The plan in use follows the measurements, and a worse one is never taken for a better."""

from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_sched import (
    Course,
    Estimator,
    Host,
    InvalidCost,
    InvalidPlan,
    LayerCost,
    Limits,
    Plan,
    Replanner,
    Search,
    simulated_ms,
)

LAYERS = [LayerCost(0, weight_bytes=10)] * 12
HOW = {"devices": 3, "microbatches": 4, "mode": "fused", "limits": Limits(stage_bytes=90, hop_ms=0.1)}


def measure(estimator: Estimator, layer_ms: list[float], samples: int = 2) -> None:
    for layer, ms in enumerate(layer_ms):
        for _ in range(samples):
            estimator.add(layer, forward_ms=ms, backward_ms=2 * ms)


def finish(replanner: Replanner) -> Course:
    while not replanner.improve(budget_ms=50):
        pass
    return replanner.course()


def test_the_plan_stays_while_nothing_moves():
    replanner = Replanner(LAYERS, **HOW)  # type: ignore[arg-type]
    found = finish(replanner)
    assert replanner.course() is found
    assert replanner.improve(budget_ms=0)


def test_a_plan_is_in_use_at_once_and_better_ones_follow():
    replanner = Replanner(LAYERS, **HOW)  # type: ignore[arg-type]
    at_once = replanner.course().steady_ms(3)
    assert finish(replanner).steady_ms(3) <= at_once


def test_when_times_move_the_old_plan_stays_until_there_is_a_better_one():
    replanner = Replanner(LAYERS, **HOW)  # type: ignore[arg-type]
    before = finish(replanner)
    measure(replanner.estimator, [1.0] * 11 + [30.0])
    now = replanner.course()
    assert now.loads.costs[11].forward_ms == pytest.approx(30.0)
    old = Course(before.plan, now.loads.costs, **{key: HOW[key] for key in ("mode", "microbatches", "limits")})  # type: ignore[arg-type]
    assert now.steady_ms(3) <= old.steady_ms(3)
    assert replanner.course() is now, "nothing moved since"
    after = finish(replanner)
    assert after.steady_ms(3) <= now.steady_ms(3)
    assert after.plan != before.plan


def test_a_plan_that_is_still_the_best_stays():
    replanner = Replanner(LAYERS, **HOW)  # type: ignore[arg-type]
    measure(replanner.estimator, [1.0] * 12)
    replanner.course()
    before = finish(replanner)
    measure(replanner.estimator, [2.0] * 12, samples=20)
    now = replanner.course()
    assert now.loads.costs != before.loads.costs
    assert now.plan == before.plan


def test_the_estimator_may_be_shared():
    estimator = Estimator(12)
    measure(estimator, [2.0] * 12)
    replanner = Replanner(LAYERS, estimator=estimator, **HOW)  # type: ignore[arg-type]
    assert replanner.course().loads.costs[0].forward_ms == pytest.approx(2.0)


def test_bad_arguments_are_refused_in_words():
    with pytest.raises(ValueError, match="threshold must be a number of at least 0"):
        Replanner(LAYERS, threshold=-1.0, **HOW)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layers must have 3 entries, but has 12"):
        Replanner(LAYERS, estimator=Estimator(3), **HOW)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="budget_ms must be a number of at least 0"):
        Replanner(LAYERS, **HOW).improve(budget_ms=-1.0)  # type: ignore[arg-type]


# What devices share

MODEL = [LayerCost(10.0, weight_bytes=4 * 10**8, kept_bytes=10**8)] * 12
SHARED = Limits(
    device_memory_bytes=80 * 10**9,
    upload_gb_s=50,
    download_gb_s=50,
    host=Host(memory_gb_s=150, gil_ms_per_gb=5, add_gb_s=12, gradient_buffers=2, optimizer_gb_s=150),
)
MACHINE = {"devices": 4, "microbatches": 8, "mode": "fused"}


def test_a_search_that_settles_in_slices_ends_as_settle_does():
    whole, sliced = (Search(MODEL, limits=SHARED, **MACHINE) for _ in range(2))  # type: ignore[arg-type]
    slices = 1
    while not sliced.advance_settling(budget_ms=0.0):
        slices += 1
    assert slices > 100
    assert sliced.best.plan == whole.settle().plan
    assert sliced.promised_ms == whole.promised_ms == pytest.approx(simulated_ms(whole.best, 4))
    assert sliced.advance_settling(budget_ms=0.0)


def test_a_plan_promises_its_price_until_it_was_simulated():
    replanner = Replanner(MODEL, limits=SHARED, **MACHINE)  # type: ignore[arg-type]
    assert replanner.promised_ms == replanner.course().steady_ms(4)
    course = finish(replanner)
    assert replanner.promised_ms == pytest.approx(simulated_ms(course, 4))


def test_when_limits_change_the_plan_follows():
    free = Limits(device_memory_bytes=80 * 10**9)
    replanner = Replanner(MODEL, limits=free, **MACHINE)  # type: ignore[arg-type]
    before = finish(replanner)
    assert replanner.course(free) is before
    scarce = replace(SHARED, host=replace(SHARED.host, memory_gb_s=20, add_gb_s=1))
    replanner.course(scarce)
    after = finish(replanner)
    assert after.loads.limits == scarce
    assert after.plan != before.plan
    assert replanner.promised_ms < simulated_ms(
        Course(before.plan, after.loads.costs, mode="fused", microbatches=8, limits=scarce), 4
    )


def test_launching_that_gets_dear_makes_a_plan_that_launches_less():
    limits = replace(SHARED, device_memory_bytes=12 * 10**9)
    replanner = Replanner(MODEL, limits=limits, **MACHINE)  # type: ignore[arg-type]
    measure(replanner.estimator, [10.0] * 12)
    cheap = finish(replanner)
    for layer in range(12):
        for _ in range(2):
            replanner.estimator.add(layer, forward_launch_ms=4.0, backward_launch_ms=6.0)
    replanner.course()
    dear = finish(replanner)
    assert dear.plan != cheap.plan
    before = Course(cheap.plan, dear.loads.costs, mode="fused", microbatches=8, limits=limits)
    assert dear.work.launch_ms < before.work.launch_ms
    assert not any(len(groups) > 1 for _, _, groups in dear.plan.phases())


# What calls took

# One device with a slow link and host: several tasks promise 2.46 s a call, one task 2.7 s.
BOUND = Limits(
    upload_gb_s=5.0,
    download_gb_s=5.0,
    leaving_bytes=0,
    host=Host(memory_gb_s=40, add_gb_s=2, optimizer_gb_s=100),
)
ONE = {"devices": 1, "microbatches": 4, "mode": "fused"}
WHOLE = Plan(fused=range(12))


def bound() -> Replanner:
    replanner = Replanner(MODEL, limits=BOUND, **ONE)  # type: ignore[arg-type]
    measure(replanner.estimator, [10.0] * 12)
    replanner.course()
    assert finish(replanner).plan != WHOLE
    return replanner


def price_ms(plan: Plan) -> float:
    return Course(plan, MODEL, limits=BOUND, mode="fused", microbatches=4).steady_ms(1)


def test_a_plan_whose_calls_took_longer_than_those_of_another_one_gives_way_to_it():
    replanner = bound()
    promised = replanner.promised_ms
    replanner.note(replanner.in_use.plan, 4000.0)
    replanner.note(WHOLE, 3000.0)
    assert finish(replanner).plan == replanner.in_use.plan == WHOLE
    assert replanner.expected_ms == 3000.0
    assert replanner.promised_ms == price_ms(WHOLE)
    while not replanner.improve(budget_ms=0.0):
        pass
    assert replanner.promised_ms == pytest.approx(simulated_ms(replanner.in_use, 1))
    assert replanner.promised_ms > promised


def test_a_plan_gives_way_only_to_one_that_is_faster_by_more_than_measurements_differ():
    replanner = bound()
    first = replanner.in_use.plan
    replanner.note(first, 3000.0)
    replanner.note(WHOLE, 2950.0)
    assert replanner.course().plan == first
    replanner.note(WHOLE, 2930.0)
    assert replanner.course().plan == WHOLE
    replanner.note(first, 2900.0)
    assert replanner.course().plan == WHOLE


def test_plans_with_as_many_tasks_as_a_slow_one_are_expected_to_be_as_far_off():
    replanner = bound()
    slow = replanner.in_use
    assert len(slow.jobs) > 1
    replanner.note(WHOLE, price_ms(WHOLE))
    assert replanner.course().plan == slow.plan, "it promises less, and what was measured kept its promise"
    replanner.note(slow.plan, 2 * price_ms(slow.plan))
    assert finish(replanner).plan == WHOLE
    # It searches again, and finds plans of several tasks, none of which is tried.
    replanner.course(replace(BOUND, upload_gb_s=4.9))
    assert finish(replanner).plan == WHOLE


@settings(max_examples=examples(25), deadline=None)
@given(st.floats(0.0, 400.0), st.lists(st.floats(-0.01, 0.01), min_size=6, max_size=6))
def test_plans_settle_on_the_fastest_that_was_tried_whatever_tasks_cost_and_rates_drift(
    task_ms: float, drift: list[float]
):
    replanner = bound()
    took: dict[Plan, float] = {}
    used: list[Plan] = []
    for part in drift * 3:
        plan = replanner.course(replace(BOUND, upload_gb_s=5.0 * (1 + part))).plan
        took[plan] = price_ms(plan) + task_ms * len(replanner.in_use.jobs)
        used.append(plan)
        replanner.note(plan, took[plan])
        while not replanner.improve(budget_ms=50):
            pass
    assert len(set(used[-6:])) == 1
    assert took[used[-1]] * (1 - 0.02) <= min(took.values())


def test_what_calls_took_is_forgotten_when_times_change():
    replanner = bound()
    replanner.note(replanner.in_use.plan, 1e6)
    replanner.note(WHOLE, 1e5)
    assert replanner.course().plan == WHOLE
    measure(replanner.estimator, [20.0] * 12, samples=20)
    replanner.course()
    assert replanner.expected_ms == replanner.in_use.steady_ms(1)


def test_a_plan_that_no_longer_fits_is_not_used_however_fast():
    tight = replace(BOUND, device_memory_bytes=3 * 10**9)
    for is_in_use in (False, True):
        replanner = bound()
        replanner.note(replanner.in_use.plan, 1e6)
        replanner.note(WHOLE, 1.0)
        if is_in_use:
            assert replanner.course().plan == WHOLE
        assert replanner.course(tight).plan != WHOLE


def test_notes_are_of_plans_for_these_layers_and_of_times():
    replanner = bound()
    with pytest.raises(InvalidPlan):
        replanner.note(Plan(fused=range(3)), 1.0)
    with pytest.raises(InvalidCost, match="call_ms must be a finite time in ms"):
        replanner.note(WHOLE, float("nan"))


def test_plans_that_promise_to_take_no_time_tell_nothing_of_others():
    replanner = Replanner([LayerCost(0.0)] * 2, **ONE)  # type: ignore[arg-type]
    replanner.note(Plan((range(0, 1),), range(1, 2), (range(0, 1),)), 5.0)
    assert replanner.course().plan.fused == range(2)
    assert replanner.expected_ms == 0


def test_of_plans_that_were_measured_the_last_eight_are_remembered():
    replanner = bound()
    replanner.note(WHOLE, 1.0)
    cuts = [Plan((range(0, cut),), range(cut, 12), (range(0, cut),)) for cut in range(1, 9)]
    for plan in cuts[:-1]:
        replanner.note(plan, 1e6)
    assert replanner.course().plan == WHOLE
    replanner.note(cuts[-1], 1e6)
    assert replanner.course().plan != WHOLE
