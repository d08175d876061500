"""`launch="auto"`: graphs where launching bounds calls, there is memory, and calls are faster; else as without."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from plain import mlp
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from rp_engine.device.memory.call_size import CallSize
from rp_engine.device.memory.graph_store import GraphWork
from rp_engine.planning import planner
from rp_engine.planning.pricing import REPLAY_LAUNCH_MS
from rp_sched import (
    NOT_KEPT,
    KeptLaunch,
    KeptPlan,
    Launch,
    Launching,
    LayerCost,
    Mode,
    NotKept,
    Plan,
    PricedPlan,
    Task,
    simulated_ms,
)
from rp_sched.replanning import launch_choice as choices
from rp_sched.replanning.launch_choice import LaunchChoice, LaunchQuestion, LaunchTimes, launch_times
from rp_telemetry.calls.call_span import CallSpan
from rp_telemetry.layer_times import YOUNG_CALLS, LayerTimes, ModelTimer
from test_graphs import (
    LAYERS,
    MICROBATCHES,
    PLANS,
    Residual,
    assert_same,
    replays,
    row,
    summed_loss,
    trained,
)

# A fixture.
__all__ = ["replays"]

ALL = frozenset(range(4))


def timer(launch_ms: float, compute_ms: float, layers: int = 4) -> ModelTimer:
    """One whose calls were measured: forward and backward of a layer together take these times."""
    found = ModelTimer("model 'm', fused calls", layers)
    for _ in range(YOUNG_CALLS + 1):
        for layer in range(layers):
            found.estimator.add(
                layer,
                forward_ms=compute_ms / 3,
                backward_ms=compute_ms * 2 / 3,
                forward_launch_ms=launch_ms / 2,
                backward_launch_ms=launch_ms / 2,
            )
    return found


def fused(*microbatches: int) -> list[Task]:
    """A task of all layers on each device."""
    edges = [sum(microbatches[:at]) for at in range(len(microbatches) + 1)]
    spans = pairwise(edges)
    return [Task("FB", range(4), range(*span), device) for device, span in enumerate(spans)]


class Kept(NotKept):
    """What an earlier process has settled for. `found`: what this one does."""

    def __init__(self, before: KeptLaunch) -> None:
        self._before = before
        self.found: list[KeptLaunch] = []

    def launch(self) -> KeptLaunch:
        return self._before

    def keep_launch(self, settled: KeptLaunch) -> None:
        self.found.append(settled)


@dataclass
class Asking:
    """A kind of call whose launching is chosen."""

    timer: ModelTimer
    tasks: Sequence[Task] = field(default_factory=lambda: fused(8))
    layers: frozenset[int] = ALL
    missing: int | None = 0
    is_timed: bool = False
    kept: NotKept = NOT_KEPT

    def __post_init__(self) -> None:
        self.choice = LaunchChoice(self.timer, is_timed=self.is_timed, kept=self.kept)

    def by_graphs(self) -> bool:
        self.choice.decide(LaunchQuestion(self.tasks, lambda: self.layers, lambda _: self.missing))
        return self.choice.by_graphs

    def reason(self) -> str:
        assert self.choice.decision is not None
        return self.choice.decision.reason

    def calls(self, *times_ms: float, replayed: bool = True) -> None:
        for ms in times_ms:
            self.choice.note(ms, replayed=replayed)


@pytest.mark.parametrize(("launch_ms", "by_graphs"), [(5.0, True), (3.6, True), (3.4, False), (1.0, False)])
def test_graphs_launch_where_launching_bounds(launch_ms: float, by_graphs: bool) -> None:
    assert Asking(timer(launch_ms, 5.0)).by_graphs() is by_graphs


def test_threads_that_share_the_gil_bound_each_other() -> None:
    # A thread takes 2 ms where its device takes 5, and holds the GIL for half of that.
    own = timer(2.0, 5.0)
    own.launch_gil_share = 0.5

    found = [launch_times(fused(*[8] * devices), own, ALL - {3}) for devices in (1, 4)]

    assert [one.launching_ms for one in found if one] == pytest.approx([64, 128])
    assert [one.computing_ms for one in found if one] == pytest.approx([160, 160])
    # Three layers of four.
    assert [one.replayed for one in found if one] == pytest.approx([3 / 4] * 2)
    assert Asking(own, fused(8, 8, 8, 8)).by_graphs()
    assert not Asking(own, fused(8)).by_graphs()


def test_graphs_launch_single_microbatches_too() -> None:
    assert Asking(timer(5.0, 5.0), fused(1, 1)).by_graphs()


def test_graphs_of_few_layers_are_not_worth_it() -> None:
    one_of_six = Asking(timer(5.0, 5.0, 6), [Task("FB", range(6), range(8), 0)], layers=frozenset({1}))
    assert not one_of_six.by_graphs()
    assert one_of_six.reason() == "graphs would take over 17% of launching"
    # The loss function reads what the last one returns.
    assert not Asking(timer(5.0, 5.0), layers=frozenset({3})).by_graphs()


def test_layers_that_were_not_seen_yet_are_asked_for_again() -> None:
    asking = Asking(timer(5.0, 5.0), layers=frozenset())
    assert not asking.by_graphs()
    asking.layers = ALL
    assert asking.by_graphs()


def test_graphs_leave_the_memory_that_plans_take() -> None:
    asking = Asking(timer(5.0, 5.0), missing=3_000_000_000)
    assert not asking.by_graphs()
    assert asking.reason() == "graphs lack 3.0 GB of device memory"


def test_nothing_is_chosen_before_times_and_memory_are_known() -> None:
    asking = Asking(ModelTimer("calls", 4), missing=None)
    assert not asking.by_graphs()
    assert asking.choice.decision is None
    asking.timer.estimator = timer(5.0, 5.0).estimator
    assert not asking.by_graphs()
    asking.missing = 0
    for layer in range(4):
        asking.timer.estimator.add(layer, forward_ms=5.0 / 3)
    assert asking.by_graphs()


def none_missing(_: frozenset[int]) -> int:
    return 0


def compared(*calls_ms: float) -> Asking:
    """A kind of call that graphs launch, since launching bounds it, after calls of these times by Python."""
    asking = Asking(timer(5.0, 5.0), is_timed=True)
    asking.calls(*calls_ms, replayed=False)
    assert asking.by_graphs()
    return asking


def test_graphs_stay_if_calls_are_faster(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rp_sched"):
        asking = compared(100.0, 101.0, 99.0, 100.0, 130.0)
        # Another plan pays now, but calls are compared with those of the best one without.
        asking.tasks = fused(4, 4)
        asking.by_graphs()
        asking.calls(50.0, 51.0, 52.0, 300.0, 50.0)
        assert asking.by_graphs()

    assert asking.reason() == "calls took 51 ms by graphs and 100 ms without"
    assert [record.getMessage() for record in caplog.records] == [
        "model 'm', fused calls: launch graphs, since launching takes 160 ms of a call, its devices 160 ms"
    ]


def test_graphs_go_if_calls_are_no_faster_and_are_not_tried_again_for_the_same_layers() -> None:
    asking = compared(*[100.0] * 5)
    asking.calls(*[99.5] * 5)

    assert not asking.by_graphs()
    assert asking.reason() == "calls took 100 ms by graphs and 100 ms without"
    asking.tasks = fused(16)
    assert not asking.by_graphs()
    asking.timer.num_drifts += 1
    asking.calls(*[100.0] * 5, replayed=False)
    assert not asking.by_graphs()
    asking.calls(*[100.0] * 5, replayed=False)
    assert asking.by_graphs()


def test_calls_whose_layers_are_measured_are_compared_with_none() -> None:
    asking = Asking(timer(5.0, 5.0), is_timed=True)
    for number in range(9):
        asking.choice.note(150.0, replayed=False, is_measured=True)
        assert not asking.by_graphs(), number
    assert asking.choice.decision is None
    asking.calls(*[100.0] * 5, replayed=False)
    assert asking.by_graphs()
    # Slower than by Python, but faster than what is measured by Python.
    asking.calls(*[110.0] * 5)
    assert not asking.by_graphs()


def test_a_plan_by_which_graphs_can_launch_is_timed_without_them_first() -> None:
    asking = Asking(timer(5.0, 5.0), fused(8), is_timed=True, missing=1)
    asking.calls(*[100.0] * 8, replayed=False)
    assert not asking.by_graphs()
    asking.tasks, asking.missing = fused(4, 4), 0
    assert not asking.by_graphs()
    asking.calls(*[100.0] * 5, replayed=False)
    assert asking.by_graphs()
    asking.calls(*[1000.0] * 5)
    assert not asking.by_graphs()


def test_plans_that_alternate_are_judged_together() -> None:
    asking = Asking(timer(5.0, 5.0), is_timed=True)
    chosen: list[bool] = []
    for number in range(60):
        asking.tasks = fused(8) if number % 2 else fused(4, 4)
        chosen.append(asking.by_graphs())
        asking.calls(1000.0 if chosen[-1] else 100.0, replayed=chosen[-1])
    assert any(chosen)
    assert not chosen[-1]
    assert asking.reason() == "calls took 1000 ms by graphs and 100 ms without"


def test_what_was_configured_is_judged_once_it_is_not() -> None:
    asking = Asking(timer(5.0, 5.0), is_timed=True)
    asking.choice.follow(LaunchQuestion(asking.tasks, lambda: ALL, lambda _: 0))
    asking.calls(*[1000.0] * 50)
    assert not asking.by_graphs()
    asking.calls(*[100.0] * 5, replayed=False)
    assert asking.by_graphs()
    asking.calls(*[1000.0] * 5)
    assert not asking.by_graphs()


def test_graphs_are_judged_again_when_layers_take_other_times() -> None:
    asking = compared(*[100.0] * 5)
    asking.calls(*[50.0] * 5)
    assert asking.by_graphs()

    measured, asking.timer.estimator = asking.timer.estimator, ModelTimer("calls", 4).estimator
    asking.timer.num_drifts += 1
    # Measured and timed by Python, and then by graphs.
    assert not asking.by_graphs()
    asking.timer.estimator = measured
    assert not asking.by_graphs()
    asking.calls(*[60.0] * 5, replayed=False)
    assert asking.by_graphs()
    asking.calls(*[70.0] * 5)
    assert not asking.by_graphs()
    assert asking.reason() == "calls took 70 ms by graphs and 60 ms without"


def test_graphs_go_if_none_is_launched() -> None:
    # However many calls there were before they were chosen.
    asking = compared(*[100.0] * 40)
    assert asking.by_graphs()
    asking.calls(*[100.0] * 32, replayed=False)

    assert not asking.by_graphs()
    assert asking.reason() == "graphs launched nothing in 32 calls"


def test_graphs_stay_while_launching_is_somewhat_less_than_a_bound() -> None:
    asking = compared(*[100.0] * 5)
    for launch_ms, by_graphs in ((3.0, True), (2.4, False)):
        asking.timer.estimator = timer(launch_ms, 5.0).estimator
        asking.timer.num_drifts += 1
        assert not asking.by_graphs()
        asking.calls(*[100.0] * 5, replayed=False)
        assert asking.by_graphs() is by_graphs


def choose(launching: Launching, launch: Launch, mode: Mode, measured: ModelTimer) -> None:
    launching.meet(launch, mode, 8, measured)
    launching.choose(launch, mode, 8, fused(8), none_missing)


def test_memory_of_graphs_is_counted_until_no_calls_have_any() -> None:
    launching = Launching(lambda _: ALL, may_choose=True)
    choose(launching, "graphs", "fused", timer(5.0, 5.0))
    kept = launching.graphed
    assert kept
    # Neither an evaluation nor calls that are to have none free what others have.
    choose(launching, "auto", "infer", ModelTimer("calls", 4))
    choose(launching, "eager", "fused", timer(5.0, 5.0))
    assert launching.graphed == kept
    assert not launching.frees_graphs
    launching._choices["fused", 8].refuse("they gain nothing")
    choose(launching, "auto", "infer", ModelTimer("calls", 4))
    assert not launching.graphed
    assert launching.frees_graphs


def test_graphs_are_given_back_once_calls_are_configured_to_have_none() -> None:
    launching = Launching(lambda _: ALL, may_choose=True)
    choose(launching, "graphs", "fused", timer(5.0, 5.0))
    kept: list[bool] = []
    for _ in range(32):
        choose(launching, "eager", "fused", timer(5.0, 5.0))
        kept.append(bool(launching.graphed))
        assert launching.frees_graphs is not kept[-1]
    assert kept == [True] * 31 + [False]


def test_calls_wait_for_graphs_to_come_but_not_for_ever() -> None:
    launching = Launching(lambda _: ALL, may_choose=True)
    assert not launching.note_awaiting("fused", 8)
    choose(launching, "graphs", "fused", timer(5.0, 5.0))
    found = [launching.note_awaiting("fused", 8) for _ in range(33)]
    assert found == [True] * 31 + [False] * 2
    # One that replays gives hope again.
    launching.note("fused", 8, 50.0, replayed=True)
    assert launching.note_awaiting("fused", 8)


# In the engine


def test_plans_of_all_calls_leave_what_graphs_of_some_keep() -> None:
    with Runtime("cpu:1", device_memory_bytes=10**8) as runtime:
        planner = RoundPipe(mlp(), runtime=runtime).engine.planner
        footprint, tasks = planner.footprint, [Task("F", range(2), range(8), 0)]
        footprint.most_rows, footprint.knows_peak = 4, True
        before = planner.guesses.foreseen_bytes(4, tasks, frozenset()), planner.guesses.problem("infer", 4)[1]
        footprint.graphed = frozenset({0, 1})
        footprint.note_graphs(1500)
        after = planner.guesses.foreseen_bytes(4, tasks, frozenset()), planner.guesses.problem("infer", 4)[1]
        # It is as much as it is, however many rows others have.
        assert footprint.graph_bytes(planner.guesses.costs(64), 64) == 1500

    assert after[0] - before[0] == 1500
    assert before[1].device_memory_bytes == (after[1].device_memory_bytes or 0) + 1500


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU devices choose, as if launching bound them."""
    monkeypatch.setattr("rp_telemetry.layer_times._DRIFT", float("inf"))
    choosing = lambda asks, may_choose: Launching(asks, may_choose=not may_choose)  # noqa: E731
    monkeypatch.setattr(planner, "Launching", choosing)
    # On a busy machine plans change often.
    monkeypatch.setattr(choices, "_PLANS", 0)
    # As if times had changed in each call.
    monkeypatch.setattr(LaunchChoice, "_has_news", lambda self: not self._measured.is_young())
    monkeypatch.setattr(choices, "launch_times", lambda *given: LaunchTimes(9.0, 10.0, 0.8 if given[2] else 0.0))


