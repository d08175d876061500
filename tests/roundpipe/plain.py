"""Plain PyTorch, the slow truth that the engine is compared with; and plans and layers that tests share."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import rp_batch
import torch
from rp_sched import Plan
from torch import nn

PATIENCE_S = 30.0
Tensors = dict[str, torch.Tensor | None]


def square_error(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss whose sum over microbatches is the loss of the batch."""
    return (outputs - labels).square().sum()


def mlp(width: int = 6, depth: int = 3, seed: int = 0) -> nn.Sequential:
    """``2 * depth - 1`` layers, (batch, 4) to (batch, 3)."""
    torch.manual_seed(seed)
    sizes = [4, *[width] * (depth - 1), 3]
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(sizes):
        layers += [nn.Linear(wide, narrow), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Scaled(nn.Module):
    """A model that is taken apart: `mlp`, and a parameter outside of all parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.scale = nn.Parameter(torch.full((3,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.inner(x)


def batch(size: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (size, 4) and labels (size, 3)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator), torch.randn(size, 3, generator=generator)


# Plans


def single_layers(first: int, last: int) -> list[range]:
    """A stage for each layer."""
    return [range(layer, layer + 1) for layer in range(first, last)]


def plans(layers: int, microbatches: int) -> dict[str, Plan | None]:
    """Ways to cut a training call of `layers` >= 3 layers."""
    tail = layers - 1
    singles = single_layers(0, tail)
    each = tuple(range(m, m + 1) for m in range(microbatches))
    middle = (tail + 1) // 2
    return {
        "planned": None,
        "all fused": Plan(fused=range(layers)),
        "one stage": Plan([range(tail)], range(tail, layers), [range(tail)]),
        "one layer a stage": Plan(singles, range(tail, layers), singles[::-1]),
        "cut differently": Plan(
            [range(1), range(1, tail)], range(tail, layers), [range(middle, tail), range(middle)]
        ),
        "forward whole, backward in layers": Plan([range(tail)], range(tail, layers), singles[::-1]),
        "forward in layers, backward whole": Plan(singles, range(tail, layers), [range(tail)]),
        "microbatches divided": Plan(fused=range(layers), groups=each),
        "tail divided": Plan([range(1), range(1, middle)], range(middle, layers), [range(middle)], each)
        if middle > 1
        else Plan([range(1)], range(1, layers), [range(1)], each),
    }


PLAN_NAMES = tuple(plans(3, 1))


# What fails


class Dammed(torch.autograd.Function):
    """Its backward waits until somebody opens."""

    opened = threading.Event()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        del ctx
        assert Dammed.opened.wait(PATIENCE_S)
        return grads[0]


class FailsLate(Dammed):
    """Its backward waits until somebody opens, and fails."""

    opened = threading.Event()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        del ctx, grads
        assert FailsLate.opened.wait(PATIENCE_S)
        raise KeyError


# The truth


def twin(model: nn.Module) -> nn.Module:
    """A copy for plain PyTorch, made before the model is wrapped."""
    return copy.deepcopy(model)


def train_call(
    model: nn.Module,
    inputs: Any,
    labels: Any,
    loss_fn: Callable[[Any, Any], torch.Tensor] = square_error,
    *,
    microbatches: int,
) -> torch.Tensor:
    """Forward, loss and backward, microbatch by microbatch; the sum of the losses."""
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    parts = rp_batch.split((args, {}), microbatches)
    targets = rp_batch.split(labels, len(parts), sizes=parts.sizes)
    total = torch.zeros(())
    for (part, _), target in zip(parts, targets, strict=True):
        loss = loss_fn(model(*part), target)
        loss.backward()
        total = total + loss.detach()
    return total


def gradients(model: nn.Module) -> Tensors:
    """A copy of every parameter's gradient, by name."""
    return {
        name: None if parameter.grad is None else parameter.grad.detach().cpu().clone()
        for name, parameter in model.named_parameters()
    }


def weights(model: nn.Module) -> Tensors:
    """A copy of everything in the state dict."""
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def assert_near(
    found: Mapping[str, torch.Tensor | None] | torch.Tensor | Iterable[torch.Tensor],
    wanted: Mapping[str, torch.Tensor | None] | torch.Tensor | Iterable[torch.Tensor],
    tolerance: float = 1e-5,
    what: str = "",
) -> None:
    """Norm-wise agreement, tensor by tensor; None only where None is wanted."""
    if isinstance(wanted, torch.Tensor):
        _near(found, wanted, tolerance, what)
        return
    if not isinstance(wanted, Mapping):
        wanted, found = dict(enumerate(wanted)), dict(enumerate(found))
    assert list(found) == list(wanted), what
    for name, tensor in wanted.items():
        _near(found[name], tensor, tolerance, f"{what} {name}")


def _near(found: Any, wanted: torch.Tensor | None, tolerance: float, what: str) -> None:
    if wanted is None:
        assert found is None, f"{what}: should have none, but has {found}"
        return
    assert found is not None, f"{what}: should not be None"
    assert found.shape == wanted.shape, f"{what}: {found.shape} should be {wanted.shape}"
    found, wanted = found.detach().cpu().double(), wanted.detach().cpu().double()
    error, size = (found - wanted).norm().item(), wanted.norm().item()
    assert error <= tolerance * (size + 1e-3), f"{what}: off by {error:g} of {size:g}\n{found}\n{wanted}"
