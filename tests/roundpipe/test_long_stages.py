"""What a stage of many layers holds on its device: no more than one of few, where activations are large."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from plain import assert_near, batch, gradients, single_layers, square_error, train_call, twin
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, doing_recompute, save_for_recompute
from rp_engine.execution.stage import stage
from rp_engine.runtime.lane import Lane
from rp_engine.settings.run_config import Grain
from rp_sched import Plan
from rp_transfer import Event
from torch import nn

MIB = 1 << 20


class Thing:
    """What a graph keeps."""


class Keeps(torch.autograd.Function):
    """Its graph keeps a thing."""

    made: list[weakref.ref[Thing]] = []  # noqa: RUF012  # one list for all layers

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.thing = Thing()
        Keeps.made.append(weakref.ref(ctx.thing))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        del ctx
        return grads[0]


class Watching(nn.Linear):
    """Notes how many graphs and inputs of layers before it are still there; recomputed, what its lane keeps."""

    runtime: Runtime
    graphs: list[int] = []  # noqa: RUF012  # these lists, too
    inputs: list[int] = []  # noqa: RUF012
    kept: list[int] = []  # noqa: RUF012
    came: list[weakref.ref[torch.Tensor]] = []  # noqa: RUF012

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if doing_recompute():
            self.kept.append(len(self.runtime.lanes[0].retainer))
        else:
            self.graphs.append(sum(thing() is not None for thing in Keeps.made))
            self.inputs.append(sum(tensor() is not None for tensor in self.came))
            self.came.append(weakref.ref(x))
        return Keeps.apply(super().forward(x))


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    for found in (Keeps.made, Watching.graphs, Watching.inputs, Watching.kept, Watching.came):
        found.clear()


def layers(depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Watching(4, 4) for _ in range(depth)), nn.Linear(4, 3))


def plan(depth: int, grain: Grain) -> Plan:
    backward = single_layers(0, depth)[::-1] if grain == "stage" else [range(depth)]
    return Plan([range(depth)], range(depth, depth + 1), backward)


def call(depth: int, grain: Grain) -> None:
    plain = layers(depth)
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plan(depth, grain), recompute_grain=grain)
    with Runtime("cpu:1") as runtime:
        Watching.runtime = runtime
        model, truth = RoundPipe(plain, runtime=runtime, model_run_config=config), twin(plain)
        x, labels = batch(2)
        model.forward_backward((x,), None, labels, square_error)
        train_call(truth, x, labels, microbatches=1)
        model.synchronize()
        assert_near(gradients(model.model), gradients(truth))


def test_a_forward_stage_holds_no_layers_graph_while_the_next_one_runs() -> None:
    call(6, "stage")
    assert Watching.graphs[:6] == [0] * 6


def test_a_forward_stage_holds_no_activations_but_those_between_two_layers() -> None:
    call(6, "stage")
    # What came for the layer before; in the first, what the stage was given.
    assert max(Watching.inputs[:6]) <= 1


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """The ends of parts after which workers looked how far ahead they are."""
    found: list[Event] = []
    pace = Lane.pace

    def counted(lane: Lane, done: Event) -> None:
        found.append(done)
        pace(lane, done)

    monkeypatch.setattr(Lane, "pace", counted)
    return found


def test_a_forward_stage_waits_for_its_device_between_layers_where_activations_are_large(
    monkeypatch: pytest.MonkeyPatch, paced: list[Event]
) -> None:
    call(6, "layer")
    between_tasks = len(paced)
    monkeypatch.setattr(stage, "_LARGE_BYTES", 1)
    call(6, "layer")
    # Between the layers of the forward stage, and of the backward stage.
    assert len(paced) - between_tasks == between_tasks + 5 + 5


class Masked(nn.Linear):
    """Hands a mask on beside its activations."""

    def forward(self, x: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x[0]) * x[1][:, :1], x[1]


class Ending(nn.Linear):
    """Takes the activations alone."""

    def forward(self, x: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return super().forward(x[0])


def test_what_passes_through_a_forward_stage_does_not_travel(
    monkeypatch: pytest.MonkeyPatch, paced: list[Event]
) -> None:
    # More than a row of activations, less than the mask.
    monkeypatch.setattr(stage, "_LARGE_BYTES", 1000)
    model = nn.Sequential(*(Masked(4, 4) for _ in range(6)), Ending(4, 3))
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plan(6, "stage"))
    with Runtime("cpu:1") as runtime:
        wrapped = RoundPipe(model, runtime=runtime, model_run_config=config)
        x, labels = batch(2)
        wrapped.forward_backward(((x, torch.ones(2, 1000)),), None, labels, square_error)
        wrapped.synchronize()
    # One for each task: F, FB and six of one layer; and one more in F, where the mask has arrived.
    assert len(paced) == 8 + 1


class Saving(nn.Linear):
    """Saves its input for the recomputation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not doing_recompute():
            save_for_recompute(x.detach())
        return super().forward(x)


