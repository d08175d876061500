"""The simulator agrees with the definitions of its times, and accounts for every moment and byte."""

import gc
from itertools import pairwise
from weakref import WeakSet

import pytest
from examples import examples
from hypothesis import event, given, settings
from hypothesis import strategies as st
from naive import Naive, deal, steady_ms
from problems import MODES, calls, limits, models, plans
from rp_sched import Assigner, InvalidOrder, LayerCost, Limits, Plan, PricedPlan, Task, Timeline, simulate

# Other work shares the machine, so no example has a deadline.
patient = settings(max_examples=examples(60), deadline=None)
thorough = settings(max_examples=examples(250), deadline=None)

Played = tuple[list[list[Task]], list[LayerCost], int, str, Limits]


@st.composite
def series(draw: st.DrawFn, *, links: bool = True) -> Played:
    """Two or three calls, each with a task list of its own, on three devices."""
    mode, costs, microbatches = draw(st.sampled_from(MODES)), draw(models(most=4)), draw(st.integers(1, 3))
    listed = [draw(calls(len(costs), microbatches, mode)) for _ in range(draw(st.integers(1, 3)))]
    return listed, costs, microbatches, mode, draw(limits(costs, links=links))


def play(played: Played) -> Timeline:
    listed, costs, microbatches, mode, allowed = played
    return simulate(listed, costs, devices=3, microbatches=microbatches, mode=mode, limits=allowed)


@thorough
@given(series())
def test_the_simulator_agrees_with_the_definitions(played: Played):
    timeline = play(played)
    naive = Naive(*played)
    assert list(timeline.launches) == pytest.approx([naive.launch(call) for call in range(len(played[0]))])
    for at, span in zip(naive.all_tasks(), timeline.spans, strict=True):
        batch = span.task.microbatches
        assert [start for start, _ in span.microbatches] == pytest.approx([naive.start(at, m) for m in batch])
        assert [end for _, end in span.microbatches] == pytest.approx([naive.end(at, m) for m in batch])
        assert (span.fetch_ms, span.fetched_ms) == pytest.approx((naive.fetch_start(at), naive.fetched(at)))
        assert span.left_ms == pytest.approx(naive.left(at))
    last = len(played[0]) - 1
    assert timeline.makespan_ms == pytest.approx(
        max(*(naive.over(call) for call in range(last + 1)), *(naive.results(call) for call in range(last + 1)))
    )


@thorough
@given(series())
def test_every_moment_of_a_device_is_busy_or_has_a_reason(played: Played):
    timeline = play(played)
    for device in range(3):
        busy = [times for span in timeline.spans if span.task.device == device for times in span.microbatches]
        idle = [(idle.start_ms, idle.end_ms) for idle in timeline.idle if idle.device == device]
        moments = sorted(time for time in busy + idle if time[1] > time[0])
        assert all(end == pytest.approx(start) for (_, end), (start, _) in pairwise(moments))
        if timeline.makespan_ms:
            assert (moments[0][0], moments[-1][1]) == pytest.approx((0.0, timeline.makespan_ms))
        assert timeline.busy_ms[device] + sum(end - start for start, end in idle) == pytest.approx(
            timeline.makespan_ms
        )
    assert sum(timeline.idle_ms_by_reason.values()) == pytest.approx(sum(timeline.idle_ms))


@thorough
@given(series())
def test_peaks_are_what_is_held_at_some_moment_counted_one_by_one(played: Played):
    timeline = play(played)
    naive = Naive(*played)
    for device in range(3):
        moments = [span.fetch_ms for span in timeline.spans] + [span.start_ms for span in timeline.spans]
        held = [
            sum(
                naive.weights(span.task) * (span.fetch_ms <= moment < span.end_ms)
                + naive.gradients(span.task) * (span.start_ms <= moment < span.left_ms)
                + naive.kept(span.task) * (span.start_ms <= moment < span.end_ms)
                for span in timeline.spans
                if span.task.device == device
            )
            for moment in moments
        ]
        assert timeline.peak_bytes[device] == max(held)


Planned = tuple[Plan, list[LayerCost], dict[str, object]]


