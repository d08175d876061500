"""Measured layer times: what is timed and for how long, how plans follow, and that numbers stay as they are."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from plain import batch, mlp, plans, square_error, weights
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from rp_engine.planning.adaptive import PlanInUse
from rp_sched import LayerCost, Limits, Plan
from rp_telemetry.layer_times import YOUNG_CALLS, LayerTimes, ModelTimer
from rp_telemetry.measurements import Rates
from torch import nn

MICROBATCHES = 3


@pytest.fixture
def verbose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer times of every call are taken and logged."""
    monkeypatch.setattr(ModelTimer, "VERBOSE", True)


def wrapped(runtime: Runtime, model: nn.Module | None = None, plan: str = "planned", **how: Any) -> RoundPipe:
    model = mlp() if model is None else model
    chosen = plans(len(model), MICROBATCHES)[plan]
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=chosen, **how)
    return RoundPipe(model, runtime=runtime, name="m", model_run_config=config)


def train(model: RoundPipe, calls: int) -> list[float]:
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=1e-2)
    losses = []
    for call in range(calls):
        x, y = batch(9, seed=call)
        losses.append(model.forward_backward(input_args=(x,), label=y, loss_fn=square_error).item())
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        finish(model)
    return losses


def finish(model: RoundPipe) -> None:
    """Wait until all is over, so that the next look at a call's times finds them."""
    for run in model.engine.host._under_way._launched:
        run.wait()
    model.synchronize()


def timer_of(model: RoundPipe, mode: Any = "fused") -> ModelTimer:
    return model.engine.planner.records.timer(mode, MICROBATCHES)


# What is timed


def test_calls_are_timed_while_the_estimate_is_young_and_not_after(runtime: Runtime) -> None:
    model = wrapped(runtime)
    timer = timer_of(model)
    train(model, 3)
    assert timer.estimator.samples == 2
    assert timer.is_watching()
    train(model, YOUNG_CALLS + 3)
    assert timer.estimator.samples == YOUNG_CALLS
    assert not timer.is_watching()


def test_every_layer_has_a_forward_and_a_backward_time(runtime: Runtime) -> None:
    model = wrapped(runtime)
    train(model, 3)
    costs = timer_of(model).costs([LayerCost(0.0, 123.0)] * 5)
    assert all(0 < cost.forward_ms < 60e3 for cost in costs)
    assert all(0 < cost.backward_ms < 60e3 and cost.backward_ms != 123.0 for cost in costs)
    rates = runtime.measurements.rates()
    assert all(rate > 0 for rate in (*rates.up_gb_s, *rates.down_gb_s) if rate is not None)
    assert any(rates.up_gb_s)
    assert any(rates.down_gb_s)


