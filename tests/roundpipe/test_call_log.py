"""What plans promise beside what calls take: which calls count, what is logged, and what users are shown."""

from __future__ import annotations

import logging
import math
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import batch, mlp, plans, square_error
from roundpipe import CallTime, RoundPipe, RoundPipeRunConfig, Runtime
from rp_sched import Mode, Plan
from rp_telemetry.calls.call_log import CALLS, CallLog
from rp_telemetry.calls.call_span import CallSpan
from rp_telemetry.calls.call_time import as_table
from rp_telemetry.layer_times import ModelTimer

patient = settings(deadline=None)
PLAN, OTHER = Plan(fused=range(5)), Plan([range(2)], range(2, 5), [range(2)])
LOGGER = "rp_telemetry.calls.call_log"


class Planned:
    """What plans calls, and is told how long they took."""

    idle_because = None

    def __init__(self, promised: float | None) -> None:
        self._promised = promised
        self.told: list[tuple[Plan, float]] = []

    def promised_ms(self, plan: Plan) -> float | None:
        del plan
        return self._promised

    def note(self, plan: Plan, call_ms: float) -> None:
        self.told.append((plan, call_ms))


class Followed:
    """A log that follows calls under a plan which promises 100 ms."""

    def __init__(self, runtime: Runtime, promised: float | None = 100.0) -> None:
        planner = RoundPipe(mlp(), runtime=runtime, name="m").engine.planner
        self.log: CallLog = planner.log
        self.planned = Planned(promised)
        self._timer = ModelTimer("model 'm'", 5)
        self._guesses = lambda: planner.guesses.costs(0)
        self._number, self._now = 0, 0.0

    def follow(self, plan: Plan = PLAN, number: int = 1, mode: Mode = "fused") -> None:
        self.log.follow(number, self._timer, mode, 4, plan, self._guesses, self.planned)

    def call(self, ms: float, *, follows: bool = True, between: int = 0) -> None:
        """A call ends so much later than the one before, during which it was launched if it `follows`."""
        self._number += 1 + between
        self.follow(number=self._number)
        launched = self._now - (1e-6 if follows else 0.0)
        self._now += ms / 1e3
        self.log.note("fused", CallSpan(self._number, launched, self._now))

    @property
    def time(self) -> CallTime:
        (found,) = self.log.times()
        return found


@pytest.fixture
def followed(two: Runtime) -> Followed:
    return Followed(two)


@patient
@given(st.lists(st.tuples(st.integers(1, 1000), st.booleans(), st.integers(0, 1)), max_size=30))
def test_calls_count_that_follow_each_other(calls: list[tuple[int, bool, int]]):
    with Runtime("cpu:1") as runtime:
        followed = Followed(runtime)
        followed.call(50.0)
        for ms, follows, between in calls:
            followed.call(ms, follows=follows, between=between)
        counted = [ms for ms, follows, between in calls if follows and not between][-CALLS:]
        assert followed.time.calls == len(counted)
        if counted:
            assert followed.time.measured_ms == pytest.approx(median(counted), rel=1e-6)
        else:
            assert followed.time.measured_ms is None


def test_a_new_plan_starts_anew(followed: Followed) -> None:
    for _ in range(4):
        followed.call(50.0)
    assert followed.time.calls == 3
    followed.follow(OTHER)
    assert followed.time.plan == OTHER
    assert (followed.time.calls, followed.time.measured_ms, followed.time.error) == (0, None, None)


def test_a_promise_is_compared_once_calls_show_it_and_again_when_they_drift_apart(
    followed: Followed, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger=LOGGER):
        for _ in range(CALLS):
            followed.call(80.0)
        assert not caplog.records
        followed.call(80.0)
        for _ in range(CALLS):
            followed.call(84.0)
        for _ in range(CALLS):
            followed.call(50.0)
    assert [record.getMessage() for record in caplog.records] == [
        "model 'm': Plan(FB[0:5]) promised 100.000 ms a call, calls took 80.000 ms (+25.0 %)",
        "model 'm': Plan(FB[0:5]) promised 100.000 ms a call, calls now take 67.000 ms (+49.3 %)",
        "model 'm': Plan(FB[0:5]) promised 100.000 ms a call, calls now take 50.000 ms (+100.0 %)",
    ]


