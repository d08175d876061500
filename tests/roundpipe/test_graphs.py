"""`launch="graphs"`: microbatches are replays, with the bits of runs by Python."""

from __future__ import annotations

import copy
import gc
import logging
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from roundpipe import ImpureLayer, RoundPipe, RoundPipeRunConfig, Runtime
from roundpipe.optim import AdamW
from rp_engine.device.memory import graph_store
from rp_engine.execution.graphs import task_graphs
from rp_engine.execution.graphs.layer_graphs import LayerGraphs
from rp_engine.execution.graphs.replay_steps import divided
from rp_engine.execution.stage import backpropagation
from rp_engine.execution.stage.layer_runs import LayerRuns
from rp_sched import Plan
from torch import nn
from torch.nn import functional

LAYERS, MICROBATCHES = 6, 5
PLANS = {
    "all fused": Plan(fused=range(LAYERS)),
    "two stages": Plan([range(3)], range(3, LAYERS), [range(3)]),
    "other stages back": Plan([range(4)], range(4, LAYERS), [range(2, 4), range(2)]),
    "a layer a stage": Plan(
        [range(layer, layer + 1) for layer in range(5)],
        range(5, LAYERS),
        [range(layer, layer + 1) for layer in reversed(range(5))],
    ),
}


# For what takes long, and says nothing new on one device or on four.
on_few_devices = pytest.mark.parametrize(
    "devices", ["cpu:2", pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True
)


class Residual(nn.Module):
    """Some operations, one of them in place."""

    def __init__(self, dropout: float = 0.0, hidden: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, hidden), nn.Linear(hidden, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu_(self.up(self.norm(x)))))


class ReadsOnHost(Residual):
    """Cannot be captured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum().item() < 1e9 else x * 2)


class Scaled(Residual):
    """Reads a number that no module holds."""

    scales: ClassVar[list[float]] = [1.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scales[0]


class WithBuffer(Residual):
    """Is not captured, as nobody knows what it would do to its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Expands(ReadsOnHost):
    """Returns a tensor whose elements share memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, :1].expand(-1, 8)


class Caches(Residual):
    """Keeps a tensor that no module registers."""

    cached: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cached is None:
            self.cached = torch.arange(8.0, device=x.device)
        return super().forward(x) + self.cached


class WithMask(nn.Module):
    """Passes a tensor on beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual()

    def forward(self, given: Any) -> Any:
        x, mask = given if isinstance(given, tuple) else (given, torch.ones_like(given[:, :1]))
        return self.inner(x) * mask, mask


class Carries(nn.Module):
    """Hands on a tensor that needs a gradient beside its output: `makes` it, hands it on, or `ends` it."""

    def __init__(self, *, makes: bool = False, ends: bool = False) -> None:
        super().__init__()
        self.inner, self.makes, self.ends = Residual(), makes, ends

    def forward(self, given: Any) -> Any:
        x, kept = (given, given * 2) if self.makes else given
        x = self.inner(x) + kept
        return x * kept if self.ends else (x, kept)


