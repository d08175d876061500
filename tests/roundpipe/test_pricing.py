"""Plans are priced with what was measured of devices, links and host, and follow it when it changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import assert_near, batch, mlp, square_error, train_call, twin, weights
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from rp_engine.device.memory.call_size import CallSize
from rp_engine.planning.adaptive import PlanInUse
from rp_engine.planning.pricing import host_of
from rp_sched import Device, Host, LayerCost, Limits, Plan, PricedPlan, Switch
from rp_telemetry.layer_times import SELDOM, YOUNG_CALLS, LayerTimes, ModelTimer
from rp_telemetry.measurements import Machinery, Rates, priced
from torch import nn

patient = settings(deadline=None)
GB = 10**9
known = st.floats(1, 100)
BASE = Limits(device_memory_bytes=80 * GB, upload_gb_s=0.5, download_gb_s=0.5)


# Rates to limits


@patient
@given(st.lists(st.tuples(st.none() | known, st.none() | known), min_size=1, max_size=8), st.none() | known, known)
def test_what_was_measured_is_priced_and_what_was_not_is_free(
    links: list[tuple[float | None, float | None]], memory: float | None, carrying: float
):
    rates = Rates(
        up_gb_s=tuple(up for up, _ in links),
        down_gb_s=tuple(down for _, down in links),
        memory_gb_s=memory,
        gil_ms_per_gb=carrying,
        add_gb_s=12.0,
        optimizer_gb_s=90.0,
    )
    host = Host(gradient_buffers=2, double_buffer=True)
    found = priced(BASE, rates, Machinery((80 * GB,) * len(links), None, host))
    assert found.host == replace(
        host,
        memory_gb_s=memory,
        gil_ms_per_gb=carrying,
        add_gb_s=12.0,
        add_threads=len(links),
        optimizer_gb_s=90.0,
    )
    for column, common, name in zip(
        zip(*links, strict=True),
        (found.upload_gb_s, found.download_gb_s),
        ("upload_gb_s", "download_gb_s"),
        strict=True,
    ):
        measured = [rate for rate in column if rate is not None]
        assert common == (median(measured) if measured else None)
        for at, rate in enumerate(column):
            if found.devices:
                assert getattr(found.devices[at], name) == (common if rate is None else rate)
            elif rate is not None:
                assert rate == pytest.approx(common, rel=0.12)
    assert found.device_memory_bytes == BASE.device_memory_bytes


def test_cpu_devices_are_priced_with_links_alone():
    rates = Rates(
        up_gb_s=(9.0, 3.0), down_gb_s=(5.0, None), memory_gb_s=20.0, gil_ms_per_gb=7.0, optimizer_gb_s=3.0
    )
    found = priced(BASE, rates, Machinery((GB, 2 * GB), (2.0, 0.5), None))
    assert found == replace(BASE, upload_gb_s=6.0, download_gb_s=5.0)


def test_nothing_measured_is_no_limit():
    assert priced(BASE, Rates(), Machinery((GB,) * 2, None, None)) == replace(
        BASE, upload_gb_s=None, download_gb_s=None
    )


def test_devices_that_differ_are_described_one_by_one():
    rates = Rates(up_gb_s=(50.0, 25.0), down_gb_s=(50.0, 50.0), switches=(Switch(devices=(0, 1), upload_gb_s=60),))
    found = priced(BASE, rates, Machinery((80 * GB, 120 * GB), (1.5, 0.75), Host()))
    assert found.devices == (
        Device(speed=1.5, memory_bytes=80 * GB, upload_gb_s=50.0, download_gb_s=50.0),
        Device(speed=0.75, memory_bytes=120 * GB, upload_gb_s=25.0, download_gb_s=50.0),
    )
    assert found.switches == rates.switches


@pytest.mark.parametrize(
    ("dtype", "buffers", "nbytes"), [(torch.bfloat16, 2, 28), (torch.float32, 1, 14), (torch.float64, 1, 7)]
)
def test_a_step_and_its_gradients_are_priced_by_the_weights_dtype(
    two: Runtime, dtype: torch.dtype, buffers: int, nbytes: float
):
    # The scheduler counts a parameter for every two bytes of weights.
    model = RoundPipe(nn.Linear(4, 4).to(dtype), runtime=two)
    assert host_of(model.engine.host.state) == Host(gradient_buffers=buffers, optimizer_bytes=nbytes)


@pytest.mark.parametrize("double_buffer", [True, False])
def test_a_second_block_is_priced_from_the_first_step_on(two: Runtime, double_buffer: bool):
    model = RoundPipe(mlp(), runtime=two, double_buffer=double_buffer)
    pricing = model.engine.planner.pricing
    pricing.on_host = False
    two.measurements.note_probe(Rates())
    x, y = batch(4)
    model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.step(lambda: None)
    model.synchronize()
    assert pricing.priced(ModelTimer("m", 5), BASE).host.double_buffer is double_buffer


# Plans follow

LAYERS = [LayerCost(1.0, weight_bytes=4 * 10**8, kept_bytes=10**8)] * 12
FAST = Rates(
    up_gb_s=(50.0,) * 4,
    down_gb_s=(50.0,) * 4,
    memory_gb_s=300.0,
    gil_ms_per_gb=1.0,
    add_gb_s=25.0,
    optimizer_gb_s=200.0,
)


class Measured:
    """A plan in use on four devices, and the rates and times that it is told."""

    def __init__(self, memory_bytes: int, microbatches: int = 8) -> None:
        self.rates = FAST
        self.timer = ModelTimer("m", len(LAYERS))
        machinery = Machinery((memory_bytes,) * 4, None, Host(gradient_buffers=2))
        self.plan = PlanInUse(
            self.timer,
            LAYERS,
            replace(BASE, device_memory_bytes=memory_bytes),
            devices=4,
            microbatches=microbatches,
            mode="fused",
            priced=lambda limits: priced(limits, self.rates, machinery),
            search_ms=1e4,
        )

    def feed(self, forward_ms: float, launch_ms: float, samples: int = 3) -> None:
        for layer in range(len(LAYERS)):
            for _ in range(samples):
                self.timer.estimator.add(
                    layer,
                    forward_ms=forward_ms,
                    backward_ms=2 * forward_ms,
                    forward_launch_ms=launch_ms,
                    backward_launch_ms=1.5 * launch_ms,
                )

    def settled(self) -> PricedPlan:
        """The plan after some calls, of which no time was measured, since layer times have changed."""
        self.timer.num_drifts += 1
        return [self.plan.priced_plan() for _ in range(8)][-1]


def _most_tasks(plan: Plan) -> int:
    return max(len(groups) or 1 for _, _, groups in plan.phases())


def test_where_launching_gets_dear_a_plan_takes_less_of_the_gil():
    measured = Measured(12 * GB)
    measured.rates = replace(FAST, gil_ms_per_gb=10.0)
    measured.feed(10.0, 0.0)
    cheap = measured.settled()
    assert _most_tasks(cheap.plan) > 1
    measured.timer.estimator.restart()
    measured.feed(10.0, 4.0)
    dear = measured.settled()
    again = PricedPlan(cheap.plan, dear.loads.costs, mode="fused", microbatches=8, limits=dear.loads.limits)
    assert dear.loads_ms(4)["GIL"] < again.loads_ms(4)["GIL"]
    assert _most_tasks(dear.plan) == 1


@pytest.mark.parametrize("slow", [{"add_gb_s": 0.5}, {"memory_gb_s": 30.0}])
def test_where_adding_on_the_host_is_slow_gradients_of_two_tasks_at_most_meet(slow: dict[str, float]):
    measured = Measured(80 * GB)
    measured.feed(10.0, 0.1)
    fast = measured.settled()
    assert _most_tasks(fast.plan) > 2
    measured.rates = replace(FAST, **slow)
    assert _most_tasks(measured.settled().plan) <= 2


@patient
@given(st.lists(st.tuples(*(st.integers(least, 1000) for least in (1, 0, 0))), max_size=10))
def test_launching_holds_the_gil_no_longer_than_calls_take(calls: list[tuple[int, int, int]]):
    timer = ModelTimer("m", 1)
    for call_ms, launch_ms, other_ms in calls:
        timer.note_gil(call_ms, launch_ms, other_ms)
    assert 0 <= timer.launch_gil_share <= 1
    for call_ms, launch_ms, other_ms in calls:
        assert 0.95 * timer.launch_gil_share * launch_ms <= max(call_ms - other_ms, 0.0) * (1 + 1e-9)
    if all(launch_ms + other_ms <= call_ms for call_ms, launch_ms, other_ms in calls):
        assert timer.launch_gil_share == 1


def test_calls_that_are_shorter_than_their_launching_make_launching_cheaper(two: Runtime):
    model = RoundPipe(mlp(), runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=MICROBATCHES))
    as_measured(two, model, {"gil_ms_per_gb": 0.0}, 30.0, 40.0)
    planner, (x, y) = model.engine.planner, batch(MICROBATCHES)
    size = CallSize.of([[x]] * MICROBATCHES)
    in_use = planner._plan("fused", size)
    for _ in range(3):
        in_use.note(in_use.current.plan, 100.0)
    model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.synchronize()
    priced_plan = in_use.current
    assert priced_plan.loads_ms(2)["GIL"] == pytest.approx(100.0)
    assert priced_plan.work.launch_ms > 1000


def test_what_calls_of_the_plan_in_use_take_is_noted(two: Runtime):
    model = RoundPipe(mlp(), runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=MICROBATCHES))
    planner, (x, y) = model.engine.planner, batch(MICROBATCHES)
    in_use = planner._plan("fused", CallSize.of([[x]] * MICROBATCHES))
    model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.synchronize()
    assert in_use.measured_ms is None, "the first call warms up"
    for _ in range(2):
        model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.synchronize()
    assert in_use.measured_ms is not None
    assert 0 < in_use.measured_ms < 60_000


def test_a_promise_is_that_of_the_plan_in_use():
    measured = Measured(12 * GB)
    assert measured.plan.promised_ms(measured.plan.priced_plan().plan) is None
    measured.feed(10.0, 0.1)
    priced_plan = measured.settled()
    promised = measured.plan.promised_ms(priced_plan.plan)
    assert promised is not None
    assert promised >= priced_plan.bound_ms(4) * (1 - 1e-9)
    assert measured.plan.promised_ms(Plan(fused=range(12))) is None


# Measured again


class Taken(LayerTimes):
    """A launch of one layer that took so long, and whose launching took so long."""

    def __init__(self, timer: ModelTimer, ms: float, launch_ms: float = 1.0) -> None:
        super().__init__(timer)
        self._ms, self._launch_ms = ms, launch_ms

    def launch_ms(self) -> dict[int, dict[str, float]]:
        return {0: {"forward_launch_ms": self._launch_ms}}

    def forward_ms(self) -> dict[int, float]:
        return {0: self._ms}

    def backward_ms(self) -> dict[int, float]:
        return {0: 2 * self._ms}


def launched(timer: ModelTimer, count: int, ms: float) -> int:
    """How many of the next launches were measured."""
    measured = 0
    for _ in range(count):
        if timer.watches_next():
            measured += 1
            timer.take(Taken(timer, ms))
    return measured


def test_one_launch_in_some_is_measured_once_there_are_enough():
    timer = ModelTimer("m", 1)
    assert launched(timer, YOUNG_CALLS + 1, 10.0) == YOUNG_CALLS + 1
    assert launched(timer, 10 * SELDOM, 10.0) == 10


def test_a_drift_is_measured_again_and_replaces_the_estimate():
    timer = ModelTimer("m", 1)
    launched(timer, YOUNG_CALLS + 1, 10.0)
    timer.costs([LayerCost(0.0)])
    # The call that shows it, the next one, which confirms it, and as many as at first.
    assert launched(timer, SELDOM, 13.0) == 2 + YOUNG_CALLS
    assert launched(timer, SELDOM, 13.0) == 1
    assert timer.estimator.moved(0.2)
    assert timer.costs([LayerCost(0.0)])[0].forward_ms == pytest.approx(13.0)


def test_launching_that_drifts_is_measured_again_though_layers_take_as_long_as_before():
    timer = ModelTimer("m", 1)
    launched(timer, YOUNG_CALLS + 1, 10.0)
    for _ in range(2):
        timer.take(Taken(timer, 10.0, launch_ms=1.5))
    assert timer.is_young()
    timer.take(Taken(timer, 10.0, launch_ms=1.5))
    assert timer.costs([LayerCost(0.0)])[0].forward_launch_ms == pytest.approx(1.5)


def test_a_single_slow_call_changes_nothing():
    timer = ModelTimer("m", 1)
    launched(timer, YOUNG_CALLS + 1, 10.0)
    timer.take(Taken(timer, 30.0))
    assert timer.is_watching(), "the next one confirms or refutes it"
    timer.take(Taken(timer, 10.0))
    assert not timer.is_watching()
    assert timer.costs([LayerCost(0.0)])[0].forward_ms == pytest.approx(10.0)


@pytest.mark.parametrize("factor", [1.1, 0.9])
def test_small_changes_join_the_estimate(factor: float):
    timer = ModelTimer("m", 1)
    launched(timer, YOUNG_CALLS + 1, 10.0)
    timer.take(Taken(timer, 10.0 * factor))
    assert not timer.is_watching()
    found = timer.costs([LayerCost(0.0)])[0].forward_ms
    assert min(10.0, 10.0 * factor) < found < max(10.0, 10.0 * factor)


# Numbers

MICROBATCHES = 8
# By what is dear: the rates of a machine, and ms of a layer and of launching it.
MACHINES: dict[str, tuple[dict[str, Any], float, float]] = {
    "nothing": ({}, 30.0, 0.0),
    "launching": ({}, 30.0, 25.0),
    "additions": ({"add_gb_s": 1e-6, "memory_gb_s": 1e-5}, 30.0, 0.0),
}


def as_measured(
    runtime: Runtime, model: RoundPipe, rates: dict[str, Any], layer_ms: float, launch_ms: float
) -> Callable[[], Plan]:
    """Let the model plan as if this was measured on real devices; returns what tells its plan."""
    pricing = model.engine.planner.pricing
    pricing.on_host = False
    links = (1e-2,) * len(runtime.lanes)
    runtime.measurements.note_probe(Rates(**{"up_gb_s": links, "down_gb_s": links, "memory_gb_s": 1.0, **rates}))
    timer = model.engine.planner.records.timer("fused", MICROBATCHES)
    for layer in range(len(model.model)):
        for _ in range(3):
            timer.estimator.add(
                layer,
                forward_ms=layer_ms,
                backward_ms=2 * layer_ms,
                forward_launch_ms=launch_ms,
                backward_launch_ms=2 * launch_ms,
            )
    timer._wanted = 0
    return lambda: model.call_times()[0].plan


@pytest.mark.slow
def test_numbers_are_equal_on_any_number_of_devices_under_the_plans_that_prices_choose():
    chosen: dict[tuple[str, str], Plan] = {}
    x, y = batch(16)
    plain = twin(mlp())
    sgd = torch.optim.SGD(plain.parameters(), lr=1e-2)
    for _ in range(3):
        train_call(plain, x, y, microbatches=MICROBATCHES)
        sgd.step()
        sgd.zero_grad()
    wanted = weights(plain)
    for devices in ("cpu:1", "cpu:2", "cpu:8"):
        for name, (rates, layer_ms, launch_ms) in MACHINES.items():
            with Runtime(devices) as runtime:
                config = RoundPipeRunConfig(num_microbatch=MICROBATCHES)
                model = RoundPipe(mlp(), runtime=runtime, model_run_config=config)
                plan_of = as_measured(runtime, model, rates, layer_ms, launch_ms)
                optimizer = torch.optim.SGD(model.optim_parameters(), lr=1e-2)
                for _ in range(3):
                    model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
                    model.step(lambda done=optimizer: (done.step(), done.zero_grad()), is_async=False)
                chosen[devices, name] = plan_of()
                model.synchronize()
                assert_near(weights(model.model), wanted, what=f"{devices}, {name} is dear")
    assert len(set(chosen.values())) >= 3, chosen