def test_nothing_is_logged_of_a_plan_that_promises_nothing(two: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    followed = Followed(two, promised=None)
    with caplog.at_level(logging.INFO, logger=LOGGER):
        for _ in range(2 * CALLS):
            followed.call(80.0)
    assert not caplog.records


# What plans are told


def test_a_call_counts_for_the_plan_that_it_was_launched_under(followed: Followed) -> None:
    followed.follow(PLAN, number=1)
    followed.follow(OTHER, number=2)
    followed.log.note("fused", CallSpan(1, 0.0, 0.050))
    followed.log.note("fused", CallSpan(2, 0.040, 0.120))
    assert followed.planned.told == [(PLAN, pytest.approx(50.0)), (OTHER, pytest.approx(70.0))]


def test_a_call_that_follows_none_counts_from_its_launch(followed: Followed) -> None:
    for number, (launched, ended) in enumerate([(0.0, 0.1), (0.3, 0.4), (0.35, 0.6)], start=1):
        followed.follow(number=number)
        followed.log.note("fused", CallSpan(number, launched, ended))
    assert [ms for _, ms in followed.planned.told] == pytest.approx([100.0, 100.0, 200.0])


def test_calls_whose_backward_the_caller_runs_do_not_count(followed: Followed) -> None:
    followed.follow(number=1, mode="train")
    followed.log.note("train", CallSpan(1, 0.0, 0.1))
    # The same call, when its backward tasks are over; they were launched later.
    followed.log.note("train", CallSpan(2, 0.2, 0.3))
    assert followed.planned.told == []


def test_calls_that_failed_are_forgotten(followed: Followed) -> None:
    for number in range(1000):
        followed.follow(number=number)
    assert len(followed.log._launched) <= 64


# What users are shown


def train(model: RoundPipe, calls: int) -> None:
    for call in range(calls):
        x, y = batch(8, seed=call)
        model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.synchronize()


def test_a_model_shows_what_its_plans_promise(runtime: Runtime) -> None:
    model = RoundPipe(mlp(), runtime=runtime, name="m", model_run_config=RoundPipeRunConfig(num_microbatch=4))
    assert model.call_times() == []
    train(model, 4)
    (found,) = model.call_times()
    assert found.what == "model 'm', fused calls of 4 microbatches"
    assert found.plan.fused is not None
    assert found.promised_ms is not None
    assert 0 < found.promised_ms < math.inf
    assert found.bound_by is not None
    assert found.network_ms is None
    if found.measured_ms is not None:
        assert found.error == pytest.approx(found.promised_ms / found.measured_ms - 1)
    assert repr(found.plan) in str(found)


@pytest.mark.parametrize("name", ["all fused", "cut differently", "microbatches divided"])
def test_so_it_does_for_plans_of_the_users_once_calls_were_measured(two: Runtime, name: str) -> None:
    model = RoundPipe(mlp(), runtime=two)
    train_with(model, None, 3)
    chosen = plans(5, 4)[name]
    train_with(model, chosen, 1)
    (found,) = model.call_times()
    assert found.plan == chosen
    assert found.promised_ms is not None
    assert found.promised_ms > 0


def train_with(model: RoundPipe, plan: Plan | None, calls: int) -> None:
    x, y = batch(8)
    config = RoundPipeRunConfig(num_microbatch=4, execute_plan=plan)
    for _ in range(calls):
        model.forward_backward(input_args=(x,), label=y, loss_fn=square_error, run_config=config)
    model.synchronize()


def test_a_plan_of_which_nothing_was_measured_promises_nothing(two: Runtime) -> None:
    model = RoundPipe(mlp(), runtime=two)
    train_with(model, plans(5, 4)["all fused"], 3)
    (found,) = model.call_times()
    assert (found.promised_ms, found.bound_by, found.error) == (None, None, None)
    assert "-" in str(found)


@pytest.mark.usefixtures("samples_first")
def test_a_call_ends_with_its_last_gradient(two: Runtime) -> None:
    spans: list[CallSpan] = []
    model = RoundPipe(mlp(), runtime=two)
    note = model.engine.planner.log.note
    model.engine.planner.log.note = lambda mode, span, **more: (spans.append(span), note(mode, span, **more))[1]
    train(model, 3)
    assert [span.number for span in spans] == [1, 2, 3]
    assert all(span.launched_s < span.ended_s for span in spans)
    assert [span.ended_s for span in spans] == sorted(span.ended_s for span in spans)


def test_the_network_of_several_machines_has_a_column_of_its_own() -> None:
    plan = Plan(fused=range(4))
    alone = CallTime("m", plan, 98.0, 100.0, 8, "device")
    shared = CallTime("n", plan, 250.0, 260.0, 8, "network", 250.0)
    assert "network" not in as_table([alone])
    _, first, second = as_table([alone, shared]).splitlines()
    assert [cell.strip() for cell in first.split("|")[-2:]] == ["device", "-"]
    assert [cell.strip() for cell in second.split("|")[-2:]] == ["network", "250.000 ms"]


def test_idle_devices_and_what_makes_them_idle_have_a_column_of_their_own() -> None:
    plan = Plan(fused=range(4))
    busy = CallTime("m", plan, 98.0, 100.0, 8, "device")
    idle = CallTime("n", plan, 98.0, 100.0, 8, "device", idle_devices=3, idle_because="GIL")
    assert "idle" not in as_table([busy])
    _, first, second = as_table([busy, idle]).splitlines()
    assert first.split("|")[-1].strip() == "0"
    assert second.split("|")[-1].strip() == "3 (GIL)"


def test_a_plan_of_the_users_that_leaves_devices_idle_shows_it(two: Runtime) -> None:
    model = RoundPipe(mlp(), runtime=two)
    train_with(model, None, 3)
    train_with(model, plans(5, 4)["all fused"], 1)
    (found,) = model.call_times()
    assert (found.idle_devices, found.idle_because) == (1, None)
