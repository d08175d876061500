"""Layers whose gradients come now and then, in parts, or past autograd; and layers that are refused for theirs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import rp_batch
import torch
from plain import Tensors, assert_near, gradients, plans, square_error, train_call, twin
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from rp_engine.execution.stage.stage import Stage
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("small_departures")

WIDTH = 4


class Two(nn.Module):
    """Holds two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class OneOrTheOther(Two):
    """Uses one of them, as its input says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if x.detach().sum() > 0 else self.b(x)


class NowAndThen(Two):
    """Passes its input on, or uses both, as its input says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.detach().sum() > 0 else self.b(self.a(x))


class AnyNumberOfTimes(Two):
    """Recomputes itself inside itself, as often as its input says: its gradients come in that many parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1 + int(x.detach().abs().sum() * 10) % 3):
            x = checkpoint(self.once, x, use_reentrant=True)
        return x

    def once(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.b(self.a(x)))


class HalfRecomputed(Two):
    """Recomputes one use of each weight, not the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(checkpoint(self.a, x, use_reentrant=True)) + self.b(
            checkpoint(self.b, x, use_reentrant=True)
        )


class Slope(Two):
    """Returns a gradient that it computes itself, as a force field does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.a(at).tanh().square().sum(), at, create_graph=True)
        return self.b(x) + slope


class Product(torch.autograd.Function):
    """Gives its weight's gradient to autograd, adds it in place, replaces the sum, or has none now and then."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, how: str) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.how = weight, how
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        (x,), weight, grad = ctx.saved_tensors, ctx.weight, grads[0]
        found = grad.T @ x
        if ctx.how == "now and then":
            return grad @ weight, found if x.sum() > 0 else None, None
        if ctx.how == "in place" and weight.grad is not None:
            weight.grad.add_(found)
        else:
            weight.grad = found if weight.grad is None else weight.grad + found
        return grad @ weight, None, None


class Own(Two):
    """Multiplies with a `Product`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.a.weight, self.how) + self.b(x)


class Complex(nn.Module):
    """Has a complex weight, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs() + self.empty.sum()


KINDS: dict[str, Callable[[], nn.Module]] = {
    **{
        kind.__name__: kind
        for kind in (OneOrTheOther, NowAndThen, AnyNumberOfTimes, HalfRecomputed, Slope, Complex)
    },
    **{how: lambda how=how: Own(how) for how in ("now and then", "in place", "replaced")},
}


def row(kind: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    shared = kind()
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), shared, kind(), shared, nn.Linear(WIDTH, 3))