@st.composite
def planned(draw: st.DrawFn, *, links: bool) -> Planned:
    mode, costs, microbatches = draw(st.sampled_from(MODES)), draw(models(most=4)), draw(st.integers(1, 3))
    plan = draw(plans(len(costs), microbatches, mode))
    how = {"microbatches": microbatches, "mode": mode, "limits": draw(limits(costs, links=links))}
    return plan, costs, how


@patient
@given(planned(links=False), st.integers(1, 3))
def test_calls_of_a_plan_follow_each_other_as_the_definitions_say(drawn: Planned, devices: int):
    plan, costs, how = drawn
    priced = PricedPlan(plan, costs, **how)  # type: ignore[arg-type]
    found = steady_ms(plan, costs, devices=devices, calls=8, **how)
    event(f"steady within 8 calls: {found is not None}")
    if found is not None:
        assert priced.steady_ms(devices) == pytest.approx(found)
    assert priced.alone_ms(devices) == pytest.approx(_alone(deal(plan, 1, costs, devices=devices, **how)))  # type: ignore[arg-type]


def _alone(naive: Naive) -> float:
    return max(naive.over(0), naive.results(0))


@patient
@given(planned(links=True), st.integers(1, 3))
def test_a_dealer_gives_each_task_to_a_device_that_frees_first(drawn: Planned, devices: int):
    plan, costs, how = drawn
    assigner, priced = Assigner(devices), PricedPlan(plan, costs, **how)  # type: ignore[arg-type]
    dealt = [assigner.assign(priced) for _ in range(3)]
    naive = Naive(dealt, costs, *how.values())  # type: ignore[arg-type]
    used = min(devices, plan.devices or devices)
    free, turn = [0.0] * used, 0
    for at in naive.all_tasks():
        task = naive.task(at)
        free = [max(ms, naive.launch(at[0])) for ms in free]
        assert free[task.device] == pytest.approx(min(free)) or plan.in_turn
        assert task.device == turn or not plan.in_turn
        turn = (turn + 1) % used
        free[task.device] = naive.end(at, task.microbatches[-1])


@patient
@given(planned(links=True), st.integers(1, 3))
def test_no_plan_is_faster_than_its_bound(drawn: Planned, devices: int):
    plan, costs, how = drawn
    priced = PricedPlan(plan, costs, **how)  # type: ignore[arg-type]
    assert priced.bound_ms(devices) <= priced.steady_ms(devices) * (1 + 1e-9)


@patient
@given(planned(links=True), st.integers(1, 3))
def test_the_pace_is_that_of_many_simulated_calls(drawn: Planned, devices: int):
    plan, costs, how = drawn
    assigner, priced = Assigner(devices), PricedPlan(plan, costs, **how)  # type: ignore[arg-type]
    timeline = simulate([assigner.assign(priced) for _ in range(50)], costs, devices=devices, **how)  # type: ignore[arg-type]
    # A pattern of several calls may be cut anywhere.
    assert timeline.call_ms == pytest.approx(priced.steady_ms(devices), rel=0.1, abs=1e-6)


PAIR = [Task.parse("F[0:1] m0:2 @0"), Task.parse("FB[1:2] m0:2 @1"), Task.parse("B[0:1] m0:2 @0")]


def reasons(
    listed: list[list[Task]], costs: list[LayerCost], allowed: Limits
) -> list[tuple[int, float, float, str]]:
    timeline = simulate(listed, costs, devices=2, microbatches=2, mode="fused", limits=allowed)
    return [(idle.device, idle.start_ms, idle.end_ms, idle.reason) for idle in timeline.idle]


def test_a_hop_is_told_from_a_stage_that_is_still_busy():
    found = reasons([PAIR], [LayerCost(1.0, 2.0)] * 2, Limits(hop_ms=0.5))
    assert found[:2] == [(1, 0.0, 1.0, "stage before"), (1, 1.0, 1.5, "hop")]


def test_a_device_waits_for_weights_that_come_slowly():
    costs = [LayerCost(1.0, 2.0, weight_bytes=5)] * 2
    assert (0, 0.0, 5.0, "weights") in reasons([PAIR], costs, Limits(upload_gb_s=1e-6))


def test_a_device_waits_for_the_launch_of_a_call():
    listed = [[Task.parse("FB[0:1] m0:2 @0")], [Task.parse("FB[0:1] m0:2 @1")]]
    # The losses of the first call are there after 3 + 1 ms.
    assert (1, 0.0, 4.0, "launch") in reasons(listed, [LayerCost(1.0, 2.0)], Limits())