@pytest.mark.few(1)
@pytest.mark.usefixtures("bound")
@pytest.mark.parametrize("is_faster", [True, False])
def test_calls_have_the_bits_of_eager_ones_whatever_is_chosen(
    monkeypatch: pytest.MonkeyPatch, replays: list[range], is_faster: bool, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choices, "GRAPH_GAIN", -1e9 if is_faster else 1.0)
    models: list[RoundPipe] = []
    steps = 40
    with Runtime("cpu:1") as runtime, caplog.at_level(logging.INFO, "rp_sched"):
        expected = trained(runtime, row(), "eager", steps=steps)
        found = trained(runtime, row(), "auto", steps=steps, beside=lambda _, model: models.append(model))
        (fused_calls,) = [one for one in models[0].call_times() if "fused" in one.what]
        assert_same(found, expected)
        stores = [twins.graphs for twins in models[0].engine._runs._twins]

    assert {layer for span in replays for layer in span} >= set(range(LAYERS - 1))
    assert fused_calls.launch is not None
    assert str(fused_calls).endswith("graphs") is is_faster
    assert fused_calls.launch.by_graphs is is_faster
    told = [text for text in caplog.messages if "launch " in text and "fused" in text]
    assert sum("launch graphs" in text for text in told) == 1
    assert ("launch graphs" in told[-1]) is is_faster
    # What they took is given back.
    assert all(bool(store.slots) is is_faster for store in stores)


