"""What calls take on a device: guesses, measurements, and what plans make of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
import torch
from plain import square_error
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from rp_engine.device.memory.call_size import CallSize, rows_of
from rp_engine.planning.adaptive import PlanInUse
from rp_engine.planning.footprint import Footprint, resident_bytes
from rp_engine.runtime.switch_interval import QuickSwitching
from rp_sched import LayerCost, Limits, Plan, Task
from rp_telemetry.layer_times import LayerTimes, ModelTimer
from rp_transfer import MemoryUse
from torch import nn

KB = 1 << 10


@pytest.fixture
def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def footprint(runtime: Runtime, layers: nn.Sequential) -> Footprint:
    return Footprint(RoundPipe(layers, runtime=runtime).engine.host.state.layers)


@pytest.mark.parametrize(
    ("parts", "rows"),
    [
        ([(torch.zeros(4, 7, dtype=torch.int64),), (torch.zeros(3, 7, dtype=torch.int64),)], 28),
        ([(torch.zeros(4, 7, 5), torch.zeros(4))], 28),
        ([({"x": torch.zeros(2, 3, 8, 8)},)], 48),
        ([("text", None, 3)], 1),
        ([(torch.zeros(0, 5),)], 1),
        ([(torch.zeros(()),)], 1),
    ],
)
def test_rows_are_those_of_the_largest_microbatch(parts: list[tuple[object, ...]], rows: int) -> None:
    assert rows_of(parts) == rows


def test_guesses_go_by_the_widths_of_weights_and_give_way_to_measurements(
    two: Runtime, layers: nn.Sequential
) -> None:
    found = footprint(two, layers)
    assert not found.is_measured
    assert [found.kept_bytes(layer, 10) for layer in range(3)] == [2 * 12 * 4 * 10, 0, 2 * 10 * 4 * 10]
    found.note_kept({0: 600, 1: 300}, rows=30)
    assert found.is_measured
    assert [found.kept_bytes(layer, 10) for layer in range(3)] == [200, 100, 0]


def test_what_is_kept_is_the_most_that_was_seen_and_small_news_are_none(
    two: Runtime, layers: nn.Sequential
) -> None:
    found = footprint(two, layers)
    found.note_kept({0: 1000}, rows=10)
    version = found.version
    found.note_kept({0: 1040}, rows=10)
    found.note_kept({0: 500}, rows=10)
    assert (found.version, found.kept_bytes(0, 10)) == (version, 1000)
    found.note_kept({0: 2000}, rows=10)
    assert found.version > version
    assert found.kept_bytes(0, 10) == 2000


def test_a_call_of_few_rows_says_little_of_many_and_the_other_way_round(
    two: Runtime, layers: nn.Sequential
) -> None:
    found = footprint(two, layers)
    # 400 bytes whatever the rows, and 2 for each.
    found.note_kept({0: 408}, rows=4)
    found.note_kept({0: 2400}, rows=1000)
    assert [found.kept_bytes(0, rows) for rows in (4, 500, 1000, 2000)] == [408, 1400, 2400, 4400]
    version = found.version
    found.note_kept({0: 1400}, rows=500)
    assert found.version == version
    found.note_kept({0: 2000}, rows=500)
    assert found.version > version
    assert found.kept_bytes(0, 500) >= 2000
    version = found.version
    found.note_kept({0: 2000}, rows=500)
    assert found.version == version


def test_a_layer_that_was_planned_before_measurements_is_planned_after_them(
    two: Runtime, layers: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = RoundPipe(layers, runtime=two).engine.planner
    largest = max(cost.weight_bytes + cost.gradient_bytes for cost in planner.records.costs("fused"))
    total = 2 * largest
    monkeypatch.setattr(two, "memory", lambda: (MemoryUse("cuda:0", 0, 0, total),))
    assert planner._new_plan("fused", CallSize(2, 1)).priced_plan().plan
    planner.footprint.note_kept({0: 0}, rows=1)
    planner.footprint.note_peak(3 * total, [], [])
    assert planner._new_plan("fused", CallSize(2, 1)).priced_plan().plan


def test_a_peak_counts_although_the_next_call_was_launched_before_this_one_was_over(
    two: Runtime, layers: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = RoundPipe(layers, runtime=two).engine.planner
    planner.pricing.on_host = False
    planner.pricing.sees_memory = True
    peak = 0
    monkeypatch.setattr(two, "memory", lambda: (MemoryUse("cuda:0", 0, peak, 100_000),))
    size = CallSize(microbatches=1, rows=4)
    tasks = [Task("FB", range(0, 3), range(1), 0)]
    first, second = (planner.records.watch("fused", size, tasks, is_planned=True) for _ in range(2))
    assert first is not None
    assert second is not None
    first.keep(0, 40)

    def budget() -> int:
        return planner.pricing._budget(planner.guesses.costs(4), 4, is_known=True)

    cautious = budget()
    planner.footprint.note_kept(first.kept, 4)
    # What layers work in is not known yet.
    assert budget() == cautious
    peak = 20_000
    planner.records.take(first)
    resident = resident_bytes(tasks, planner.guesses.costs(4))
    assert planner.footprint.working_at(4) == peak - resident
    assert budget() == 95_000 - planner.footprint.working_at(4)


def test_a_call_leaves_what_it_is_not_foreseen_to_take_once_a_peak_is_known(
    two: Runtime, layers: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = RoundPipe(layers, runtime=two).engine.planner
    monkeypatch.setattr(two, "memory", lambda: (MemoryUse("cuda:0", 0, 0, 100_000),))
    monkeypatch.setattr(ModelTimer, "is_watching", lambda _: False)
    size = CallSize(microbatches=1, rows=4)

    def spare() -> int:
        planner.tasks(RoundPipeRunConfig(), "fused", size, input_grads=False)
        return planner.records.spare_bytes

    assert spare() == 0
    planner.footprint.note_kept({0: 40}, rows=4)
    assert spare() == 0
    planner.footprint.note_peak(20_000, [], [])
    assert spare() == 95_000 - (planner.records.predicted_bytes or 0) > 0
    planner.footprint.note_peak(200_000, [], [])
    assert spare() == 0


def test_there_is_room_for_leaving_gradients_from_the_first_call_after_a_measured_one(
    two: Runtime, layers: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = RoundPipe(layers, runtime=two).engine.planner
    planner.pricing.on_host = False
    planner.pricing.sees_memory = True
    peak = 0
    monkeypatch.setattr(two, "memory", lambda: (MemoryUse("cuda:0", 0, peak, 100_000),))
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=Plan(fused=range(0, 3)))
    size = CallSize(microbatches=1, rows=4)

    def launch() -> tuple[int, LayerTimes]:
        tasks = planner.tasks(config, "fused", size, input_grads=False)
        times = planner.records.watch("fused", size, tasks, is_planned=config.is_planned)
        assert times is not None, "calls with a user's plan are measured, too"
        times.keep(0, 40)
        return planner.records.spare_bytes, times

    spare, times = launch()
    assert spare == 0
    peak = 20_000
    planner.records.take(times)
    workspace = planner.footprint.working_at(4)
    spare, times = launch()
    assert spare == 95_000 - (planner.records.predicted_bytes or 0) > 0
    # Gradients that were leaving explain a higher peak, as far as they had room.
    peak = 90_000
    planner.records.take(times)
    assert planner.footprint.working_at(4) == workspace
    _, times = launch()
    peak = 99_000
    planner.records.take(times)
    assert planner.footprint.working_at(4) > workspace


def test_a_task_that_is_new_leaves_no_room_while_calls_are_measured(
    two: Runtime, layers: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = RoundPipe(layers, runtime=two).engine.planner
    planner.pricing.on_host = False
    planner.pricing.sees_memory = True
    monkeypatch.setattr(two, "memory", lambda: (MemoryUse("cuda:0", 0, 0, 100_000),))
    planner.footprint.note_kept({0: 40}, rows=4)
    planner.footprint.note_peak(20_000, [], [])
    spare: list[int] = []
    for plan in (
        Plan(fused=range(0, 3)),
        Plan(fused=range(0, 3)),
        Plan(fused=range(1, 3), backward=[range(0, 1)], forward=[range(0, 1)]),
    ):
        config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plan)
        size = CallSize(microbatches=1, rows=4)
        tasks = planner.tasks(config, "fused", size, input_grads=False)
        spare.append(planner.records.spare_bytes)
        times = planner.records.watch("fused", size, tasks, is_planned=config.is_planned)
        assert times is not None
        planner.records.take(times)
    assert [room > 0 for room in spare] == [False, True, False]


def test_what_layers_work_in_is_what_a_peak_has_beside_what_is_known(two: Runtime, layers: nn.Sequential) -> None:
    found = footprint(two, layers)
    costs = [LayerCost(1, weight_bytes=100, kept_bytes=50)] * 3
    tasks = [Task("FB", range(0, 3), range(2), 0)]
    # Weights, gradients in 32 bits, and the next call's weights, which come when nothing is kept any more.
    assert resident_bytes(tasks, costs) == 300 + 600 + 300
    found.note_peak(1850, tasks, costs)
    assert found.working_at(1) == 650
    version = found.version
    found.note_peak(1800, tasks, costs)
    assert (found.version, found.working_at(1)) == (version, 650)


def test_a_device_has_a_task_and_the_weights_of_its_next_one() -> None:
    costs = [LayerCost(1, weight_bytes=weight) for weight in (100, 10, 1)]
    large, middle, small = (Task("F", range(i, i + 1), range(1), device) for i, device in ((0, 0), (1, 1), (2, 0)))
    assert resident_bytes([large], costs) == 100 + 100
    # The first task of the next call may go to either device.
    assert resident_bytes([large, middle, small], costs) == 10 + 100
    assert resident_bytes([middle, large, small], costs) == 10 + 100
    assert resident_bytes([small, large], costs) == 1 + 100
    assert resident_bytes([], costs) == 0


def test_weights_that_are_fetched_ahead_lie_beside_what_later_microbatches_keep() -> None:
    costs = [LayerCost(1, weight_bytes=100, kept_bytes=1000)] * 2
    fused, backward = range(1, 2), range(0, 1)

    def resident(microbatches: range) -> int:
        tasks = [Task("FB", fused, microbatches, 0), Task("B", backward, microbatches, 0)]
        return resident_bytes(tasks, costs)

    # In either task, with the weights of the next one.
    assert resident(range(2)) == 100 + 200 + 1000 + 100
    # A task of one microbatch keeps nothing any more when they come.
    assert resident(range(1)) == 100 + 200 + 1000
    # Two devices: neither has a task of this call after its own, and the next call begins after all losses.
    apart = [Task("FB", range(2), range(2), 0), Task("FB", range(2), range(2, 4), 1)]
    assert resident_bytes(apart, costs) == 200 + 400 + 2000


def test_fewer_rows_work_in_what_they_were_seen_to_after_more_rows_were_measured(
    two: Runtime, layers: nn.Sequential
) -> None:
    found = footprint(two, layers)
    costs = [LayerCost(1, weight_bytes=100)] * 3
    tasks = [Task("F", range(0, 3), range(2), 0)]
    assert found.working_at(10) == 0
    for rows, nbytes in ((10, 50), (40, 110)):
        found.note_peak(600 + nbytes, tasks, costs, rows)
    assert [found.working_at(rows) for rows in (5, 10, 20, 40, 80)] == [50, 50, 70, 110, 220]
    # More than was thought: for more rows, too.
    found.note_peak(600 + 120, tasks, costs, 20)
    assert [found.working_at(rows) for rows in (10, 20, 40)] == [50, 120, 120]
    # More rows have worked in less than fewer did.
    found.note_peak(600 + 100, tasks, costs, 50)
    assert [found.working_at(rows) for rows in (10, 20, 40, 50, 100)] == [50, 120, 120, 120, 240]


def test_fewer_rows_than_were_measured_work_in_less_but_not_less_than_weights_need(
    two: Runtime, layers: nn.Sequential
) -> None:
    found = footprint(two, layers)
    costs = [LayerCost(1, weight_bytes=100)] * 3
    found.note_peak(600 + 1000, [Task("F", range(0, 3), range(2), 0)], costs, 40)
    # The largest layer's 40 numbers, once more and as gradients.
    constant = 40 * 4 * 2
    assert [found.working_at(rows) for rows in (1, 20, 40)] == [constant + 680 // 40, constant + 340, 1000]


@pytest.mark.parametrize(("power", "least"), [(1, 1.0), (2, 1.0), (0.5, 0.98)])
def test_however_many_rows_are_measured_what_each_works_in_is_foreseen(
    two: Runtime, layers: nn.Sequential, power: float, least: float
) -> None:
    found = footprint(two, layers)
    costs = [LayerCost(1, weight_bytes=100)] * 3
    tasks = [Task("F", range(0, 3), range(2), 0)]
    measured = {rows: int(1000 + 100 * rows**power) for rows in range(1, 40)}
    for rows, nbytes in measured.items():
        found.note_peak(600 + nbytes, tasks, costs, rows)
    # Eight points are kept. Only where workspace grows slower than rows is a line between two of them too low.
    assert all(least * nbytes <= found.working_at(rows) <= 1.5 * nbytes for rows, nbytes in measured.items())
    assert found.working_at(1) == measured[1]
    assert found.working_at(39) == measured[39]


def plan_for(room: int, kept: int) -> PlanInUse:
    costs = [LayerCost(1.0, weight_bytes=10 * KB, kept_bytes=kept)] * 12
    limits = Limits(device_memory_bytes=room)
    return PlanInUse(ModelTimer("m", 12), costs, limits, devices=1, microbatches=8, mode="fused")


def test_the_whole_model_is_fused_where_there_is_room_and_as_much_as_fits_elsewhere() -> None:
    # 12 layers: weights 120 KB, gradients 240 KB, the next call's weights 120 KB.
    assert plan_for(480 * KB, 0).priced_plan().plan.fused == range(12)
    assert plan_for(600 * KB, 10 * KB).priced_plan().plan.fused == range(12)
    tight = plan_for(479 * KB, 0).priced_plan().plan.fused
    assert tight is not None
    assert 0 < tight.start <= 3
    tighter = plan_for(300 * KB, 10 * KB).priced_plan().plan.fused
    assert tighter is not None
    assert tight.start < tighter.start


def test_slots_and_pools_of_graphs_stay_while_every_task_runs(two: Runtime, layers: nn.Sequential) -> None:
    equal = [LayerCost(1, weight_bytes=10, kept_bytes=3, replay_launch_ms=0.0)] * 2
    whole, streamed = [range(2)], [range(1), range(1, 2)]

    def resident(costs: Sequence[LayerCost], spans: Sequence[range]) -> int:
        *first, last = spans
        tasks = [*(Task("F", span, range(4), 0) for span in first), Task("FB", last, range(4), 0)]
        return resident_bytes(tasks, costs)

    # Weights and sums, a pool, what copies of sums take beyond activations, and the next call's weights.
    assert resident(equal, whole) == 2 * (10 + 20) + 2 * 3 + 2 * (20 - 3) + 20
    assert resident(equal, streamed) == (10 + 20) + 3 + (20 - 3) + 10
    # Layouts have slots of their own, also while the other's task runs.
    other = [LayerCost(1, weight_bytes=40, kept_bytes=3, replay_launch_ms=0.0), equal[0]]
    assert resident(other, streamed) == (40 + 80) + (10 + 20) + 3 + (20 - 3) + 40
    # Codes of all layers with graphs stay.
    found = footprint(two, layers)
    before = found.graph_bytes(equal, 4)
    found.note_codes({0: 7, 1: 8})
    assert found.graph_bytes(equal, 4) == before + 15


@pytest.mark.parametrize("room", [480 * KB, 1200 * KB])
def test_what_graphs_take_of_a_device_changes_the_plan_only_if_it_does_not_fit(room: int) -> None:
    plan = plan_for(room, 0)
    before = plan.priced_plan().plan
    assert before.fused == range(12)
    costs = [LayerCost(1.0, weight_bytes=10 * KB, replay_launch_ms=0.02)] * 12
    plan.reprice(costs, Limits(device_memory_bytes=room))

    after = plan.priced_plan().plan
    assert (after == before) is (room == 1200 * KB)
    assert after == before or (after.fused or range(0)).start > 0


def test_python_hands_its_lock_on_quickly_while_a_runtime_is_open() -> None:
    before = sys.getswitchinterval()
    with Runtime("cpu:1"):
        with Runtime("cpu:1"):
            assert sys.getswitchinterval() < before
        assert sys.getswitchinterval() < before
    assert sys.getswitchinterval() == before


def test_nothing_is_foreseen_on_cpu_devices(two: Runtime, layers: nn.Sequential) -> None:
    model = RoundPipe(layers, runtime=two)
    model.forward_backward((torch.ones(4, 4),), None, torch.ones(4, 2), square_error)
    model.synchronize()
    assert model.memory_report().predicted_bytes is None


@pytest.mark.cuda
def test_a_gpus_peak_is_foreseen_after_the_first_call() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(
        *(nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(6))
    )
    with Runtime("cuda:0") as runtime:
        torch.cuda.reset_peak_memory_stats(0)
        config = RoundPipeRunConfig(num_microbatch=2)
        model = RoundPipe(layers.bfloat16(), torch.float32, runtime=runtime, model_run_config=config)
        x = torch.ones(32768, 1024, dtype=torch.bfloat16)
        for _ in range(4):
            model.forward_backward(
                (x,), None, x, lambda outputs, labels: (outputs - labels).float().square().mean()
            )
            model.synchronize()
        report = model.memory_report()
    assert report.predicted_bytes == pytest.approx(report.devices[0].peak_bytes, rel=0.1)


def test_whatever_the_switch_interval_is_it_comes_back_whole() -> None:
    before = sys.getswitchinterval()
    try:
        for microseconds in range(1, 400):
            sys.setswitchinterval((microseconds + 0.5) * 1e-6)
            found = sys.getswitchinterval()
            switching = QuickSwitching()
            switching.hold()
            switching.release()
            assert sys.getswitchinterval() == found
    finally:
        sys.setswitchinterval(before + 5e-7)