def data(call: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(call)
    return torch.randn(6, WIDTH, generator=generator), torch.randn(6, 3, generator=generator)


@pytest.mark.few(1)
@pytest.mark.usefixtures("samples_first")
@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan_name", ["all fused", "one stage", "one layer a stage", "microbatches divided"])
@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_gradients_are_those_of_plain_pytorch(two: Runtime, kind: str, plan_name: str, microbatches: int) -> None:
    layers = row(KINDS[kind])
    truth = twin(layers)
    config = RoundPipeRunConfig(num_microbatch=microbatches, execute_plan=plans(5, microbatches)[plan_name])
    model = RoundPipe(layers, runtime=two, model_run_config=config)
    for call in range(3):
        x, y = data(call)
        model.forward_backward((x,), None, y, square_error)
        train_call(truth, x, y, microbatches=microbatches)
        model.synchronize()
        assert_near(real(gradients(layers)), real(gradients(truth)), 1e-4)


def real(tensors: Tensors) -> Tensors:
    return {
        name: torch.view_as_real(one) if one is not None and one.is_complex() else one
        for name, one in tensors.items()
    }


class Changing(nn.Module):
    """Under autocast the first microbatch's copy of the weight is used by all, the third's recomputation included.

    The second microbatch adds the gradient of that alone, the third a late one, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = checkpoint(self.linear, x, use_reentrant=True)
        return found if x[0, 0] == 0 else found + self.linear(x)


@pytest.mark.usefixtures("samples_first")
def test_after_a_gradient_that_came_too_late_the_same_call_gives_the_right_numbers() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Hardtanh(), nn.Linear(WIDTH, WIDTH, bias=False), Changing(), nn.Linear(WIDTH, 3))
    truth = twin(layers)
    x, y = data(0)
    x[2:4] = 0
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plans(4, 3)["all fused"])

    def loss_fn(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return square_error(output.float(), label)

    def call() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model.forward_backward((x,), None, y, loss_fn)
        model.synchronize()

    with Runtime("cpu:1") as runtime:
        model = RoundPipe(layers, runtime=runtime, model_run_config=config)
        with pytest.raises(RuntimeError, match=r"layer 2 got a gradient after .* make the call again"):
            call()
        model.zero_grad()
        call()
        found = gradients(layers)
    for (part, label), _ in rp_batch.split(((x, y), {}), 3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_fn(truth(part), label)
        loss.backward()
    assert_near(found, gradients(truth), 2e-2)


# What is refused


class BackwardInside(Two):
    """Adds to its own gradients in forward."""

    is_refused = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.is_refused):
            found = self.a(x.detach()).sum()
        if self.is_refused:
            found.backward()
        return self.a(x) + self.b(x)


class BackwardInsideLater(BackwardInside):
    """Does so for some inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x[0, 0] == 0 else self.a(x) + self.b(x)


class HookInside(Two):
    """Registers a hook on a parameter in forward."""

    is_refused = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_refused:
            self.a.weight.register_hook(torch.neg)
        return self.a(x) + self.b(x)


class HoldsTensor(Two):
    """Trains a tensor that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(WIDTH, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * self.scale


class HoldsLayer(nn.Module):
    """Uses another layer's weight, which it holds in a list, so that torch does not see it."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.others[0].weight


REFUSED: dict[str, tuple[Callable[[nn.Linear], nn.Module], str]] = {
    "backward": (lambda _: BackwardInside(), r"layer 1 gave its parameter 'a.weight' a gradient in forward"),
    "backward, later": (lambda _: BackwardInsideLater(), r"layer 1 gave its parameter .* a gradient in forward"),
    "hook": (lambda _: HookInside(), r"layer 1 registered a hook on its parameter 'a.weight' in forward"),
    "tensor": (
        lambda _: HoldsTensor(),
        r"layer 1 \(HoldsTensor\) holds a Tensor of shape \(4,\) that requires grad",
    ),
    "layer": (HoldsLayer, r"layer 1 \(HoldsLayer\) holds a Parameter of shape \(4, 4\) that requires grad"),
}


@pytest.mark.usefixtures("samples_first")
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("plan_name", ["all fused", "one layer a stage"])
def test_gradients_that_nobody_would_add_are_refused(
    two: Runtime, kind: str, plan_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = nn.Linear(WIDTH, WIDTH)
    make, words = REFUSED[kind]
    layers = nn.Sequential(first, make(first), nn.Linear(WIDTH, 3))
    with torch.no_grad():
        first.weight.copy_(torch.eye(WIDTH))
        first.bias.zero_()
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plans(3, 3)[plan_name])
    model = RoundPipe(layers, runtime=two, model_run_config=config)
    x, y = data(0)
    x[2:4] = 0

    def call() -> None:
        model.forward_backward((x,), None, y, square_error)
        model.synchronize()

    with pytest.raises(TypeError, match=words):
        call()
    # Nothing of it stays on the devices' copies.
    model.zero_grad()
    if hasattr(layers[1], "is_refused"):
        monkeypatch.setattr(type(layers[1]), "is_refused", False)
    else:
        layers[1] = nn.Linear(WIDTH, WIDTH)
    truth = twin(layers)
    for _ in range(2):
        # On each of the devices.
        call()
        train_call(truth, x, y, microbatches=3)
    assert_near(gradients(layers), gradients(truth), 1e-4)


class ReturnsWeight(Two):
    """Hands a parameter of its own on."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.b.weight


class Multiplies(nn.Module):
    """Multiplies what it gets."""

    def forward(self, factors: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return factors[0] @ factors[1]


def test_a_parameter_that_a_layer_returns_keeps_no_task(two: Runtime) -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), ReturnsWeight(), Multiplies(), nn.Linear(WIDTH, 3))
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plans(4, 2)["all fused"])
    model = RoundPipe(layers, runtime=two, model_run_config=config)
    x, y = data(0)
    # Errors that other tests have kept may hold some.
    others = stages()
    for _ in range(2):
        model.forward_backward((x,), None, y, square_error)
    model.synchronize()
    gc.collect()
    assert not [one for one in stages() if not any(one is other for other in others)]


def stages() -> list[Stage]:
    return [one for one in gc.get_objects() if isinstance(one, Stage)]