@pytest.mark.later
@pytest.mark.usefixtures("bound")
def test_graphs_of_an_earlier_process_launch_as_soon_as_they_are_captured(
    monkeypatch: pytest.MonkeyPatch, replays: list[range]
) -> None:
    monkeypatch.setattr(choices, "_SAME", float("inf"))
    kept = Kept(KeptLaunch(frozenset(range(LAYERS - 1)), graphs_ms=1.0, eager_ms=1e9))
    monkeypatch.setattr(planner.Planner, "_settled", lambda *_: kept)
    seen: list[int] = []
    with Runtime("cpu:1") as runtime:
        expected = trained(runtime, row(), "eager", steps=16)
        assert not replays
        found = trained(runtime, row(), "auto", steps=16, beside=lambda *_: seen.append(len(replays)))
        assert_same(found, expected)

    # Layers are looked at in the first call, and graphs captured and tried in the next ones.
    assert seen[4] > 0
    assert [one.by_graphs for one in kept.found] == [True]


@pytest.mark.cuda
@pytest.mark.parametrize("plan", ["all fused", "two stages"])
def test_a_gpu_chooses_and_has_the_bits_of_eager_calls(plan: str) -> None:
    models: list[RoundPipe] = []
    with Runtime("cuda:0") as runtime:
        expected = trained(runtime, row(), "eager", PLANS[plan], steps=40)
        found = trained(
            runtime, row(), "auto", PLANS[plan], steps=40, beside=lambda _, model: models.append(model)
        )
        assert_same(found, expected)
        assert models[0].launch_decision is not None


