"""Layers that use torch's generator in forward and in backward, and meetings of two on different devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from lull import pause
from plain import PATIENCE_S, gradients, square_error
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from rp_sched import Plan
from torch import nn
from torch.utils.checkpoint import checkpoint

# On three devices: the recomputation of layers 1 and 2 for microbatch 1 runs beside the backward of layer 0 for
# microbatch 0.
PLAN = Plan([range(3)], range(3, 4), [range(1, 3), range(1)], backward_groups=(range(1), range(1, 2)))
# What is done where a layer has come to; its attributes are copied to the devices.
SCRIPT: dict[str, Callable[[bool], None]] = {}


def come_to(what: str, x: torch.Tensor) -> None:
    """Do what is told for this place; the sign of the first column tells microbatch 0 from microbatch 1."""
    if what in SCRIPT:
        SCRIPT[what](bool(x[0, 0] < 0))


@contextmanager
def script(**steps: Callable[[bool], None]) -> Iterator[None]:
    """Layers do this where they come to; each step is told whether the microbatch is the second one."""
    SCRIPT.update(steps)
    try:
        yield
    finally:
        SCRIPT.clear()


class _Backward(torch.autograd.Function):
    """The identity, whose backward is a step."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        come_to("backward", ctx.saved_tensors[0])
        return grad


class Checkpointed(nn.Module):
    """Recomputes its insides in backward. ``backward`` is the step before that, ``inside`` the one in it."""

    def __init__(self, *, reentrant: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(dropout) if dropout else nn.Tanh(), nn.Linear(4, 4))
        self.reentrant = reentrant

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        come_to("inside", x)
        return torch.cat([x[:, :1], self.body(x)[:, 1:]], dim=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Backward.apply(checkpoint(self.inside, x, use_reentrant=self.reentrant))


class Before(nn.Module):
    """Draws nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        come_to("before", x)
        return x


class Twice(nn.Module):
    """Draws, takes a step, and draws again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.rand(x.shape)
        come_to("between", x)
        second = torch.rand(x.shape)
        come_to("after", x)
        return x * first * second


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Two microbatches that tell who they are."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(6, 4, generator=generator), torch.randn(6, 3, generator=generator)
    x[:, 0] = torch.tensor([1.0, 1, 1, -1, -1, -1])
    return x.requires_grad_(), y


def trained(devices: str, *, reentrant: bool, dropout: float, meet: bool) -> list[Any]:
    """Losses and gradients of two calls; in the second one, the layers meet."""
    torch.manual_seed(0)
    layers = nn.Sequential(Checkpointed(reentrant=reentrant, dropout=dropout), Before(), Twice(), nn.Linear(4, 3))
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=PLAN)
    x, y = data()
    with Runtime(devices) as runtime:
        model = RoundPipe(layers, runtime=runtime, model_run_config=config)
        losses = []
        for steps in ({}, meeting() if meet else {}):
            with script(**steps):
                losses.append(model.forward_backward((x,), None, y, square_error).detach())
                model.synchronize()
    return [*losses, x.grad, *gradients(layers).values()]


def meeting() -> dict[str, Callable[[bool], None]]:
    """`Checkpointed` recomputes, in the backward of microbatch 0, between two draws for microbatch 1.

    If one of them waits until the other one is over, `Checkpointed` is the first.
    """
    in_backward, drawing, come, forked, drawn = (threading.Event() for _ in range(5))
    runs = count(1)

    def before(is_second: bool) -> None:
        if is_second and next(runs) == 2:
            assert in_backward.wait(PATIENCE_S)

    def backward(is_second: bool) -> None:
        if not is_second:
            in_backward.set()
            # The other one comes, or waits for the lock, as all do then.
            pause(until=come)

    def inside(is_second: bool) -> None:
        if in_backward.is_set() and not is_second:
            forked.set()
            assert not drawing.is_set() or drawn.wait(PATIENCE_S)

    def between(is_second: bool) -> None:
        if in_backward.is_set() and is_second:
            drawing.set()
            come.set()
            assert forked.wait(PATIENCE_S)

    def after(is_second: bool) -> None:
        if in_backward.is_set() and is_second:
            drawn.set()

    return {"before": before, "backward": backward, "inside": inside, "between": between, "after": after}


def state_after_a_call(devices: str, *, reentrant: bool) -> torch.Tensor:
    """The caller's generator after a call and a draw, which comes while the backward recomputes, if it can."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), Checkpointed(reentrant=reentrant), nn.Linear(4, 3))
    under_way, drawn = threading.Event(), threading.Event()
    runs = count(1)

    def inside(_: bool) -> None:
        if next(runs) == 2:
            under_way.set()
            pause(until=drawn)

    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=Plan(fused=range(3)))
    x, y = data()
    # The gradient of an input would be waited for.
    x.requires_grad_(False)
    with Runtime(devices) as runtime:
        model = RoundPipe(layers, runtime=runtime, model_run_config=config)
        model.forward_backward((x,), None, y, square_error)
        model.synchronize()
        torch.manual_seed(7)
        with script(inside=inside):
            model.forward_backward((x,), None, y, square_error)
            assert under_way.wait(PATIENCE_S)
            torch.rand(3)
            drawn.set()
            model.synchronize()
    return torch.get_rng_state()
