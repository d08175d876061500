"""The plan in use follows the measurements, and a worse one is never taken for a better."""

from dataclasses import replace

import pytest
from rp_sched import (
    Estimator,
    Host,
    InvalidCost,
    LayerCost,
    Limits,
    PricedPlan,
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


def finish(replanner: Replanner) -> PricedPlan:
    while not replanner.improve(budget_ms=50):
        pass
    return replanner.priced_plan()


def test_the_plan_stays_while_nothing_moves():
    replanner = Replanner(LAYERS, **HOW)  # type: ignore[arg-type]
    found = finish(replanner)
    assert replanner.priced_plan() is found
    assert replanner.improve(budget_ms=0)


def test_a_plan_is_in_use_at_once_and_better_ones_follow():
    replanner = Replanner(LAYERS, **HOW)  # type: ignore[arg-type]
    at_once = replanner.priced_plan().steady_ms(3)
    assert finish(replanner).steady_ms(3) <= at_once


def test_when_times_move_the_old_plan_stays_until_there_is_a_better_one():
    replanner = Replanner(LAYERS, **HOW)  # type: ignore[arg-type]
    before = finish(replanner)
    measure(replanner.estimator, [1.0] * 11 + [30.0])
    now = replanner.priced_plan()
    assert now.loads.costs[11].forward_ms == pytest.approx(30.0)
    old = PricedPlan(before.plan, now.loads.costs, **{key: HOW[key] for key in ("mode", "microbatches", "limits")})  # type: ignore[arg-type]
    assert now.steady_ms(3) <= old.steady_ms(3)
    assert replanner.priced_plan() is now, "nothing moved since"
    after = finish(replanner)
    assert after.steady_ms(3) <= now.steady_ms(3)
    assert after.plan != before.plan


def test_a_plan_that_is_still_the_best_stays():
    replanner = Replanner(LAYERS, **HOW)  # type: ignore[arg-type]
    measure(replanner.estimator, [1.0] * 12)
    replanner.priced_plan()
    before = finish(replanner)
    measure(replanner.estimator, [2.0] * 12, samples=20)
    now = replanner.priced_plan()
    assert now.loads.costs != before.loads.costs
    assert now.plan == before.plan


def test_the_estimator_may_be_shared():
    estimator = Estimator(12)
    measure(estimator, [2.0] * 12)
    replanner = Replanner(LAYERS, estimator=estimator, **HOW)  # type: ignore[arg-type]
    assert replanner.priced_plan().loads.costs[0].forward_ms == pytest.approx(2.0)


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
    assert replanner.promised_ms == replanner.priced_plan().steady_ms(4)
    priced = finish(replanner)
    assert replanner.promised_ms == pytest.approx(simulated_ms(priced, 4))


def test_when_limits_change_the_plan_follows():
    free = Limits(device_memory_bytes=80 * 10**9)
    replanner = Replanner(MODEL, limits=free, **MACHINE)  # type: ignore[arg-type]
    before = finish(replanner)
    assert replanner.priced_plan(free) is before
    scarce = replace(SHARED, host=replace(SHARED.host, memory_gb_s=20, add_gb_s=1))
    replanner.priced_plan(scarce)
    after = finish(replanner)
    assert after.loads.limits == scarce
    assert after.plan != before.plan
    assert replanner.promised_ms < simulated_ms(
        PricedPlan(before.plan, after.loads.costs, mode="fused", microbatches=8, limits=scarce), 4
    )


def test_launching_that_gets_dear_makes_a_plan_that_launches_less():
    limits = replace(SHARED, device_memory_bytes=12 * 10**9)
    replanner = Replanner(MODEL, limits=limits, **MACHINE)  # type: ignore[arg-type]
    measure(replanner.estimator, [10.0] * 12)
    cheap = finish(replanner)
    for layer in range(12):
        for _ in range(2):
            replanner.estimator.add(layer, forward_launch_ms=4.0, backward_launch_ms=6.0)
    replanner.priced_plan()
    dear = finish(replanner)
    assert dear.plan != cheap.plan
    before = PricedPlan(cheap.plan, dear.loads.costs, mode="fused", microbatches=8, limits=limits)
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
WHOLE = range(12)


def bound() -> Replanner:
    """With one task in use, and the search for several not begun."""
    faster = replace(BOUND, upload_gb_s=10.0, download_gb_s=10.0)
    replanner = Replanner(MODEL, limits=faster, **ONE)  # type: ignore[arg-type]
    measure(replanner.estimator, [10.0] * 12)
    replanner.priced_plan()
    assert finish(replanner).plan.fused == WHOLE
    assert replanner.priced_plan(BOUND).plan.fused == WHOLE
    return replanner


def tried(whole_ms: float = 2700.0) -> Replanner:
    """With several tasks in use, after one task took `whole_ms`."""
    replanner = bound()
    replanner.note(whole_ms)
    assert len(finish(replanner).jobs) > 1
    return replanner


def test_a_plan_whose_calls_took_longer_than_those_of_another_one_gives_way_to_it():
    replanner = tried()
    promised = replanner.promised_ms
    replanner.note(2900.0)
    assert finish(replanner).plan.fused == replanner.in_use.plan.fused == WHOLE
    assert replanner.expected_ms == 2700.0
    assert replanner.promised_ms > promised
    for _ in range(50):
        replanner.note(2700.0)
        assert replanner.priced_plan().plan.fused == WHOLE


def test_a_measured_plan_gives_way_only_to_one_that_is_faster_by_more_than_measurements_differ():
    replanner = tried()
    replanner.note(2740.0)
    assert len(replanner.priced_plan().jobs) > 1
    replanner.note(2760.0)
    assert replanner.priced_plan().plan.fused == WHOLE


def test_two_measured_plans_that_are_about_as_fast_do_not_take_turns():
    replanner = tried()
    replanner.note(2760.0)
    assert replanner.priced_plan().plan.fused == WHOLE
    replanner.note(2790.0)
    assert replanner.priced_plan().plan.fused == WHOLE
    replanner.note(2830.0)
    assert len(replanner.priced_plan().jobs) > 1


def test_an_untried_plan_is_expected_to_be_as_far_off_as_what_was_measured():
    replanner = bound()
    replanner.note(2 * 2700.0)
    assert len(finish(replanner).jobs) > 1
    assert replanner.expected_ms == pytest.approx(2 * replanner.promised_ms)


def test_plans_with_as_many_tasks_as_a_slow_one_are_not_tried():
    replanner = tried()
    replanner.note(2 * replanner.promised_ms)
    assert finish(replanner).plan.fused == WHOLE
    # It searches again, and finds plans of several tasks, none of which was measured.
    for rate in (4.9, 4.8, 4.7):
        replanner.priced_plan(replace(BOUND, upload_gb_s=rate))
        assert finish(replanner).plan.fused == WHOLE
    assert replanner._search.best.plan.fused != WHOLE


def test_what_was_measured_of_a_plan_long_ago_is_forgotten():
    replanner = tried()
    replanner.note(4000.0)
    assert replanner.priced_plan().plan.fused == WHOLE
    for _ in range(500):
        replanner.note(2700.0)
        replanner.priced_plan()
    assert len(replanner.in_use.jobs) > 1


def test_without_measurements_the_plan_in_use_is_what_settles_first():
    replanner = Replanner(MODEL, limits=SHARED, **MACHINE)  # type: ignore[arg-type]
    whole = Search(replanner.in_use.loads.costs, limits=SHARED, **MACHINE)  # type: ignore[arg-type]
    assert finish(replanner).plan == whole.settle().plan
    assert replanner.promised_ms == whole.promised_ms


def test_what_calls_took_is_forgotten_when_times_change():
    replanner = tried()
    replanner.note(1e6)
    assert replanner.priced_plan().plan.fused == WHOLE
    measure(replanner.estimator, [20.0] * 12, samples=20)
    replanner.priced_plan()
    assert replanner.expected_ms == replanner.promised_ms


def test_a_plan_that_no_longer_fits_is_not_used_however_fast():
    tight = replace(BOUND, device_memory_bytes=3 * 10**9)
    replanner = tried(whole_ms=2700.0)
    replanner.note(1e6)
    assert replanner.priced_plan().plan.fused == WHOLE
    replanner.priced_plan(tight)
    assert finish(replanner).plan.fused != WHOLE


def test_a_note_is_a_time():
    with pytest.raises(InvalidCost, match="call_ms must be a finite time in ms"):
        bound().note(float("nan"))


def test_plans_that_promise_to_take_no_time_are_not_off():
    replanner = Replanner([LayerCost(0.0)] * 2, **ONE)  # type: ignore[arg-type]
    measure(replanner.estimator, [0.0] * 2)
    replanner.priced_plan()
    replanner.note(5.0)
    assert replanner.priced_plan().plan.fused == range(2)
    assert replanner.expected_ms == 5.0