class Last(nn.Module):
    """Ends a row of `WithMask`."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, given: Any) -> torch.Tensor:
        return self.head(given[0] if isinstance(given, tuple) else given)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """The layers of each replay, as they happen."""
    # A call that measures layers replays nothing, and times of a busy machine may drift until the last one.
    monkeypatch.setattr("rp_telemetry.layer_times._DRIFT", math.inf)
    found: list[range] = []
    plain = LayerGraphs.replay

    def replay(self: LayerGraphs, *args: Any) -> Any:
        found.append(self.layers)
        return plain(self, *args)

    monkeypatch.setattr(LayerGraphs, "replay", replay)
    return found


def row(*inner: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(inner or [Residual() for _ in range(LAYERS - 1)]), Last())


def num_measured(runtime: Runtime) -> int:
    """How many calls at first are measured, and thus not replayed: on a GPU also those with a given plan."""
    return 9 if runtime.lanes[0].device.name.startswith("cuda") else 0


def summed_loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.float(), label, reduction="sum")


def trained(
    runtime: Runtime,
    layers: nn.Sequential,
    launch: str,
    plan: Plan | None = None,
    *,
    rows: Callable[[int], int] = lambda _: 2 * MICROBATCHES,
    steps: int = 9,
    before: Callable[[int], None] = lambda _: None,
    beside: Callable[[int, RoundPipe], None] = lambda *_: None,
    is_compiled: bool = False,
    microbatches: int = MICROBATCHES,
) -> list[torch.Tensor]:
    """Losses, gradients, outputs of an evaluation, and what is trained at last."""
    steps += num_measured(runtime)
    layers = copy.deepcopy(layers)
    config = RoundPipeRunConfig(num_microbatch=microbatches, launch=launch, execute_plan=plan)
    how = {"model_run_config": config, "optim_dtype": torch.float32, "compile_layers": is_compiled}
    model = RoundPipe(layers, runtime=runtime, **how)
    optimizer = AdamW(model.optim_parameters(), lr=1e-2)
    dtype, found = next(layers.parameters()).dtype, []

    def update() -> None:
        found.extend(parameter.grad.clone() for parameter in model.optim_parameters())
        optimizer.step()
        optimizer.zero_grad()

    for step in range(steps):
        before(step)
        beside(step, model)
        torch.manual_seed(step)
        x, label = torch.randn(rows(step), 8, dtype=dtype), torch.randint(3, (rows(step),))
        found.append(model.forward_backward((x,), label=label, loss_fn=summed_loss).detach())
        model.step(update, is_async=False)
    model.eval()
    with torch.no_grad():
        found += [model(torch.ones(rows(0), 8, dtype=dtype)) for _ in range(4)]
    model.synchronize()
    return found + [parameter.detach().clone() for parameter in layers.parameters()]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"tensor {number} differs by {(one - other).abs().max()}"


@pytest.fixture
def graphs_runtime(devices: str) -> Iterator[Runtime]:
    with Runtime(devices) as opened:
        yield opened


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replays_have_the_bits_of_runs_by_python(
    graphs_runtime: Runtime, plan: str, dtype: torch.dtype, replays: list[range]
) -> None:
    layers = row().to(dtype)
    expected = trained(graphs_runtime, layers, "eager", PLANS[plan], steps=20)
    assert not replays
    assert_same(trained(graphs_runtime, layers, "graphs", PLANS[plan], steps=20), expected)
    # Of training; the loss function reads what the last one returns.
    assert {layer for span in replays for layer in span} >= set(range(LAYERS - 1))


def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer has a graph of its own, and its gradients leave when they are complete."""
    monkeypatch.setattr(task_graphs, "SEGMENT_BYTES", 0)
    monkeypatch.setattr(backpropagation, "_DEPARTURE_BYTES", 0)


@pytest.mark.later
@on_few_devices
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("microbatches", [1, MICROBATCHES])
def test_weights_arrive_and_gradients_leave_between_graphs(
    runtime: Runtime, plan: str, microbatches: int, monkeypatch: pytest.MonkeyPatch, replays: list[range]
) -> None:
    small_pieces(monkeypatch)
    layers = row(Carries(makes=True), Carries(), Carries(), Carries(ends=True), Residual())
    expected = trained(runtime, layers, "eager", PLANS[plan], steps=12, microbatches=microbatches)
    assert not replays
    found = trained(runtime, layers, "graphs", PLANS[plan], steps=12, microbatches=microbatches)
    assert_same(found, expected)
    assert len(replays) > 3


@pytest.mark.later
@pytest.mark.usefixtures("replays")
def test_python_runs_no_layer_once_graphs_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    monkeypatch.setattr(task_graphs, "_TRIED_AGAIN", 100)
    ran: list[int] = []
    plain = LayerRuns.run

    def run(self: LayerRuns, layer: int, microbatch: int, tree: Any, *, recomputes: bool) -> Any:
        ran.append(layer)
        return plain(self, layer, microbatch, tree, recomputes=recomputes)

    monkeypatch.setattr(LayerRuns, "run", run)
    of_steps: list[list[int]] = []
    with Runtime("cpu:1") as runtime:

        def before(_: int) -> None:
            of_steps.append(ran.copy())
            ran.clear()

        trained(runtime, row(), "graphs", PLANS["two stages"], steps=14, before=before)
    # The loss function reads what the last one returns.
    of_python = [set(each) for each in of_steps[1:]]
    assert of_python[-8:] == [{LAYERS - 1}] * 8


def test_layers_that_share_weights_lie_in_one_segment() -> None:
    first, shared, last = (Residual() for _ in range(3))
    with Runtime("cpu:1") as runtime:
        model = RoundPipe(nn.Sequential(first, shared, nn.ReLU(), shared, last), runtime=runtime)
        blocks = [layer.blocks for layer in model.engine.host.state.layers]
    assert divided(range(5), blocks.__getitem__, 0) == [range(1), range(1, 4), range(4, 5)]
    assert divided(range(1, 5), blocks.__getitem__, 1 << 30) == [range(1, 5)]


