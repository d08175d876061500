"""Weights that are replaced between calls, for good or for one call: their gradients are kept, or it is told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import roundpipe
import torch
from plain import Scaled, assert_near, batch, mlp, square_error, twin, weights
from roundpipe import RoundPipe, RoundPipeError, RoundPipeRunConfig, Runtime, TrainingWarning
from roundpipe import wrap_model_to_roundpipe as wrap
from torch import nn
from torch.func import functional_call

TWO = RoundPipeRunConfig(num_microbatch=2)
X, Y = batch(6)
KINDS = ("row", "apart")


def made(kind: str, runtime: Runtime) -> tuple[nn.Module, Any, Any]:
    """A module, the model around it, and a copy for plain PyTorch."""
    net = mlp() if kind == "row" else Scaled()
    truth = twin(net)
    if kind == "row":
        return net, RoundPipe(net, name="mine", runtime=runtime, model_run_config=TWO), truth
    return net, wrap(net, name="mine", runtime=runtime, lower_threshold=1, model_run_config=TWO), truth


def values(net: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn_like(value) for name, value in net.state_dict().items()}


def first(net: Any) -> Any:
    return net[0] if isinstance(net, nn.Sequential) else net.inner[0]


def swapped(net: nn.Module, call: Callable[..., torch.Tensor]) -> torch.Tensor:
    layer, own = first(net), first(net).weight
    layer.weight = nn.Parameter(torch.ones_like(own))
    with torch.no_grad():
        found = call(X).clone()
    layer.weight = own
    return found


def called(net: nn.Module, _: object) -> torch.Tensor:
    with torch.no_grad():
        return functional_call(net, values(net), (X,)).clone()


@pytest.mark.few(1)
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [swapped, called])
def test_gradients_of_a_weight_that_is_away_for_a_call_are_not_lost(
    two: Runtime, how: Callable[..., torch.Tensor], kind: str, is_async: bool
):
    net, model, truth = made(kind, two)
    optimizer = roundpipe.optim.SGD(model.optim_parameters(), lr=0.05)
    plain = torch.optim.SGD(truth.parameters(), lr=0.05)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            for called_model in (model, truth):
                square_error(called_model(X), Y).backward()
            assert_near(how(net, model), how(truth, truth))
            for called_model in (model, truth):
                square_error(called_model(X), Y).backward()
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
            model.synchronize()
            plain.step()
            plain.zero_grad()

    assert_near(weights(net), weights(truth))


@pytest.mark.parametrize("dropped", [False, True])
def test_a_step_tells_which_gradients_it_leaves_out(two: Runtime, dropped: bool):
    net, model, _ = made("row", two)
    optimizer = roundpipe.optim.SGD(model.optim_parameters(), lr=0.05)
    square_error(model(X), Y).backward()
    own = first(net).weight
    before = own.detach().clone()
    if dropped:
        model.zero_grad()
    first(net).weight = nn.Parameter(torch.ones_like(own))

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        square_error(model(X), Y).backward()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)

    words = [str(one.message) for one in told if one.category is TrainingWarning]
    assert any("'mine' leaves out and drops gradients of parameters (1)" in one for one in words) != dropped
    first(net).weight = own
    model.synchronize()
    assert torch.equal(own, before)


def test_a_gradient_that_a_weight_brings_back_counts_in_the_next_step(two: Runtime):
    net, model, truth = made("row", two)
    ours, plain = (torch.optim.SGD(each, lr=0.05) for each in (model.optim_parameters(), truth.parameters()))

    for each, own in ((net, model), (truth, truth)):
        layer, weight = first(each), first(each).weight
        layer.weight = nn.Parameter(torch.ones_like(weight))
        square_error(own(X), Y).backward()
        layer.weight = weight
        weight.grad = torch.ones_like(weight)
    # The one whose place it takes again is gone, with its gradient.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.step(ours.step, is_async=False)
    plain.step()

    assert_near(weights(net), weights(truth))


@pytest.mark.filterwarnings("ignore:these are the model's own parameters")
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_functional_call_gives_train_nothing_so_that_is_refused(two: Runtime, kind: str):
    net, model, truth = made(kind, two)
    given = {name: value.requires_grad_() for name, value in values(net).items()}
    x, whole = X.clone().requires_grad_(), model if kind == "row" else net

    with pytest.raises(RoundPipeError, match="has tensors that require grad in the place of parameters"):
        functional_call(whole, given, (x,))
    with torch.no_grad():
        assert_near(functional_call(whole, given, (x,)), functional_call(truth, given, (x,)))

    square_error(model(X), Y).backward()
    model.synchronize()
    square_error(truth(X), Y).backward()
    assert_near([each.grad for each in net.parameters()], [each.grad for each in truth.parameters()])
