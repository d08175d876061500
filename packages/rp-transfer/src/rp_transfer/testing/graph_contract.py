"""Checks of what `rp_transfer.api` promises of graphs, one function a promise, for backends that capture them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from rp_transfer.api import Backend, Capture, Device, Graph
from rp_transfer.errors import Closed, NotCapturable
from rp_transfer.testing.demands import demand, demand_raises

Promise = Callable[[Backend, Device], None]


def _of_graphs(promise: Promise) -> Promise:
    """Check a promise inside `computing()`, of backends that capture graphs."""

    @wraps(promise)
    def check(backend: Backend, device: Device) -> None:
        if backend.abilities.captures_graphs:
            with device.computing():
                promise(backend, device)

    return check


def _ones(device: Device, *shape: int) -> torch.Tensor:
    return torch.ones(shape, device=device.torch_device)


def _captured(device: Device, body: Callable[[Capture], Any], num_draws: int = 0) -> tuple[Any, Graph]:
    return device.capture(body, pool=device.graph_pool(), num_draws=num_draws)


def _is(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())


@_of_graphs
def graphs_replay(backend: Backend, device: Device) -> None:
    """A graph runs its operations with what its memory then holds, as often as it is replayed."""
    del backend
    x, total = _ones(device, 3), torch.zeros(3, device=device.torch_device)

    def body(capture: Capture) -> torch.Tensor:
        del capture
        total.add_(x)
        return (x * 2).sum() + total

    result, graph = _captured(device, body)
    demand(_is(total, 0), "capture() must leave what the body writes as it was")
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
    demand(_is(total, 6), "each replay must write what the body wrote")
    demand(_is(result, 36), "what the body returned must hold the values of the last replay")
    x.fill_(0)
    demand(_is(result, 36), "between replays it must stay as it is")


@_of_graphs
def graphs_hold_backward(backend: Backend, device: Device) -> None:
    """A body may compute gradients; replays move no version counter."""
    del backend
    x, weight = _ones(device, 2, 2), _ones(device, 2, 2).requires_grad_()
    weight.grad = sums = torch.zeros_like(weight)

    def body(capture: Capture) -> None:
        del capture
        torch.autograd.backward([(x @ weight).square().sum()])

    # Once as it is, since libraries open what they need in first calls.
    torch.autograd.backward([(x @ weight).square().sum()])
    sums.zero_()
    _, graph = _captured(device, body)
    before = sums._version
    graph.replay()
    with torch.no_grad():
        weight.mul_(2)
        x.mul_(3)
    graph.replay()
    demand(_is(sums, 8 + 144), "replays must add gradients of what inputs and parameters then hold")
    demand(sums._version == before, "replays must move no version counter")


@_of_graphs
def graphs_are_captured_in_parts(backend: Backend, device: Device) -> None:
    """Forward and backward may be two graphs of a pool; what other work does between them is seen."""
    del backend
    pool, weight = device.graph_pool(), _ones(device, 4).requires_grad_()
    x = _ones(device, 4)
    output, forward = device.capture(lambda _: (x * weight).exp(), pool=pool)
    incoming = torch.zeros(4, device=device.torch_device)
    (gradient,), backward = device.capture(
        lambda _: torch.autograd.grad([output], [weight], [incoming]), pool=pool
    )
    for value in (0.0, 1.0):
        x.fill_(value)
        forward.replay()
        incoming.copy_(output.detach() * 2)
        backward.replay()
        expected = value * (x * weight.detach()).exp() * (x * weight.detach()).exp() * 2
        demand(torch.equal(gradient, expected), "backward must read what this forward's replay has left")


@_of_graphs
def graphs_draw_by_seed(backend: Backend, device: Device) -> None:
    """A replay draws as the device's generator does from the seeds that it is given, and leaves that alone."""
    del backend
    generator = device.generator()

    def draw() -> torch.Tensor:
        return torch.rand(8, device=device.torch_device)

    def body(capture: Capture) -> list[torch.Tensor]:
        with capture.drawing(1):
            first = draw()
        with capture.drawing(0):
            other = draw()
        with capture.drawing(1):
            return [first, draw(), other]

    before = generator.get_state()
    found, graph = _captured(device, body, num_draws=2)
    demand(torch.equal(before, generator.get_state()), "capture() must leave the generator as it was")
    for seeds in ((3, 4), (5, 6)):
        graph.replay(seeds)
        demand(torch.equal(before, generator.get_state()), "replay() must leave the generator as it was")
        generator.manual_seed(seeds[1])
        expected = [draw(), draw()]
        generator.manual_seed(seeds[0])
        expected.append(draw())
        generator.set_state(before)
        same = all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        demand(same, "replay(seeds) must draw as the device's generator does from these seeds")
    demand_raises(ValueError, lambda: graph.replay((1,)), "replay() with too few seeds")


@_of_graphs
def graphs_refuse(backend: Backend, device: Device) -> None:
    """What cannot be captured is refused with a reason, and the device is then as before."""
    del backend
    x = _ones(device, 3)

    def fails(capture: Capture) -> None:
        del capture
        x.add_(1)
        raise KeyError("an error of the body's own")

    def draws(capture: Capture) -> torch.Tensor:
        del capture
        return torch.rand(3, device=device.torch_device)

    def capture_and_replay(body: Callable[[Capture], object]) -> None:
        device.capture(body, pool=pool)[1].replay()

    before, pool = device.generator().get_state(), device.graph_pool()
    refused: dict[str, Callable[[Capture], object]] = {
        "item()": lambda _: x.sum().item(),
        "nonzero()": lambda _: x.nonzero(),
        "a condition": lambda _: x if x.sum() > 0 else -x,
        "a tensor of Python's values": lambda _: x + torch.tensor([1.0, 2.0, 3.0], device=device.torch_device),
        "an error": fails,
        "drawing elsewhere": draws,
    }
    for what, body in refused.items():
        demand_raises(NotCapturable, lambda body=body: capture_and_replay(body), f"capture() of {what}")
        demand(_is(x, 1), f"capture() of {what} must leave memory as it was")
        demand(torch.equal(before, device.generator().get_state()), f"and the generator, with {what}")
        result, graph = device.capture(lambda _: x + 1, pool=pool)
        graph.replay()
        demand(_is(result, 2), f"another capture must work after that of {what}")


@_of_graphs
def graphs_close(backend: Backend, device: Device) -> None:
    """A pool tells its bytes; a closed graph refuses to run."""
    del backend
    pool, x = device.graph_pool(), _ones(device, 1 << 20)
    demand(pool.nbytes == 0, "a new pool must hold nothing")
    kept, graph = device.capture(lambda _: x + 1, pool=pool)
    demand(pool.nbytes >= kept.nbytes, "a pool must hold what its graphs allocate")
    graph.close()
    graph.close()
    demand_raises(Closed, graph.replay, "replay() after close()")


PROMISES: tuple[Promise, ...] = (
    graphs_replay,
    graphs_hold_backward,
    graphs_are_captured_in_parts,
    graphs_draw_by_seed,
    graphs_refuse,
    graphs_close,
)