@pytest.mark.slow
@on_few_devices
@pytest.mark.parametrize("plan", PLANS)
def test_evaluations_between_steps_have_graphs_of_their_own(graphs_runtime: Runtime, plan: str) -> None:
    def run(launch: str) -> list[torch.Tensor]:
        def evaluate(_: int, model: RoundPipe) -> None:
            with torch.no_grad():
                found.extend(model(torch.ones(2 * MICROBATCHES, 8)) for _ in range(3))

        found: list[torch.Tensor] = []
        return trained(graphs_runtime, row(), launch, PLANS[plan], beside=evaluate) + found

    assert_same(run("graphs"), run("eager"))


@pytest.mark.slow
@on_few_devices
@pytest.mark.parametrize("plan", PLANS)
def test_what_passes_a_layer_by_is_passed_on(runtime: Runtime, plan: str, replays: list[range]) -> None:
    layers = row(*(WithMask() for _ in range(LAYERS - 1)))
    expected = trained(runtime, layers, "eager", PLANS[plan])
    assert_same(trained(runtime, layers, "graphs", PLANS[plan]), expected)
    assert len(replays) > 5


@pytest.mark.later
@on_few_devices
def test_several_shapes_have_graphs_each(runtime: Runtime, replays: list[range]) -> None:
    def rows(step: int) -> int:
        return MICROBATCHES * (1 + step % 2)

    plan = PLANS["all fused"]
    # A call runs on the device that is free first, and each device has graphs of its own.
    expected = trained(runtime, row(), "eager", plan, rows=rows, steps=40)
    assert_same(trained(runtime, row(), "graphs", plan, rows=rows, steps=40), expected)
    assert replays


@pytest.mark.later
def test_layers_that_cannot_be_captured_run_as_they_are(
    runtime: Runtime, replays: list[range], caplog: pytest.LogCaptureFixture
) -> None:
    layers = row(Residual(), ReadsOnHost(), Residual(), Residual(), Residual())
    plan = PLANS["all fused"]
    expected = trained(runtime, layers, "eager", plan, steps=30)
    with caplog.at_level(logging.INFO, "rp_engine"):
        assert_same(trained(runtime, layers, "graphs", plan, steps=30), expected)
    # The last one in evaluations only; in training the loss function reads what it returns.
    assert {layer for span in replays for layer in span} - {LAYERS - 1} == {0, 2, 3, 4}
    told = [record.getMessage() for record in caplog.records if "run without graphs" in record.getMessage()]
    assert len(told) == 1
    assert "reads values of the device on the host" in told[0]


@pytest.mark.later
@on_few_devices
def test_inputs_that_share_memory_and_cached_tensors_are_no_trouble(
    runtime: Runtime, replays: list[range]
) -> None:
    layers, plan = row(Residual(), Expands(), Residual(), Caches(), Residual()), PLANS["all fused"]
    expected = trained(runtime, layers, "eager", plan, steps=30)
    assert_same(trained(runtime, layers, "graphs", plan, steps=30), expected)
    assert {layer for span in replays for layer in span} >= {0, 3, 4}


@pytest.mark.slow
def test_what_python_decides_anew_is_found_before_a_graph_is_used(runtime: Runtime, replays: list[range]) -> None:
    layers, plan = row(*(Scaled() for _ in range(LAYERS - 1))), PLANS["all fused"]

    def change(step: int) -> None:
        # As a step is captured with, and then as it is tried.
        Scaled.scales[0] = 1.0 + step / 100

    expected = trained(runtime, layers, "eager", plan, before=change)
    assert_same(trained(runtime, layers, "graphs", plan, before=change), expected)
    # Each was tried once on each device, and never used; but in evaluations, for which nothing changes.
    of_training = [span for span in replays if LAYERS - 1 not in span]
    assert len(of_training) <= len(set(of_training)) * len(runtime.memory())


@pytest.mark.later
def test_what_python_decides_anew_later_is_told(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scaled, "scales", [1.0])

    def change(step: int) -> None:
        # When each device has graphs.
        Scaled.scales[0] = 1.0 if step < 20 else 2.0

    layers = row(*(Scaled() for _ in range(LAYERS - 1)))
    with pytest.raises(ImpureLayer, match="a replay of layers 0 to 4 gives something else"):
        trained(runtime, layers, "graphs", PLANS["all fused"], before=change, steps=60)


