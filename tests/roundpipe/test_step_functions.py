"""What step functions do to masters reaches the weights, and what goes wrong in them does not."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, ClassVar

import pytest
import roundpipe
import torch
from plain import assert_near, batch, mlp, square_error, weights
from roundpipe import RoundPipe, Runtime, StepFailed
from torch import nn

OPTIMIZERS = [torch.optim.AdamW, roundpipe.optim.AdamW]


def trained(runtime: Runtime, **settings: Any) -> RoundPipe:
    model = RoundPipe(mlp(), runtime=runtime, **settings)
    call(model)
    return model


def call(model: RoundPipe) -> None:
    x, y = batch(6)
    model.forward_backward((x,), None, y, square_error)


@pytest.mark.pairwise
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_masters_that_change_after_the_optimizer_reach_their_weights(
    runtime: Runtime, kind: Any, is_async: bool
) -> None:
    model = trained(runtime)
    optimizer = kind(model.optim_parameters(), lr=1.0)

    def clamped() -> None:
        optimizer.step()
        with torch.no_grad():
            for master in model.optim_parameters():
                master.clamp_(-0.01, 0.01)

    model.step(clamped, is_async=is_async)
    model.synchronize()
    assert all(value.abs().max() <= 0.01 for value in weights(model).values())


@pytest.mark.pairwise
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_that_fails_after_the_optimizer_leaves_the_published_weights_whole(
    runtime: Runtime, kind: Any, is_async: bool
) -> None:
    model = trained(runtime)
    optimizer = kind(model.optim_parameters(), lr=1.0)
    model.synchronize()
    before = weights(model)

    def failing() -> None:
        optimizer.step()
        raise KeyError("as planned")

    def step_and_wait() -> None:
        model.step(failing, is_async=is_async)
        model.synchronize()

    with pytest.raises(KeyError, match="as planned"):
        step_and_wait()
    with pytest.raises(StepFailed):
        call(model)
    model.reset()
    assert_near(weights(model), before, 0.0)
    assert_near(dict(enumerate(model.optim_parameters())), dict(enumerate(before.values())), 0.0)
    call(model)
    model.synchronize()


@pytest.mark.parametrize("is_async", [True, False])
def test_a_master_with_a_gradient_of_its_own_is_refused_in_words(two: Runtime, is_async: bool) -> None:
    model = trained(two)
    optimizer = roundpipe.optim.AdamW(model.optim_parameters())
    model.synchronize()
    stray = list(model.optim_parameters())[2]
    stray.grad = torch.zeros_like(stray)

    def step_and_wait() -> None:
        model.step(optimizer.step, is_async=is_async)
        model.synchronize()

    with pytest.raises(ValueError, match="has a gradient of its own") as caught:
        step_and_wait()
    assert any("step function" in note for note in caught.value.__notes__)
    stray.grad = None
    model.reset()
    call(model)
    step_and_wait()


def test_the_optimizer_leaves_a_core_for_each_device(two: Runtime) -> None:
    counts: list[int] = []
    two.optimizer.submit(lambda: counts.append(torch.get_num_threads())).result()
    threads = torch.get_num_threads()
    assert counts == [max(1, threads - max(2, min(10, threads // 3)))]


WHO: ContextVar[str] = ContextVar("who", default="nobody")


class Asking(nn.Module):
    """Notes the context variable that it runs in."""

    seen: ClassVar[set[str]] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Asking.seen.add(WHO.get())
        return x * 1.0


def test_layers_and_step_functions_run_in_the_callers_context_variables(runtime: Runtime) -> None:
    model = RoundPipe(nn.Sequential(nn.Linear(4, 4), Asking()), runtime=runtime)
    x = torch.ones(4, 4)
    for who in ("one", "another"):
        WHO.set(who)
        Asking.seen.clear()
        model.forward_backward((x,), None, x, square_error)
        model.step(lambda: Asking.seen.add(WHO.get()), is_async=False)
        model.synchronize()
        assert Asking.seen == {who}
        Asking.seen.clear()
        model.step(lambda: Asking.seen.add(WHO.get()), is_async=False)
        assert Asking.seen == {who}