@pytest.mark.later
def test_cpu_devices_are_launched_by_python_unless_told_otherwise(
    runtime: Runtime, replays: list[range], caplog: pytest.LogCaptureFixture
) -> None:
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES)
    with caplog.at_level(logging.INFO, "rp_sched"):
        model = RoundPipe(row(Residual()), runtime=runtime, model_run_config=config)
        for _ in range(14):
            x, label = torch.ones(MICROBATCHES, 8), torch.zeros(MICROBATCHES, dtype=torch.long)
            model.forward_backward((x,), label=label, loss_fn=summed_loss)
        model.synchronize()

    assert not replays
    assert not [text for text in caplog.messages if "launch" in text]
    assert all(one.launch is None for one in model.call_times())


# What plans make of it


@dataclass
class At:
    """A time on a device's clock."""

    ms: float

    def seconds_since(self, other: At) -> float:
        return (self.ms - other.ms) / 1e3


class Simulated:
    """A model on one device whose calls take what they would on a GPU that waits for its launching.

    A layer computes for 1 ms forward and 2 backward, and takes 2 and 3 ms to launch by Python.
    """

    microbatches, forward, backward = 16, (1.0, 2.0), (2.0, 3.0)

    def __init__(self, runtime: Runtime) -> None:
        config = RoundPipeRunConfig(num_microbatch=self.microbatches)
        model = RoundPipe(mlp(), runtime=runtime, model_run_config=config)
        self.layers = range(len(model.model))
        self.planner = planner = model.engine.planner
        planner.pricing.on_host = False
        planner.launching = Launching(lambda _: frozenset(self.layers), may_choose=True)
        planner.records._launching = planner.launching
        planner.log._launch_of = planner.launching.decision
        self.size = CallSize.of([[torch.zeros(1, 4)]] * self.microbatches)
        self._runtime, self._now, self._graph_calls = runtime, 0.0, 0

    def costs(self, *, by_graphs: bool) -> list[LayerCost]:
        launches = {"forward_launch_ms": self.forward[1], "backward_launch_ms": self.backward[1]}
        replay_ms = REPLAY_LAUNCH_MS if by_graphs else None
        return [
            LayerCost(self.forward[0], self.backward[0], **launches, replay_launch_ms=replay_ms)
            for _ in self.layers
        ]

    def call(self) -> float:
        """Plan, run and measure a call; return how long it takes."""
        planner, config = self.planner, RoundPipeRunConfig()
        tasks = planner.tasks(config, "fused", self.size, input_grads=False)
        by_graphs = planner.launching.by_graphs
        self._graph_calls += by_graphs
        # Graphs are seen, captured and tried before they launch.
        work = GraphWork(
            is_awaited=self._graph_calls in (1, 2, 3),
            is_prepared=self._graph_calls in (4, 5, 6),
            is_replayed=self._graph_calls > 6,
        )
        (plan,) = planner.log.plans().values()
        priced = PricedPlan(
            plan, self.costs(by_graphs=work.is_replayed), mode="fused", microbatches=self.microbatches
        )
        took_ms = simulated_ms(priced, 1) + 500.0 * work.is_prepared
        if (times := planner.records.watch("fused", self.size, tasks, is_planned=config.is_planned)) is not None:
            work.is_measured = True
            self._measure(times, replayed=work.is_replayed)
            planner.records.take(times)
        self._runtime.num_calls += 1
        begun, self._now = self._now, self._now + took_ms / 1e3
        span = CallSpan(self._runtime.num_calls, begun - 1e-6, self._now)
        planner.note_over("fused", self.size, span, work, lambda: 0)
        return took_ms

    def _measure(self, times: LayerTimes, *, replayed: bool) -> None:
        """Python's launching is what devices seem to take, unless replays are ahead of it."""
        for name, passes in (("forward", self.forward), ("backward", self.backward)):
            interval = At(0.0), At(passes[0] if replayed else max(passes))
            for layer in self.layers:
                getattr(times, f"_{name}")[layer] = [
                    ("cpu:0/compute", interval) if name == "forward" else interval
                ]
            if replayed:
                graph = self.layers[:-1]
                times.replays._intervals[name, graph] = [(At(0.0), At(passes[0] * len(graph)))]
        if times.launches is not None:
            for layer in self.layers:
                times.launches._samples |= {
                    ("forward", layer): [self.forward[1]],
                    ("backward", layer): [self.backward[1]],
                }