@pytest.mark.slow
def test_graphs_that_are_not_used_for_a_while_are_freed(
    monkeypatch: pytest.MonkeyPatch, replays: list[range]
) -> None:
    closed: list[range] = []
    plain = LayerGraphs.close

    def close(self: LayerGraphs) -> None:
        closed.append(self.layers)
        plain(self)

    monkeypatch.setattr(LayerGraphs, "close", close)
    monkeypatch.setattr(graph_store, "_UNUSED", 2)

    def rows(step: int) -> int:
        return MICROBATCHES * (1 if step < 6 else 2 if step < 10 else 3)

    with Runtime("cpu:1") as runtime:
        expected = trained(runtime, row(), "eager", PLANS["all fused"], rows=rows, steps=14)
        assert_same(trained(runtime, row(), "graphs", PLANS["all fused"], rows=rows, steps=14), expected)
    # Those of the first shape and of the second, each after three calls without.
    assert closed == [range(LAYERS - 1)] * 2
    assert len(replays) > 20


@pytest.mark.few(1)
@pytest.mark.parametrize(("plan", "layers"), [("all fused", 5), ("two stages", 3), ("a layer a stage", 1)])
def test_weights_of_all_stages_lie_in_the_slots_of_the_largest(
    plan: str, layers: int, replays: list[range]
) -> None:
    found: list[int] = []

    def look(_: int, model: RoundPipe) -> None:
        (twins,) = model.engine._runs._twins
        found.append(sum(slot.nbytes for slot in twins.graphs.slots.values()))

    with Runtime("cpu:1") as runtime:
        layers_of_model = row()
        trained(runtime, layers_of_model, "graphs", PLANS[plan], beside=look)
    assert {layer for span in replays for layer in span} >= set(range(LAYERS - 1))
    # Weights and sums of gradients, both in 32 bits.
    weights = sum(parameter.nbytes for parameter in layers_of_model[0].parameters())
    assert found[-1] == layers * 2 * weights


@pytest.mark.later
def test_graphs_at_other_places_of_other_plans_share_no_pool(replays: list[range]) -> None:
    """What is captured as a task's first graphs is not replayed as its second ones under another plan."""
    # The second ones have slots of their own, which are the same under both.
    layers = row(Residual(), Residual(), WithBuffer(), Residual(hidden=12), Residual(hidden=12))
    plans = Plan([range(2)], range(2, LAYERS), [range(2)]), Plan(fused=range(LAYERS))
    models: list[RoundPipe] = []

    def turn(step: int, model: RoundPipe) -> None:
        models.append(model)
        launch = model.model_run_config.launch
        model.model_run_config = RoundPipeRunConfig(
            num_microbatch=MICROBATCHES, launch=launch, execute_plan=plans[step > 5]
        )

    with Runtime("cpu:1") as runtime:
        expected = trained(runtime, layers, "eager", steps=12, beside=turn)
        assert_same(trained(runtime, layers, "graphs", steps=12, beside=turn), expected)
        (twins,) = models[-1].engine._runs._twins
    own = [entry for entry in twins.graphs.entries.values() if entry.mode == "fused"]
    latest = [entry.place for entry in own if entry.last_call == max(one.last_call for one in own)]
    assert sorted(latest) == [0, 1]
    assert {range(2), range(3, 5)} <= set(replays)


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", ["all fused", "two stages"])
def test_sums_of_a_weight_that_python_met_before_lie_where_graphs_add_to_them(
    plan: str, replays: list[range]
) -> None:
    layers, in_training = row(WithBuffer(), Residual(), WithBuffer(), Residual(), WithBuffer()), set[range]()
    # The first layer's weight is that of the fourth one, too.
    layers[3].up.weight = layers[0].up.weight
    with Runtime("cpu:1") as runtime:
        expected = trained(runtime, layers, "eager", PLANS[plan], steps=12)
        beside = lambda *_: in_training.update(replays)  # noqa: E731
        found = trained(runtime, layers, "graphs", PLANS[plan], steps=12, beside=beside)
    # Additions to the weight come in another order.
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert range(3, 4) in in_training


@pytest.mark.later
@pytest.mark.usefixtures("replays")
def test_what_no_graph_reads_any_more_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_store, "_UNUSED", 4)
    found: list[tuple[int, int]] = []

    def turn(step: int, model: RoundPipe) -> None:
        plan = PLANS["all fused" if step < 6 else "a layer a stage"]
        model.model_run_config = RoundPipeRunConfig(
            num_microbatch=MICROBATCHES, launch="graphs", execute_plan=plan
        )
        (twins,) = model.engine._runs._twins
        slots = [slot for slot in twins.graphs.slots if slot.kind == "trainable"]
        found.append((len(slots), len(twins.graphs.pools)))

    with Runtime("cpu:1") as runtime:
        trained(runtime, row(), "graphs", steps=20, beside=turn)
        assert max(found) == (5, 1)
        assert found[-1] == (1, 1)
        # Nothing of layers that cannot be captured stays.
        layers = row(*(ReadsOnHost() for _ in range(5)))
        found.clear()
        trained(runtime, layers, "graphs", steps=20, beside=turn)
    assert found[-1] == (0, 0)


