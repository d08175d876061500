"""Recorded elementwise steps between a head's projection and the loss: casts, scales, soft-capping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cast:
    """Cast to another floating-point dtype."""

    dtype: torch.dtype

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return x.to(self.dtype)

    def backward(self, grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of `x` from that of `y`."""
        del y
        return grad.to(x.dtype)


@dataclass(frozen=True, slots=True)
class Times:
    """Multiply by a number."""

    factor: float

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return x * self.factor

    def backward(self, grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of `x` from that of `y`."""
        del x, y
        return grad * self.factor


@dataclass(frozen=True, slots=True)
class Over:
    """Divide by a number. Multiplying by the inverse would round differently."""

    divisor: float

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return x / self.divisor

    def backward(self, grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of `x` from that of `y`."""
        del x, y
        return grad / self.divisor


@dataclass(frozen=True, slots=True)
class Tanh:
    """Apply the hyperbolic tangent."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return x.tanh()

    def backward(self, grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of `x` from that of `y`."""
        del x
        return torch.ops.aten.tanh_backward(grad, y)


Step = Cast | Times | Over | Tanh


def apply(steps: Sequence[Step], x: Tensor) -> Tensor:
    """Apply the steps in order, with autograd where it is on.

    >>> apply((Times(2.0), Cast(torch.float64)), torch.ones(2))
    tensor([2., 2.], dtype=torch.float64)
    """
    for step in steps:
        x = step.forward(x)
    return x


def traced(steps: Sequence[Step], x: Tensor) -> list[Tensor]:
    """Return `x` and the result of each step."""
    trace = [x]
    for step in steps:
        trace.append(step.forward(trace[-1]))
    return trace


def differentiate(steps: Sequence[Step], trace: Sequence[Tensor], grad: Tensor) -> Tensor:
    """Return the gradient of the steps' input, given that of their result.

    >>> steps = (Over(2.0), Tanh())
    >>> trace = traced(steps, torch.zeros(1))
    >>> differentiate(steps, trace, torch.ones(1))
    tensor([0.5000])
    """
    for index in reversed(range(len(steps))):
        grad = steps[index].backward(grad, trace[index], trace[index + 1])
    return grad