@pytest.mark.later
def test_a_plan_promises_what_calls_take_when_graphs_launch_them(caplog: pytest.LogCaptureFixture) -> None:
    with Runtime("cpu:1") as runtime, caplog.at_level(logging.INFO, "rp_sched"):
        model = Simulated(runtime)
        eager = [model.call() for _ in range(14)]
        assert not model.planner.launching.by_graphs
        (before,) = model.planner.log.times()
        taken = [model.call() for _ in range(6)]
        in_use = model.planner._plan("fused", model.size)
        counted_ms = in_use.measured_ms
        taken += [model.call() for _ in range(2)]
        measured_ms = in_use.measured_ms
        taken += [model.call() for _ in range(15)]
        (after,) = model.planner.log.times()

    assert eager == pytest.approx([400.0] * 14)
    assert before.promised_ms == pytest.approx(400.0)
    # The head is Python's, and the device computes for longer than that.
    assert taken[-1] == pytest.approx(16 * 15)
    assert after.promised_ms == pytest.approx(taken[-1])
    assert after.launch is not None
    assert after.launch.reason == "calls took 240 ms by graphs and 400 ms without"
    # Calls that awaited graphs, captured and compared count nowhere.
    assert counted_ms is None
    assert measured_ms == pytest.approx(taken[-1])
    assert in_use.promised_ms(after.plan) == pytest.approx(taken[-1])
    assert len(caplog.messages) == 1


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What is kept for the next process is kept here."""
    monkeypatch.setenv("RP_ENGINE_CACHE", str(tmp_path))
    return tmp_path


def settled(runtime: Runtime) -> Simulated:
    """Calls that have settled for graphs."""
    model = Simulated(runtime)
    for _ in range(35):
        model.call()
    assert model.planner.launching.by_graphs
    return model


@pytest.mark.usefixtures("cache")
def test_the_next_process_begins_with_graphs_and_their_plan(caplog: pytest.LogCaptureFixture) -> None:
    with Runtime("cpu:1") as runtime:
        plans = settled(runtime).planner.log.plans()
    with Runtime("cpu:1") as runtime, caplog.at_level(logging.INFO, "rp_sched"):
        model, by_graphs, taken = Simulated(runtime), list[bool](), list[float]()
        for _ in range(20):
            taken.append(model.call())
            by_graphs.append(model.planner.launching.by_graphs)
            assert model.planner.log.plans() == plans
        (times,) = model.planner.log.times()

    assert all(by_graphs)
    # Graphs are awaited, captured and compared as in any process.
    assert taken[6:] == pytest.approx([240.0] * 14)
    assert times.launch is not None
    assert times.launch.reason == "calls took 240 ms by graphs and 400 ms without"
    assert [text.partition("launch ")[2] for text in caplog.messages] == [
        "graphs, since in an earlier process calls took 240 ms by graphs and 400 ms without"
    ]


@pytest.mark.usefixtures("cache")
def test_what_calls_under_a_users_plan_have_shown_is_kept_for_these_alone() -> None:
    own, shown = Plan(fused=range(5)), KeptLaunch(frozenset(range(4)), graphs_ms=240.0, eager_ms=400.0)
    with Runtime("cpu:1") as runtime:
        model = Simulated(runtime)
        model.planner._settled("fused", model.size, own).keep_launch(shown)
        under_ours = model.planner._settled("fused", model.size).launch()
        config = RoundPipeRunConfig(execute_plan=own)
        model.planner.tasks(config, "fused", model.size, input_grads=False)

    assert under_ours is None
    assert model.planner.launching.by_graphs


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("is_known", [True, False])
def test_calls_by_graphs_have_the_plan_of_an_earlier_process(is_known: bool) -> None:
    other = Plan((range(2),), range(2, 5), (range(2),))
    with Runtime("cpu:1") as runtime:
        model = Simulated(runtime)
        kept = model.planner._settled("fused", model.size)
        kept.keep_plan(KeptPlan(other), by_graphs=True)
        if is_known:
            kept.keep_launch(KeptLaunch(frozenset(range(4)), graphs_ms=240.0, eager_ms=400.0))
        plans: list[tuple[bool, Plan]] = []
        for _ in range(20):
            model.call()
            plans.append((model.planner.launching.by_graphs, *model.planner.log.plans().values()))

    first = next(number for number, (by_graphs, _) in enumerate(plans) if by_graphs)
    # Plans of calls that Python launches are none of theirs, and a choice counts from the next call on.
    assert all(plan != other for _, plan in plans[:first])
    assert plans[first + (not is_known)][1] == other
    assert (first == 0) is is_known


@pytest.mark.usefixtures("cache")
def test_what_an_earlier_process_measured_counts_only_if_calls_take_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Runtime("cpu:1") as runtime:
        settled(runtime)
    with Runtime("cpu:1") as runtime, caplog.at_level(logging.INFO, "rp_sched"):
        model = Simulated(runtime)
        # Layers compute for twice as long as then, so what launches them makes no difference.
        model.forward, model.backward = (2.0, 2.0), (4.0, 3.0)
        by_graphs: list[bool] = []
        for _ in range(60):
            model.call()
            by_graphs.append(model.planner.launching.by_graphs)
        (times,) = model.planner.log.times()

    assert by_graphs[0]
    assert not by_graphs[-1]
    assert times.launch is not None
    assert not times.launch.by_graphs
    assert [text.partition("launch ")[2] for text in caplog.messages][1:] == [
        "eager, since calls without graphs are to be timed first"
    ]


@pytest.mark.parametrize(("call_ms", "by_graphs"), [(100.0, False), (150.0, True)])
def test_that_python_was_as_fast_is_believed_if_calls_take_the_same(call_ms: float, by_graphs: bool) -> None:
    kept = Kept(KeptLaunch(frozenset(), graphs_ms=100.0, eager_ms=100.0))
    asking = Asking(timer(5.0, 5.0), is_timed=True, kept=kept)
    for _ in range(5):
        assert not asking.by_graphs()
        asking.calls(call_ms, replayed=False)
    assert asking.by_graphs() is by_graphs


def test_graphs_of_an_earlier_process_go_if_none_is_launched_in_this_one() -> None:
    asking = Asking(timer(5.0, 5.0), is_timed=True, kept=Kept(KeptLaunch(ALL - {3}, 50.0, 100.0)))
    asking.calls(*[100.0] * 31, replayed=False)
    assert asking.by_graphs()
    asking.calls(100.0, replayed=False)
    assert not asking.by_graphs()
    assert asking.reason() == "graphs launched nothing in 32 calls"


def test_graphs_of_an_earlier_process_that_are_no_faster_now_are_kept_no_longer() -> None:
    kept = Kept(KeptLaunch(ALL - {3}, graphs_ms=99.0, eager_ms=100.0))
    asking = Asking(timer(5.0, 5.0), is_timed=True, kept=kept)
    assert asking.by_graphs()
    asking.calls(*[99.0] * 5)
    assert not asking.by_graphs()
    assert kept.found == [KeptLaunch(frozenset(), graphs_ms=99.0, eager_ms=100.0)]


def test_layers_that_take_other_times_end_what_an_earlier_process_settled_for() -> None:
    asking = Asking(timer(5.0, 5.0), is_timed=True, kept=Kept(KeptLaunch(ALL - {3}, 50.0, 100.0)))
    assert asking.by_graphs()
    asking.timer.num_drifts += 1
    assert not asking.by_graphs()
    assert asking.reason() == "calls without graphs are to be timed first"


def test_calls_configured_to_have_graphs_end_what_an_earlier_process_settled_for() -> None:
    kept = Kept(KeptLaunch(frozenset(), graphs_ms=100.0, eager_ms=100.0))
    asking = Asking(timer(5.0, 5.0), is_timed=True, kept=kept)
    asking.choice.follow(LaunchQuestion(asking.tasks, lambda: ALL, lambda _: 0))
    asking.calls(*[50.0] * 5)

    assert not asking.by_graphs()
    assert asking.reason() == "calls without graphs are to be timed first"


@pytest.mark.usefixtures("cache")
def test_a_plan_of_graphs_stays_though_their_memory_counts_from_the_second_call_on() -> None:
    other, slower = Plan((range(2),), range(2, 5), (range(2),)), Plan((range(4),), range(4, 5), (range(4),))
    with Runtime("cpu:1") as runtime:
        model = Simulated(runtime)
        kept = model.planner._settled("fused", model.size)
        kept.keep_plan(KeptPlan(other, frozenset({slower})), by_graphs=True)
        kept.keep_launch(KeptLaunch(frozenset(range(4)), graphs_ms=240.0, eager_ms=400.0))
        plans, seen = list[Plan](), list[object]()
        for _ in range(3):
            model.call()
            in_use = model.planner._plan("fused", model.size)
            plans.append(*model.planner.log.plans().values())
            seen.append(set(in_use._replanner.slower))

    assert plans == [other] * 3
    assert seen == [{slower}] * 3


def test_graphs_are_tried_if_any_plan_has_room_for_them() -> None:
    size = CallSize.of([[torch.zeros(1, 4)]] * 8)
    with Runtime("cpu:1", device_memory_bytes=10**9) as runtime:
        planner = RoundPipe(mlp(), runtime=runtime).engine.planner
        whole, layers = [Task("FB", range(5), range(8), 0)], frozenset(range(2))
        planner.footprint.most_rows, planner.footprint.knows_peak = 8, True

        def missing(room: int, *, is_planned: bool = True) -> int:
            planner.pricing._device_bytes = lambda: room  # type: ignore[method-assign]
            found = planner._missing_bytes("fused", size, whole, layers, is_planned=is_planned)
            assert found is not None
            return found

        foreseen = planner.guesses.foreseen_bytes(1, whole, layers)
        assert missing(2 * foreseen) == 0
        assert missing(4 * foreseen // 5) == 0
        # A user's plan stays. In less, stages have room that a short search finds, but the slots of all have not;
        # in too little no layer fits with what its graphs take.
        assert missing(4 * foreseen // 5, is_planned=False) > foreseen // 5
        assert missing(foreseen // 2) > foreseen // 2
        assert missing(foreseen // 10) > foreseen // 2
