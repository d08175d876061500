"""Gradients of losses that must not be differentiated again, also where the incoming gradients are constants."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Gradients = tuple[Any, ...]


class _Tie(torch.autograd.Function):
    """An empty tensor that depends on all inputs."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        del ctx, inputs
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        del ctx, grads
        raise AssertionError("reached only through `_Once`, which raises")


class _Once(torch.autograd.Function):
    """Gradients, of what they depend on."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        del ctx
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        del ctx, grads
        raise RuntimeError(
            "gradients of this loss (create_graph=True) must not be differentiated: its backward computes them in "
            "chunks, without a graph; detach them, or use torch.nn.functional.cross_entropy on the logits"
        )


def tie(ctx: Any, *inputs: Tensor | None) -> None:
    """Note the inputs of a function in its `forward`, for `once_differentiable`."""
    found = [each for each in inputs if each is not None and each.requires_grad]
    with torch.enable_grad():
        ctx.tie = _Tie.apply(*found) if found else None


def once_differentiable(backward: Callable[[Any, Tensor], Gradients]) -> Callable[[Any, Tensor], Gradients]:
    """Make a function's `backward` give gradients that raise when they are differentiated.

    torch's decorator lets them pass as constants where the incoming gradient is one, so a penalty on them would
    have no gradient, in silence. The function's `forward` must call `tie`.
    """

    @functools.wraps(backward)
    def once(ctx: Any, grad: Tensor) -> Gradients:
        with torch.no_grad():
            found = backward(ctx, grad)
        if not torch.is_grad_enabled():
            return found
        grads = [each for each in found if each is not None]
        causes = [each for each in (ctx.tie, grad) if each is not None]
        with torch.enable_grad():
            joined = iter(_Once.apply(len(grads), *grads, *causes))
        return tuple(None if each is None else next(joined) for each in found)

    return once
