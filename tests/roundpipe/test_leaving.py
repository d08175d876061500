"""Gradients that leave while the last backward goes on: in time, and never too soon."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from plain import Dammed, assert_near, batch, gradients, mlp, plans, square_error, train_call, twin
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from rp_engine.device.transfers import Delivery
from rp_engine.execution.run import Run
from rp_sched import Plan
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("small_departures")

PATIENCE_S = 30.0


class Gate(Dammed):
    """Its backward waits, the second time, until somebody opens."""

    opened = threading.Event()
    count = 0
    in_time = True

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        del ctx
        Gate.count += 1
        if Gate.count == 2:
            Gate.in_time = Gate.opened.wait(PATIENCE_S)
        return grads[0]


class Gated(nn.Linear):
    """The lowest layer: its backward is the last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Gate.apply(super().forward(x))


@pytest.mark.parametrize(("calls", "microbatches"), [(1, 2), (2, 1)])
def test_a_deep_layer_is_stepped_while_the_backward_of_a_shallow_one_goes_on(
    calls: int, microbatches: int
) -> None:
    Gate.opened.clear()
    Gate.count, Gate.in_time = 0, True
    layers = nn.Sequential(Gated(6, 6), nn.Tanh(), nn.Linear(6, 6))
    config = RoundPipeRunConfig(num_microbatch=microbatches, execute_plan=plans(3, 2)["all fused"])
    with Runtime("cpu:1") as runtime:
        model = RoundPipe(layers, runtime=runtime, model_run_config=config)
        deep = torch.optim.SGD(list(model.optim_parameters())[2:], lr=0.1)
        x = torch.ones(4, 6)
        for _ in range(calls):
            model.forward_backward((x,), None, x, square_error)

        def update() -> None:
            deep.step()
            Gate.opened.set()

        model.step(update)
        model.synchronize()
    assert Gate.count == 2
    assert Gate.in_time


@pytest.mark.parametrize("calls", [1, 2])
def test_gradients_leave_from_the_last_layer_to_the_first(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rp_engine.execution.stage.backpropagation._DEPARTURE_BYTES", 1)
    sent: list[str] = []
    send_to_host = Run.send_to_host

    def noted(self: Run, delivery: Delivery, where: str) -> None:
        sent.extend(str(block) for block, *_ in delivery.sums)
        send_to_host(self, delivery, where)

    monkeypatch.setattr(Run, "send_to_host", noted)
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    layers[3].weight = layers[0].weight
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plans(4, 2)["all fused"])
    x = torch.ones(4, 6)
    with Runtime("cpu:1") as runtime:
        model = RoundPipe(layers, runtime=runtime, model_run_config=config)
        for _ in range(calls):
            sent.clear()
            model.forward_backward((x,), None, x, square_error)
            model.synchronize()
    # The optimizer waits for the last layer's first.
    assert sent == ["layer 3", "layer 2", "layer 1", "layers 0, 3", "layer 0"]


class Remembering(nn.Module):
    """Uses a copy of its weight that the first microbatch made, as autocast's copies are."""

    # Nobody else reads it.
    scratch_attributes = ("made",)

    def __init__(self, *, at_once: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.at_once = at_once
        self.made: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_first = not self.made
        if is_first:
            self.made.append(self.weight.clone())
        return x * self.made[0] if self.at_once or not is_first else x


def remembering(*, at_once: bool) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), Remembering(at_once=at_once), nn.Linear(6, 6))


def call(runtime: Runtime, layers: nn.Module, microbatches: int = 2) -> RoundPipe:
    config = RoundPipeRunConfig(num_microbatch=microbatches, execute_plan=plans(3, 2)["all fused"])
    model = RoundPipe(layers, runtime=runtime, model_run_config=config)
    x = torch.ones(4, 6)
    model.forward_backward((x,), None, x, square_error)
    model.synchronize()
    return model


