"""Calls settle on the plan that they were fastest under, as the engine plans them and measures their ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from plain import batch, mlp, square_error
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from rp_engine.device.memory.call_size import CallSize
from rp_engine.planning import plan_cache
from rp_sched import Plan, PricedPlan
from rp_telemetry.calls.call_span import CallSpan
from rp_telemetry.launch_times import Clock, Launches, clock_of_this_thread
from rp_telemetry.measurements import Rates
from torch import nn

MICROBATCHES = 16
LAYERS = 5
GB = 10**9


class Planned:
    """A model on four devices whose calls are planned as on GPUs, with times that a test makes up.

    Launching seems to hold the GIL for so long that a task for each device seems not to pay.
    """

    def __init__(self, runtime: Runtime, layers: int = LAYERS) -> None:
        config = RoundPipeRunConfig(num_microbatch=MICROBATCHES)
        model = RoundPipe(mlp() if layers == LAYERS else deep(layers), runtime=runtime, model_run_config=config)
        self.planner = model.engine.planner
        self.planner.pricing.on_host = False
        self.size = CallSize.of([[torch.zeros(1, 4)]] * MICROBATCHES)
        nbytes = sum(block.nbytes for layer in model.engine.host.state.layers for block in layer.blocks)
        # All weights arrive in a tenth of a millisecond, and carrying them holds the GIL for 40.
        link = nbytes / 1e5
        runtime.measurements.note_probe(Rates(up_gb_s=(link,) * 4, down_gb_s=(link,) * 4))
        runtime.measurements._carrying.add(40.0 * GB / nbytes)
        self._runtime, self._now = runtime, 0.0
        self._layers = layers
        self.plans: list[Plan] = []

    def call(self, took: Callable[[Plan], float]) -> Plan:
        """Plan, run and measure a call."""
        self.planner.tasks(RoundPipeRunConfig(), "fused", self.size, input_grads=False)
        (plan,) = self.planner.log.plans().values()
        self._runtime.num_calls += 1
        begun, self._now = self._now, self._now + took(plan) / 1e3
        self.planner.log.note("fused", CallSpan(self._runtime.num_calls, begun - 1e-6, self._now))
        timer = self.planner.records.timer("fused", MICROBATCHES)
        for layer in range(self._layers):
            timer.estimator.add(
                layer, forward_ms=2.0, backward_ms=4.0, forward_launch_ms=1.0, backward_launch_ms=2.0
            )
        self.plans.append(plan)
        return plan


def deep(layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))


def took(plan: Plan, *, whole_ms: float = 1040.0, other_ms: float = 1540.0) -> float:
    return whole_ms if len(plan.groups) == 4 and not plan.forward else other_ms


@pytest.fixture
def four() -> Sequence[Runtime]:
    with Runtime("cpu:4") as runtime:
        yield runtime


def test_on_four_devices_a_task_for_each_is_gone_back_to_if_fewer_were_slower(
    four: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    planned = Planned(four)

    with caplog.at_level(logging.INFO, logger="rp_engine.planning.adaptive"):
        for _ in range(30):
            planned.call(took)

    first, *_ = planned.plans
    assert took(first) == 1040.0
    assert any(took(plan) == 1540.0 for plan in planned.plans), "they promise to be faster"
    assert planned.plans[6:] == [first] * 24
    changes = [record.getMessage() for record in caplog.records if "replanned" in record.getMessage()]
    assert [line.rpartition(" was ")[2] for line in changes] == [repr(planned.plans[2]), repr(planned.plans[5])]


def test_a_plan_that_runs_well_stays_when_memory_is_measured_again_and_again(four: Runtime) -> None:
    planned = Planned(four)
    for _ in range(30):
        planned.call(partial(took, whole_ms=1000.0, other_ms=1050.0))
        planned.planner.footprint.version += 1
    assert len(set(planned.plans[6:])) == 1
    assert len(set(planned.plans)) <= 2


def test_other_sizes_of_calls_settle_on_their_own(four: Runtime) -> None:
    planned = Planned(four)
    planned.planner.pricing.sees_memory = True
    for _ in range(10):
        planned.call(took)
    in_use = planned.planner._plan("fused", planned.size)
    other = planned.planner._plan("fused", CallSize(MICROBATCHES, 1000))
    assert other is not in_use
    assert in_use.measured_ms == pytest.approx(1040.0)
    assert other.measured_ms is None


def test_calls_that_graphs_launch_begin_with_a_plan_that_is_clearly_better_for_them(four: Runtime) -> None:
    planned = Planned(four)
    for _ in range(12):
        planned.call(partial(took, whole_ms=1540.0, other_ms=1040.0))
    in_use, graphs = planned.planner._plan("fused", planned.size), frozenset(range(LAYERS))
    by_python = in_use.current.plan

    in_use.reprice(*planned.planner.guesses.problem("fused", 1, graphs))
    by_graphs = in_use.current
    in_use.reprice(*planned.planner.guesses.problem("fused", 1, graphs))

    as_before = PricedPlan.unchecked(by_python, by_graphs.loads, "fused", MICROBATCHES)
    assert by_graphs.alone_ms(4) < 0.95 * as_before.alone_ms(4)
    # It stays if it is about as fast as any other.
    assert in_use.current.plan == by_graphs.plan


# In the next process


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("RP_ENGINE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.mark.few(1)
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("is_first_faster", [False, True])
def test_the_next_process_begins_with_what_was_settled_for_and_tries_nothing_slower(
    caplog: pytest.LogCaptureFixture, *, is_first_faster: bool
) -> None:
    with Runtime("cpu:4") as runtime:
        earlier = Planned(runtime)
        fast = took if is_first_faster else partial(took, whole_ms=1540.0, other_ms=1040.0)
        for _ in range(10):
            earlier.call(fast)
    with Runtime("cpu:4") as runtime, caplog.at_level(logging.INFO, logger="rp_engine.planning.adaptive"):
        later = Planned(runtime)
        later.call(fast)
        # No other plan was in use before.
        lines = [record.getMessage().partition("replanned ")[2] for record in caplog.records]
        assert lines == ([] if is_first_faster else [f"from an earlier process: {later.plans[0]!r}"])
        for _ in range(9):
            later.call(fast)
    assert (earlier.plans[0] == earlier.plans[-1]) == is_first_faster
    settled, slower = earlier.plans[-1], set(earlier.plans[:-1]) - {earlier.plans[-1]}
    assert len(slower) == 1
    # It may try one that was not tried before.
    assert slower.isdisjoint(later.plans)
    assert later.plans[:3] == [settled] * 3
    assert later.plans[6:] == [settled] * 4


@pytest.mark.usefixtures("cache")
def test_a_plan_of_another_process_is_checked_by_memory_and_waits_until_it_fits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Runtime("cpu:4") as runtime:
        earlier = Planned(runtime)
        for _ in range(10):
            earlier.call(took)
    with Runtime("cpu:4") as runtime:
        later = Planned(runtime)
        pricing, limits = later.planner.pricing, later.planner.pricing.limits
        costs, _ = later.planner.guesses.problem("fused", 1)
        nbytes = sum(cost.weight_bytes + cost.gradient_bytes for cost in costs)
        pricing.limits = lambda *args, **more: replace(limits(*args, **more), device_memory_bytes=nbytes)
        with caplog.at_level(logging.INFO, logger="rp_engine.planning.adaptive"):
            other = later.call(took)
            pricing.limits = limits
            later.planner.footprint.version += 1
            found = later.call(took)
    assert found == earlier.plans[-1] != other
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.endswith(f"replanned from an earlier process: {found!r}, was {other!r}")


@pytest.mark.usefixtures("cache")
def test_other_models_begin_with_plans_of_their_own() -> None:
    for layers in (3, 4):
        with Runtime("cpu:4") as runtime:
            planned = Planned(runtime, layers)
            for _ in range(10):
                planned.call(took)
    folder = plan_cache.cache_folder()
    assert folder is not None
    assert len(list(folder.iterdir())) == 2


def test_cpu_devices_keep_no_plans(two: Runtime, cache: None) -> None:
    del cache
    model = RoundPipe(mlp(), runtime=two)
    x, y = batch(8)
    for _ in range(8):
        model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.synchronize()
    folder = plan_cache.cache_folder()
    assert folder is not None
    assert not folder.exists()


# What decides


@pytest.mark.later
@pytest.mark.usefixtures("samples_first")
@pytest.mark.parametrize("on_host", [False, True])
def test_calls_that_decide_are_over_before_the_next_is_planned(
    two: Runtime, monkeypatch: pytest.MonkeyPatch, *, on_host: bool
) -> None:
    model = RoundPipe(mlp(), runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=4))
    planner, host = model.engine.planner, model.engine.host
    monkeypatch.setattr(planner.pricing, "on_host", on_host)
    waited: list[int] = []
    original = host.wait_for_calls

    def wait() -> None:
        original()
        waited.append(two.num_calls + 1)
        # Of the three calls under a plan all but the first count.
        replanner = planner._plan("fused", CallSize(4, 2))._replanner
        assert len(replanner._measured[replanner.in_use.plan].latest_ms) == 2

    monkeypatch.setattr(host, "wait_for_calls", wait)
    x, y = batch(8)
    for _ in range(12):
        model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.synchronize()
    assert waited in ([[]] if on_host else [[4], [4, 7]])


def test_launching_is_measured_while_as_many_threads_launch_as_there_are_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: set[int] = set()
    at_once: list[int] = []
    meets: list[int] = []
    meeting = threading.Barrier(4)

    def clock() -> Clock:
        threads.add(threading.get_ident())
        return clock_of_this_thread()

    class Meeting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # All four tasks are launching their first layer: none of them is measured alone.
            if meets and len(at_once) < 4:
                at_once.append(threading.get_ident())
                meeting.wait(60)
            return super().forward(x)

    plan = Plan(fused=range(2), groups=tuple(range(at, at + 1) for at in range(4)))
    with Runtime("cpu:4") as runtime:
        layers = nn.Sequential(Meeting(4, 4), nn.Linear(4, 4))
        layers.main_arguments = ("samples",)
        config = RoundPipeRunConfig(num_microbatch=4, execute_plan=plan)
        model = RoundPipe(layers, runtime=runtime, model_run_config=config)
        planner = model.engine.planner
        monkeypatch.setattr(planner.pricing, "on_host", False)
        monkeypatch.setattr("rp_engine.planning.launch_records.Launches", partial(Launches, clock))
        x, y = torch.ones(4, 4), torch.ones(4, 4)
        for call in range(5):
            # Before, layers are examined one after another.
            meets += [1] if call == 4 else []
            model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
        model.synchronize()
        costs = planner.records.costs("fused")
    assert len(set(at_once)) == 4
    assert threads >= set(at_once)
    assert all(cost.forward_launch_ms > 0 for cost in costs)
