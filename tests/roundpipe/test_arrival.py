"""A step takes each layer's gradients when they have come, and is one step all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import roundpipe
import torch
from plain import assert_near, batch, square_error, train_call, weights
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, StepFailed
from rp_sched import Plan
from torch import nn

pytestmark = pytest.mark.usefixtures("small_departures")

APART = Plan([range(0, 1), range(1, 2)], range(2, 3), [range(1, 2), range(0, 1)])
# What backward passes do, by the number of outputs of the layer; its own attributes are copied to devices once.
IN_BACKWARD: dict[int, Callable[[], object]] = {}
LOWEST, HIGHEST = 6, 3


class Held(nn.Linear):
    """Its backward pass begins with whatever is asked of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        act = IN_BACKWARD.get(self.out_features)
        if y.requires_grad and act is not None:
            y.register_hook(lambda grad: (act(), grad)[1])
        return y


class LastFirst(torch.optim.Optimizer):
    """Plain descent from the last parameter to the first, which tells when it has done the first one."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.begun = threading.Event()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            for parameter in reversed(group["params"]):
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])
                    self.begun.set()


@pytest.fixture(autouse=True)
def nothing_in_backward() -> Iterator[None]:
    yield
    IN_BACKWARD.clear()


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Held(4, LOWEST), nn.Linear(6, 6), Held(6, HIGHEST))


def wrap(model: nn.Sequential, runtime: Runtime) -> RoundPipe:
    return RoundPipe(
        model, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=2, execute_plan=APART)
    )


@pytest.mark.parametrize("is_async", [True, False])
def test_a_step_begins_while_backward_goes_on(runtime: Runtime, is_async: bool) -> None:
    ours, truth = layers(), layers()
    model = wrap(ours, runtime)
    optimizer = LastFirst(model.optim_parameters())
    IN_BACKWARD[LOWEST] = lambda: optimizer.begun.wait(20)
    x, y = batch(6)
    model.forward_backward((x,), None, y, square_error)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
    model.synchronize()
    assert optimizer.begun.is_set()
    train_call(truth, x, y, microbatches=2)
    torch.optim.SGD(truth.parameters(), lr=0.1).step()
    assert_near(weights(ours), weights(truth), 1e-5)


@pytest.mark.parametrize("swallowing", [False, True])
def test_a_call_that_fails_under_its_step_is_told_and_the_published_weights_stay_whole(
    runtime: Runtime, swallowing: bool
) -> None:
    ours, truth = layers(), layers()
    model = wrap(ours, runtime)
    optimizer = LastFirst(model.optim_parameters())

    def fail() -> None:
        optimizer.begun.wait(20)
        raise ValueError("told to")

    def step() -> None:
        with suppress(Exception if swallowing else ()):
            optimizer.step()
        optimizer.zero_grad()

    IN_BACKWARD[LOWEST] = fail
    x, y = batch(6)
    model.forward_backward((x,), None, y, square_error)
    model.step(step)
    with pytest.raises(ValueError, match="told to"):
        model.synchronize()
    IN_BACKWARD.clear()
    with pytest.raises(StepFailed, match="a call failed while its step was under way"):
        model.forward_backward((x,), None, y, square_error)
    model.reset()
    assert_near(weights(ours), weights(truth), 0)
    model.forward_backward((x,), None, y, square_error)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    train_call(truth, x, y, microbatches=2)
    torch.optim.SGD(truth.parameters(), lr=0.1).step()
    assert_near(weights(ours), weights(truth), 1e-5)


def test_a_call_that_fails_before_its_step_has_read_anything_leaves_the_step_out(runtime: Runtime) -> None:
    ours = layers()
    model = wrap(ours, runtime)
    before = [parameter.detach().clone() for parameter in model.optim_parameters()]
    optimizer = roundpipe.optim.AdamW(model.optim_parameters(), lr=0.1)
    launched, passed = threading.Event(), list[int]()

    def fail() -> None:
        # In the last microbatch: the call returns when it has all losses.
        if passed:
            launched.wait(20)
            raise ValueError("told to")
        passed.append(1)

    IN_BACKWARD[HIGHEST] = fail
    x, y = batch(6)
    model.forward_backward((x,), None, y, square_error)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    launched.set()
    with pytest.raises(ValueError, match="told to"):
        model.synchronize()
    IN_BACKWARD.clear()
    model.zero_grad()
    model.forward_backward((x,), None, y, square_error)
    model.synchronize()
    assert all(torch.equal(now, then) for now, then in zip(model.optim_parameters(), before, strict=True))


def test_optimizers_of_this_package_make_no_copy_of_the_gradients(two: Runtime) -> None:
    model = RoundPipe(layers().bfloat16(), runtime=two, optim_dtype=torch.float32)
    optimizer = roundpipe.optim.AdamW(model.optim_parameters(), lr=0.1)
    x, y = (tensor.bfloat16() for tensor in batch(6))
    model.forward_backward((x,), None, y, square_error)
    seen: list[bool] = []

    def step() -> None:
        optimizer.step()
        seen.extend(parameter._link.gradient_in == "source" for parameter in model.optim_parameters())
        assert all(parameter.grad.dtype == torch.float32 for parameter in model.optim_parameters())

    model.step(step, is_async=False)
    assert seen == [True] * 6