def test_a_device_waits_for_gradients_that_take_the_room_of_activations():
    costs = [LayerCost(1.0, 2.0, weight_bytes=0, kept_bytes=4), LayerCost(1.0, 2.0, weight_bytes=2)]
    listed = [[Task.parse("F[0:1] m0:2 @0"), Task.parse("FB[1:2] m0:2 @1"), Task.parse("B[0:1] m0:2 @1")]]
    found = reasons(listed, costs, Limits(device_memory_bytes=7, download_gb_s=1e-6))
    assert (1, 7.0, 9.0, "memory") in found


def test_the_next_stage_is_fetched_while_one_runs():
    costs = [LayerCost(2.0, weight_bytes=3)] * 3
    listed = [[Task.parse(f"F[{layer}:{layer + 1}] m0:2 @0") for layer in range(3)]]
    timeline = simulate(listed, costs, devices=1, microbatches=2, mode="infer", limits=Limits(upload_gb_s=1e-6))
    assert [(span.fetch_ms, span.start_ms) for span in timeline.spans] == [(0.0, 3.0), (3.0, 7.0), (7.0, 11.0)]
    assert timeline.peak_bytes == (6,)


def test_a_call_is_launched_when_the_losses_of_the_one_before_are_there():
    timeline = simulate([PAIR] * 2, [LayerCost(1.0, 2.0)] * 2, devices=2, microbatches=2, mode="fused")
    # The second microbatch is fused from 4 to 7 ms, its first one forward.
    assert timeline.launches == (0.0, 5.0)


def test_a_call_waits_until_the_one_before_the_last_is_over():
    slow = [Task.parse("F[0:1] m0:1 @0"), Task.parse("FB[1:2] m0:1 @0"), Task.parse("B[0:1] m0:1 @1")]
    timeline = simulate(
        [slow] * 3, [LayerCost(1.0, 20.0), LayerCost(1.0, 1.0)], devices=2, microbatches=1, mode="fused"
    )
    assert timeline.launches == (0.0, 2.0, 24.0)


def test_the_host_holds_activations_until_the_backward_pass_is_through():
    costs = [LayerCost(1.0, weight_bytes=10, boundary_bytes=size) for size in (4, 9, 2)]
    up = [Task.parse(f"F[{layer}:{layer + 1}] m0:2 @0") for layer in range(3)]
    down = [Task.parse(f"B[{layer}:{layer + 1}] m0:2 @0") for layer in (2, 1, 0)]
    timeline = simulate([up + down], costs, devices=1, microbatches=2, mode="train")
    # Weights, gradients, and the inputs of layers 1 and 2; each of these makes room for its gradient. The outputs
    # are the caller's.
    assert timeline.host_peak_bytes == 30 + 30 + 2 * (4 + 9)


def test_calls_that_find_the_devices_as_before_are_looked_up():
    priced = PricedPlan(Plan(fused=range(3), in_turn=False), [LayerCost(0.1)] * 3, mode="fused", microbatches=3)
    assigner = Assigner(2)
    dealt = [assigner.assign(priced) for _ in range(60)]
    assert len({id(tasks) for tasks in dealt[20:]}) == 2


def test_a_priced_plan_that_is_no_longer_used_is_not_kept():
    assigner, priced_plans = Assigner(2), WeakSet[PricedPlan]()

    for number in range(20):
        costs = [LayerCost(1.0 + number)] * 3
        priced = PricedPlan(Plan(fused=range(3), in_turn=False), costs, mode="fused", microbatches=3)
        priced_plans.add(priced)
        for _ in range(3):
            assigner.assign(priced)
        del priced
        gc.collect()

    assert not priced_plans


def test_a_list_that_cannot_run_is_refused():
    with pytest.raises(InvalidOrder, match="never runs backward"):
        simulate([PAIR[:2]], [LayerCost(1.0)] * 2, devices=2, microbatches=2, mode="fused")
    with pytest.raises(ValueError, match="calls must have at least one task list"):
        simulate([], [LayerCost(1.0)], devices=1, microbatches=1, mode="infer")