def test_what_layers_save_for_their_recomputation_travels(
    monkeypatch: pytest.MonkeyPatch, paced: list[Event]
) -> None:
    monkeypatch.setattr(stage, "_LARGE_BYTES", 1)
    saving = nn.Sequential(*(Saving(4, 4) for _ in range(6)), nn.Linear(4, 3))
    # Recomputed whole: no activations leave but the last ones.
    whole = Plan((range(6),), range(6, 7), (range(6),))
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=whole)
    with Runtime("cpu:1") as runtime:
        model = RoundPipe(saving, runtime=runtime, model_run_config=config)
        x, labels = batch(2)
        model.forward_backward((x,), None, labels, square_error)
        model.synchronize()
    # One for each task, and between the layers of F.
    assert len(paced) == 3 + 5


def check_gradients(row: nn.Sequential, cut: Plan, grain: Grain, *, microbatches: int) -> None:
    config = RoundPipeRunConfig(num_microbatch=microbatches, execute_plan=cut, recompute_grain=grain)
    truth = twin(row)
    x, labels = batch(4)
    with Runtime("cpu:1") as runtime:
        model = RoundPipe(row, runtime=runtime, model_run_config=config)
        model.forward_backward((x,), None, labels, square_error)
        model.synchronize()
        train_call(truth, x, labels, microbatches=microbatches)
        assert_near(gradients(row), gradients(truth))


def test_what_arrived_is_kept_where_the_next_layers_gradients_are_views_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stage, "_LARGE_BYTES", 1)
    torch.manual_seed(0)
    # The gradient of what comes before `Unflatten` is a view of the gradient of what comes after it.
    shaped = nn.Sequential(
        nn.Linear(4, 4), nn.Linear(4, 4), nn.Unflatten(1, (2, 2)), nn.Flatten(), nn.Linear(4, 3)
    )
    check_gradients(shaped, Plan((range(3),), range(3, 5), (range(3),)), "layer", microbatches=2)


def test_a_backward_stage_lets_what_arrived_for_a_layer_go_where_it_is_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def most(depth: int) -> int:
        Watching.kept.clear()
        call(depth, "layer")
        # Those of the backward stage, after the comparisons in which the forward stage examines its layers; before
        # its first one there is what the forward stage left.
        return max(Watching.kept[1 - depth :])

    monkeypatch.setattr(stage, "_LARGE_BYTES", 1)
    assert most(12) == most(5)


class Spread(torch.autograd.Function):
    """The same numbers; its gradient may be sparse."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        del ctx
        return grads[0].to_dense()


class Spreading(nn.Linear):
    """What comes after it may return sparse gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Spread.apply(super().forward(x))


class Picking(nn.Module):
    """Picks rows; their gradient is sparse, made of the one that it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(torch.tensor([2, 0, 1, 0], device=x.device), x, sparse=True)


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("large", [1, stage._LARGE_BYTES])
def test_gradients_between_layers_may_be_sparse(monkeypatch: pytest.MonkeyPatch, grain: Grain, large: int) -> None:
    monkeypatch.setattr(stage, "_LARGE_BYTES", large)
    torch.manual_seed(0)
    picking = nn.Sequential(Spreading(4, 4), Spreading(4, 4), Picking(), nn.Linear(4, 3))
    check_gradients(picking, Plan((range(3),), range(3, 4), (range(3),)), grain, microbatches=1)


class Slow(nn.Module):
    """A layer that takes 20 ms of a GPU, and none of the host's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(40_000_000)
        return x * self.weight


@pytest.mark.cuda
def test_a_worker_does_not_run_ahead_of_its_gpu_with_large_activations() -> None:
    def peak(depth: int) -> int:
        config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plan(depth, "stage"))
        slow = nn.Sequential(*(Slow() for _ in range(depth + 1)))
        x = torch.ones(64, MIB // 4)
        with Runtime("cuda:0") as runtime:
            model = RoundPipe(slow, runtime=runtime, model_run_config=config)
            torch.cuda.reset_peak_memory_stats()
            model.forward_backward((x,), None, x, square_error)
            model.synchronize()
        return torch.cuda.max_memory_allocated()

    peak(4)
    assert peak(12) < peak(4) + 64 * MIB