class Work(nn.Module):
    """Does a thousand times what it would have to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.times = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            y = self.linear(x)
        return y


@pytest.mark.slow
def test_a_layer_that_works_much_more_is_seen_to_take_longer(two: Runtime) -> None:
    layers = nn.Sequential(*[Work() for _ in range(4)])
    layers[2].times = 1000
    model = wrapped(two, layers)
    for _ in range(4):
        x = torch.ones(6, 64)
        model.forward_backward(input_args=(x,), label=x, loss_fn=square_error)
        finish(model)
    costs = timer_of(model).costs([LayerCost(0.0)] * 4)
    assert costs[2].forward_ms > max(costs[i].forward_ms for i in (0, 1, 3))


@pytest.mark.pairwise
@pytest.mark.usefixtures("verbose")
@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("plan", ["planned", "one layer a stage", "cut differently"])
def test_each_layer_of_a_launch_is_timed_once_a_microbatch(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, plan: str, grain: Any
) -> None:
    taken: list[LayerTimes] = []
    take = ModelTimer.take
    monkeypatch.setattr(ModelTimer, "take", lambda timer, times: (taken.append(times), take(timer, times)))
    model = wrapped(runtime, plan=plan, recompute_grain=grain)
    model(batch(9)[0]).sum().backward()
    finish(model)
    forward, backward = taken
    assert {layer: len(found) for layer, found in forward._forward.items()} == dict.fromkeys(range(5), 3)
    assert not forward._backward
    assert {layer: len(found) for layer, found in backward._forward.items()} == dict.fromkeys(range(5), 3)
    assert {layer: len(found) for layer, found in backward._backward.items()} == dict.fromkeys(range(5), 3)
    assert all(ms >= 0 for ms in backward.backward_ms().values())


def test_the_last_layers_backward_begins_before_the_loss_function(
    two: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    enter = LayerTimes.enter_backward
    monkeypatch.setattr(
        LayerTimes,
        "enter_backward",
        lambda times, layer, stream: (seen.append(layer), enter(times, layer, stream)),
    )
    model = wrapped(two)

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append("loss")
        return square_error(outputs, labels)

    x, y = batch(1)
    model.forward_backward(input_args=(x,), label=y, loss_fn=loss, run_config=RoundPipeRunConfig(num_microbatch=1))
    finish(model)
    assert seen[:3] == [4, "loss", 4]


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_on_devices_with_a_queue_launching_is_measured_layer_by_layer(two: Runtime, grain: Any) -> None:
    model = wrapped(two, plan="one layer a stage", recompute_grain=grain)
    # As on a GPU: these devices compute on the threads that launch, so the times are those of both.
    model.engine.planner.pricing.on_host = False
    two.measurements.note_probe(Rates())
    train(model, 3)
    costs = timer_of(model).costs([LayerCost(0.0)] * 5)
    assert all(0 < cost.forward_launch_ms < 60e3 for cost in costs[:-1])
    assert all(0 < cost.recompute_launch_ms < 60e3 for cost in costs[:-1])
    assert all(0 < cost.backward_launch_ms < 60e3 for cost in costs)
    assert costs[0].recompute_launch_ms != costs[0].forward_launch_ms


def test_a_step_is_measured_by_what_it_changed(two: Runtime) -> None:
    model = wrapped(two)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=1e-2)
    noted: list[tuple[float, float]] = []
    two.measurements.note_step = lambda nbytes, seconds: noted.append((nbytes, seconds))
    for body in (lambda: None, optimizer.step):
        x, y = batch(9)
        model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
        model.step(body, is_async=False)
    unchanged, changed = noted
    numel = sum(block.layout.numel for block in model.engine.host.state.trainable)
    assert [nbytes for nbytes, _ in (unchanged, changed)] == [0, 28 * numel]
    assert changed[1] > 0


def test_frozen_bottom_layers_have_no_backward_time(two: Runtime) -> None:
    layers = mlp()
    layers[0].requires_grad_(False)
    model = wrapped(two, layers)
    train(model, 3)
    backward = timer_of(model).estimator._backward.averages
    # The layer after the frozen one has nothing to train either.
    assert [average.samples > 0 for average in backward] == [False, False, True, True, True]


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        del x
        raise ValueError("as arranged")


def test_a_call_that_fails_tells_nothing(two: Runtime) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), Raises(), nn.Linear(4, 3))
    model = wrapped(two, layers)
    for _ in range(3):
        with pytest.raises(ValueError, match="as arranged"):
            model.forward_backward(input_args=(batch(6)[0],), label=batch(6)[1], loss_fn=square_error)
        model.reset()
    assert all(
        average.samples == 0 and not average._warm for average in timer_of(model).estimator._forward.averages
    )


def test_layers_that_changed_are_measured_anew(two: Runtime) -> None:
    model = wrapped(two)
    train(model, 4)
    before = timer_of(model)
    model.model[0].requires_grad_(False)
    train(model, 2)
    assert timer_of(model) is not before
    assert timer_of(model).estimator.samples == 1


def test_with_a_plan_of_the_users_nothing_is_timed(two: Runtime) -> None:
    model = wrapped(two, plan="all fused")
    train(model, 4)
    assert timer_of(model).estimator.samples == 0


# Verbose


@pytest.mark.usefixtures("verbose")
def test_verbose_logs_what_each_layer_took(two: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    model = wrapped(two)
    with caplog.at_level(logging.INFO, logger="rp_telemetry.layer_times"):
        train(model, 2)
    tables = [record.getMessage() for record in caplog.records if record.name == "rp_telemetry.layer_times"]
    assert len(tables) == 2
    first, header, *rows = tables[0].splitlines()
    assert first == "model 'm', fused calls of 3 microbatches: milliseconds of one microbatch"
    assert header.split() == ["layer", "forward", "backward"]
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3", "4"]
    assert all(float(number) >= 0 for row in rows for number in row.split()[1:])


def test_by_itself_nothing_is_logged_or_printed(
    two: Runtime, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG, logger="rp_telemetry.layer_times"):
        train(wrapped(two), 3)
    assert not [record for record in caplog.records if record.name == "rp_telemetry.layer_times"]
    assert capfd.readouterr() == ("", "")


# Numbers


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["all fused", "cut differently", "microbatches divided"])
def test_timing_changes_no_number(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, plan: str) -> None:
    untimed, timed = wrapped(runtime, plan=plan), wrapped(runtime, plan=plan)
    wanted = train(untimed, 5)
    monkeypatch.setattr(ModelTimer, "VERBOSE", True)
    assert train(timed, 5) == wanted
    assert timer_of(timed).estimator.samples == 4
    for name, value in weights(untimed.model).items():
        # Two devices that add to one gradient may do so in either order only where the plan divides microbatches.
        torch.testing.assert_close(weights(timed.model)[name], value, rtol=1e-6, atol=1e-6)


# Plans

EQUAL = [LayerCost(1.0, weight_bytes=100)] * 6
# Room for the weights and gradients of two layers at a time.
TIGHT = Limits(device_memory_bytes=1200, stage_bytes=600)


def in_use(limits: Limits = TIGHT, microbatches: int = 8) -> PlanInUse:
    timer = ModelTimer("model 'm'", 6)
    return PlanInUse(timer, EQUAL, limits, devices=2, microbatches=microbatches, mode="fused", search_ms=1e4)


def feed(plan: PlanInUse, forward_ms: list[float], samples: int = 3) -> None:
    for layer, ms in enumerate(forward_ms):
        for _ in range(samples):
            plan._timer.estimator.add(layer, forward_ms=ms, backward_ms=2 * ms)


SKEWED = [1.0, 1.0, 1.0, 1.0, 1.0, 40.0]


def call(plan: PlanInUse, count: int = 1) -> list[Plan]:
    return [plan.priced_plan().plan for _ in range(count)]


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "rp_engine.planning.adaptive"]


def test_a_plan_made_from_guesses_gives_way_to_one_made_from_times_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = in_use()
    with caplog.at_level(logging.INFO, logger="rp_engine.planning.adaptive"):
        first = call(plan)[0]
        feed(plan, SKEWED)
        assert call(plan, 2) == [first] * 2
        measured = call(plan, 20)
    assert set(measured) == {measured[0]} != {first}
    assert lines_of(caplog) == [f"model 'm': replanned from measured times: {measured[0]!r}, was {first!r}"]


def test_a_plan_whose_calls_were_slower_gives_way_to_the_one_before_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = in_use()
    guessed = call(plan)[0]
    feed(plan, SKEWED)
    with caplog.at_level(logging.INFO, logger="rp_engine.planning.adaptive"):
        plan.note(guessed, 100.0)
        for _ in range(20):
            now = call(plan)[0]
            plan.note(now, 100.0 if now == guessed else 140.0)
    tried = plan._replanner.slower
    assert now == guessed
    assert len(tried) == 1
    assert lines_of(caplog) == [
        f"model 'm': replanned from measured times: {next(iter(tried))!r}, was {guessed!r}",
        f"model 'm': replanned from measured calls: {guessed!r}, was {next(iter(tried))!r}",
    ]


def test_times_that_are_as_guessed_change_no_plan_and_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    plan = in_use()
    with caplog.at_level(logging.INFO, logger="rp_engine.planning.adaptive"):
        guessed = call(plan)[0]
        feed(plan, [1.0] * 6)
        assert call(plan, 10) == [guessed] * 10
    assert not caplog.records


def test_one_sample_is_not_enough_to_replan() -> None:
    plan = in_use()
    guessed = call(plan)[0]
    feed(plan, SKEWED, samples=2)
    assert call(plan, 10) == [guessed] * 10


def test_layers_whose_times_have_changed_are_planned_for_anew() -> None:
    plan = in_use()
    call(plan)
    feed(plan, [1.0] * 6)
    before = call(plan, 10)[-1]
    plan._timer.estimator.restart()
    feed(plan, SKEWED)
    assert call(plan, 10) == [before] * 10
    plan._timer.num_drifts += 1
    after = call(plan, 10)
    assert after[:3] == [before] * 3
    assert set(after[3:]) == {after[-1]} != {before}


ROOMY = Limits(device_memory_bytes=10_000)


def test_memory_that_was_measured_counts_from_the_next_search_on(caplog: pytest.LogCaptureFixture) -> None:
    plan = in_use()
    first = call(plan)[0]
    feed(plan, [1.0] * 6)
    plan.update(EQUAL, ROOMY, ran_out=False)
    with caplog.at_level(logging.INFO, logger="rp_engine.planning.adaptive"):
        plans = call(plan, 9)
    assert plans[:2] == [first] * 2
    assert set(plans[2:]) == {Plan(fused=range(6), groups=(range(4), range(4, 8)), in_turn=False)}
    plan.update(EQUAL, TIGHT, ran_out=False)
    assert call(plan, 20) == [plans[-1]] * 20, "it has fit so far"
    assert len(lines_of(caplog)) == 1


def test_a_plan_that_ran_out_of_memory_is_left_at_once(caplog: pytest.LogCaptureFixture) -> None:
    timer = ModelTimer("model 'm'", 6)
    plan = PlanInUse(timer, EQUAL, ROOMY, devices=2, microbatches=8, mode="fused")
    before = call(plan, 10)[-1]
    with caplog.at_level(logging.INFO, logger="rp_engine.planning.adaptive"):
        plan.update(EQUAL, TIGHT, ran_out=True)
        after = call(plan)[0]
    assert after != before
    assert lines_of(caplog) == [f"model 'm': replanned from measured memory: {after!r}, was {before!r}"]


def test_a_plan_that_leaves_devices_idle_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    # A single layer, whose microbatches may not be divided.
    timer = ModelTimer("model 'm'", 1)
    layers = [LayerCost(1.0, weight_bytes=100, writes_buffers=True)]
    plan = PlanInUse(timer, layers, ROOMY, devices=2, microbatches=8, mode="fused")
    for _ in range(3):
        timer.estimator.add(0, forward_ms=1.0, backward_ms=2.0)
    with caplog.at_level(logging.INFO, logger="rp_engine.planning.adaptive"):
        now = call(plan, 10)[-1]
    assert lines_of(caplog) == [
        f"model 'm': {now!r} leaves 1 of 2 devices idle, since no plan that uses all of them fits"
    ]
    assert plan.idle_because == "nothing fits"


def test_a_model_logs_when_its_plan_changes_and_goes_on_with_the_right_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Runtime("cpu:2") as runtime, caplog.at_level(logging.INFO, logger="rp_engine.planning.adaptive"):
        model, steady = wrapped(runtime), wrapped(runtime, plan="all fused")
        wanted = train(steady, 6)
        found = train(model, 3)
        # As if one layer took nearly all the time, whatever this machine does.
        timer = timer_of(model)
        for layer in range(5):
            for _ in range(YOUNG_CALLS):
                timer.estimator.add(layer, forward_ms=50.0 if layer == 0 else 0.01, backward_ms=0.01)
        before = {key: plan._replanner.in_use.plan for key, (_, plan) in model.engine.planner._plans.items()}
        train(model, 1)
        after = {key: plan._replanner.in_use.plan for key, (_, plan) in model.engine.planner._plans.items()}
        lines = [record for record in caplog.records if record.name == "rp_engine.planning.adaptive"]
        assert len(lines) == sum(before[key] != after[key] for key in before)
        assert found == pytest.approx(wanted[:3], rel=1e-5)
