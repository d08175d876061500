"""Gradients that a model returns under ``create_graph=True`` are right, and raise when they are differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain import assert_near, gradients, twin
from roundpipe import (
    AutoRoundPipe,
    DifferentiatedTwice,
    RoundPipe,
    RoundPipeRunConfig,
    Runtime,
    wrap_model_to_roundpipe,
)
from torch import nn

Model = Callable[[torch.Tensor], Any]


class Critic(nn.Module):
    """Takes its submodules' outputs apart from a plain sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)).tanh()


def row(plain: Critic, runtime: Runtime) -> Any:
    """The critic's layers as one model."""
    layers = nn.Sequential(*plain.first, plain.last, nn.Tanh())
    return RoundPipe(layers, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=2))


def taken_apart(plain: Critic, runtime: Runtime) -> Any:
    """The critic, each of whose submodules is a part."""
    config = RoundPipeRunConfig(num_microbatch=2)
    return wrap_model_to_roundpipe(plain, runtime=runtime, lower_threshold=1, model_run_config=config)


def one_part(plain: Critic, runtime: Runtime) -> Any:
    """The critic, with one submodule a model and the rest on the host."""
    plain.first = RoundPipe(plain.first, runtime=runtime)
    return AutoRoundPipe(plain)


KINDS = {"row": row, "taken apart": taken_apart, "one part": one_part}


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, two: Runtime) -> tuple[nn.Module, Any]:
    """A critic in plain PyTorch, and its copy on devices."""
    torch.manual_seed(0)
    plain = Critic()
    return plain, KINDS[request.param](twin(plain), two)


def some(seed: int = 0) -> torch.Tensor:
    """An input that wants a gradient."""
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def slope(model: Model, x: torch.Tensor, *, is_constant: bool) -> torch.Tensor:
    """The gradient of the input, whose own incoming gradient is constant or depends on the output."""
    output = model(x)
    loss = output.sum() if is_constant else output.square().sum()
    (found,) = torch.autograd.grad(loss, x, create_graph=True)
    return found


@pytest.mark.parametrize("is_constant", [True, False])
def test_a_penalty_on_returned_gradients_raises(pair: tuple[nn.Module, Any], is_constant: bool) -> None:
    _, model = pair
    x = some()

    penalty = (slope(model, x, is_constant=is_constant).norm(dim=1) - 1).square().mean()

    with pytest.raises(DifferentiatedTwice, match=r"Detach them .* gradient penalty inside one layer"):
        (model(x).mean() + penalty).backward()


@pytest.mark.parametrize("is_constant", [True, False])
def test_a_second_derivative_of_the_input_raises(pair: tuple[nn.Module, Any], is_constant: bool) -> None:
    _, model = pair
    x = some()

    found = slope(model, x, is_constant=is_constant).square().sum() + x.sum()

    with pytest.raises(DifferentiatedTwice):
        torch.autograd.grad(found, x)


def test_a_gradient_that_went_on_through_what_made_the_input_raises(pair: tuple[nn.Module, Any]) -> None:
    _, model = pair
    before = nn.Linear(4, 4)
    x = some()

    (found,) = torch.autograd.grad(model(before(x)).sum(), x, create_graph=True)

    with pytest.raises(DifferentiatedTwice):
        torch.autograd.grad(found.square().sum() + before(x).sum(), list(before.parameters()))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_gradient_kept_by_backward_raises(pair: tuple[nn.Module, Any]) -> None:
    _, model = pair
    x = some()

    model(x).sum().backward(create_graph=True)

    assert x.grad is not None
    with pytest.raises(DifferentiatedTwice):
        x.grad.square().sum().backward()
    x.grad = None


def test_a_second_derivative_through_outputs_in_microbatches_raises(two: Runtime) -> None:
    config = RoundPipeRunConfig(num_microbatch=2, merge_output=False)
    model = RoundPipe(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), runtime=two, model_run_config=config)
    x = some()
    packed = model(x)
    packed.synchronize()

    (found,) = torch.autograd.grad(sum(part.sum() for part in packed), x, create_graph=True)

    with pytest.raises(DifferentiatedTwice):
        found.sum().backward()


@pytest.mark.parametrize("is_constant", [True, False])
def test_gradients_that_nobody_differentiates_are_those_of_plain_pytorch(
    pair: tuple[nn.Module, Any], is_constant: bool
) -> None:
    plain, model = pair
    x = some()

    found, wanted = (slope(critic, x, is_constant=is_constant) for critic in (model, plain))

    assert_near(found, wanted)
    assert found.requires_grad


def test_detached_gradients_are_constants_in_a_loss(pair: tuple[nn.Module, Any]) -> None:
    plain, model = pair
    x = some()

    for critic in (plain, model):
        factor = slope(critic, x, is_constant=True).detach().norm()
        (critic(x).sum() * factor).backward()
    model.synchronize()

    assert_near(list(gradients(model.model).values()), list(gradients(plain).values()))


def test_a_model_trains_on_after_the_error(pair: tuple[nn.Module, Any]) -> None:
    plain, model = pair
    x = some()
    with pytest.raises(DifferentiatedTwice):
        slope(model, x, is_constant=True).sum().backward()

    for critic in (plain, model):
        critic(x).sum().backward()
    model.synchronize()

    assert_near(list(gradients(model.model).values()), list(gradients(plain).values()))