@pytest.mark.slow
def test_graphs_keep_nothing_of_the_call_that_captured_them(runtime: Runtime, replays: list[range]) -> None:
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, launch="graphs", execute_plan=PLANS["all fused"])
    model = RoundPipe(row(), runtime=runtime, model_run_config=config)
    label = torch.zeros(MICROBATCHES, dtype=torch.long)
    batches = [torch.zeros(MICROBATCHES, 8) for _ in range(40)]
    kept = [weakref.ref(batch) for batch in batches]
    while batches:
        model.forward_backward((batches.pop(),), label=label, loss_fn=summed_loss)
    model.synchronize()
    assert replays
    gc.collect()
    assert not [batch for batch in kept if batch() is not None]


@pytest.mark.slow
def test_layers_that_draw_on_the_host_run_as_they_are(runtime: Runtime) -> None:
    layers, plan = row(*(Residual(dropout=0.3) for _ in range(LAYERS - 1))), PLANS["two stages"]
    expected = trained(runtime, layers, "eager", plan)
    assert_same(trained(runtime, layers, "graphs", plan), expected)


@pytest.mark.later
@pytest.mark.parametrize("plan", PLANS)
def test_graphs_leave_draws_of_layers_beside_them_as_they_are(
    graphs_runtime: Runtime, plan: str, replays: list[range]
) -> None:
    layers = row(*(Residual(dropout=0.3 * (layer % 2)) for layer in range(LAYERS - 1)))
    expected = trained(graphs_runtime, layers, "eager", PLANS[plan], steps=12)
    assert_same(trained(graphs_runtime, layers, "graphs", PLANS[plan], steps=12), expected)
    assert replays or plan == "all fused"


@pytest.mark.cuda
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, id="compiled")])
def test_layers_draw_on_a_gpu_as_they_do_by_python(plan: str, is_compiled: bool, replays: list[range]) -> None:
    with Runtime("cuda:0") as runtime:
        layers = row(*(Residual(dropout=0.3) for _ in range(LAYERS - 1)))
        how: dict[str, Any] = {"steps": 20, "is_compiled": is_compiled}
        expected = trained(runtime, layers, "eager", PLANS[plan], **how)
        assert_same(trained(runtime, layers, "graphs", PLANS[plan], **how), expected)
        # Of training; the loss function reads what the last one returns.
    assert {layer for span in replays for layer in span} >= set(range(LAYERS - 1))


@pytest.mark.later
def test_memory_that_runs_out_in_a_trial_ends_graphs_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("too little")

    monkeypatch.setattr("rp_engine.execution.graphs.trial.sketch", out_of_memory)
    plan = PLANS["all fused"]
    with Runtime("cpu:1") as runtime, caplog.at_level(logging.INFO, "rp_engine"):
        expected = trained(runtime, row(), "eager", plan)
        assert_same(trained(runtime, row(), "graphs", plan), expected)
    assert "run without graphs from now on: device memory ran out" in caplog.text


@pytest.mark.later
def test_graphs_leave_the_memory_that_runs_by_python_take(
    runtime: Runtime, replays: list[range], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(runtime, row(), "eager", PLANS["all fused"])
    kind = type(runtime.lanes[0].device)
    monkeypatch.setattr(kind, "obtainable_bytes", lambda self: self.memory().used_bytes)
    with caplog.at_level(logging.INFO, "rp_engine"):
        assert_same(trained(runtime, row(), "graphs", PLANS["all fused"]), expected)
    assert not replays
    assert "of device memory are not free" in caplog.text


@pytest.mark.later
def test_graphs_that_were_compared_stay_while_memory_is_short(
    runtime: Runtime, replays: list[range], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, number = type(runtime.lanes[0].device), list[int]()
    plan = PLANS["all fused"]
    expected = trained(runtime, row(), "eager", plan, steps=40)

    def another_takes_all(step: int) -> None:
        number.append(len(replays))
        if step == 20:
            monkeypatch.setattr(kind, "obtainable_bytes", lambda self: self.memory().used_bytes)

    assert_same(trained(runtime, row(), "graphs", plan, before=another_takes_all, steps=40), expected)
    assert 0 < number[20] < number[30] < number[-1]


def test_another_launch_is_refused() -> None:
    with pytest.raises(ValueError, match="launch must be 'auto' or 'graphs' or 'eager', but is 'fast'"):
        RoundPipeRunConfig(launch="fast")