@pytest.mark.usefixtures("samples_first")
@pytest.mark.parametrize(("at_once", "microbatches"), [(True, 1), (False, 2)])
def test_what_an_earlier_microbatch_made_or_only_some_use_is_waited_for(at_once: bool, microbatches: int) -> None:
    layers = remembering(at_once=at_once)
    truth = twin(layers)
    with Runtime("cpu:1") as runtime:
        call(runtime, layers)
    x = torch.ones(4, 6)
    train_call(truth, x, x, microbatches=microbatches)
    assert_near(gradients(layers), gradients(truth), 1e-5)


class Twice(Remembering):
    """From the second microbatch on, a part of its gradient comes at once, and the rest too late."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.made:
            return super().forward(x)
        return checkpoint(self.again, x * self.made[0], use_reentrant=True)

    def again(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.mark.usefixtures("samples_first")
def test_a_gradient_that_comes_after_its_layer_has_left_is_an_error_not_a_wrong_number() -> None:
    layers = nn.Sequential(nn.Linear(6, 6), Twice(at_once=True), nn.Linear(6, 6))
    with Runtime("cpu:1") as runtime, pytest.raises(RuntimeError, match="got a gradient after the backward pass"):
        call(runtime, layers)


@pytest.mark.parametrize(("nbytes", "together"), [(1, [1, 1, 1]), (2 * 4 * (6 * 6 + 6), [2, 1]), (1 << 20, [3])])
def test_gradients_wait_for_each_other_up_to_a_size(
    nbytes: int, together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rp_engine.execution.stage.backpropagation._DEPARTURE_BYTES", nbytes)
    sent: list[int] = []
    send_to_host = Run.send_to_host

    def noted(self: Run, delivery: Delivery, where: str) -> None:
        sent.append(len(delivery.sums))
        send_to_host(self, delivery, where)

    monkeypatch.setattr(Run, "send_to_host", noted)
    with Runtime("cpu:1") as runtime:
        call(runtime, nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))))
    assert sent == together


class Noting(nn.Linear):
    """Notes that its backward was begun."""

    begun = threading.Semaphore(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        if found.requires_grad:
            found.register_hook(lambda _: Noting.begun.release())
        return found


@pytest.mark.usefixtures("samples_first")
@pytest.mark.parametrize("room", [0, 1 << 20])
def test_backward_goes_on_beside_gradients_that_cannot_leave_where_there_is_room(room: int) -> None:
    layers = nn.Sequential(Noting(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    one_each = [range(index, index + 1) for index in range(3)]
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=Plan(one_each[:2], one_each[2], one_each[1::-1]))
    released = threading.Event()
    x = torch.ones(4, 6)
    with Runtime("cpu:1") as runtime:
        model = RoundPipe(layers, runtime=runtime, model_run_config=config)
        # The first call of a process takes long.
        model.forward_backward((x,), None, x, square_error)
        model.synchronize()
        Noting.begun = threading.Semaphore(0)
        model.step(lambda: released.wait(PATIENCE_S))
        model.engine.planner.records.spare_bytes = room
        model.forward_backward((x,), None, x, square_error)
        # The step holds the gradients' turns: those of the fused stage stay, and perhaps hold the next stage up.
        went_on = Noting.begun.acquire(timeout=PATIENCE_S / 2 if room else 1.0)
        released.set()
        model.synchronize()
    assert went_on == bool(room)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5])
def test_numbers_are_those_of_plain_pytorch(runtime: Runtime, microbatches: int) -> None:
    layers = mlp()
    truth = twin(layers)
    x, y = batch(7)
    config = RoundPipeRunConfig(num_microbatch=microbatches)
    model = RoundPipe(layers, runtime=runtime, model_run_config=config)
    for _ in range(2):
        model.forward_backward((x,), None, y, square_error)
        train_call(truth, x, y, microbatches=1)
    model.synchronize()
    assert_near(gradients(layers), gradients(truth), 1e-4)
