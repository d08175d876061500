"""Graphs of virtual devices: what would go wrong on a GPU, silently, fails here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rp_transfer import CpuBackend, Graph, NotCapturable, Unordered
from torch import nn


@pytest.fixture
def backend() -> CpuBackend:
    return CpuBackend(1)


def captured(backend: CpuBackend, body: Callable[[], object], num_draws: int = 0) -> tuple[object, Graph]:
    device = backend.devices[0]

    def drawing(capture):
        if not num_draws:
            return body()
        with capture.drawing(0):
            return body()

    with device.computing():
        return device.capture(drawing, pool=device.graph_pool(), num_draws=num_draws)


def test_a_forgotten_wait_for_an_input_fails_in_the_replay(backend: CpuBackend) -> None:
    device = backend.devices[0]
    there = device.empty((4,), torch.float32, stream=device.compute)
    there.zero_()
    _, graph = captured(backend, lambda: there * 2)
    ready = device.compute.record()
    device.weights_in.wait(ready)
    source = torch.ones(4)
    device.weights_in.copy(there, source)
    with pytest.raises(Unordered, match="replay on cpu:0/compute"):
        graph.replay()
    device.compute.wait(device.weights_in.record())
    graph.replay()


def test_what_draws_nothing_leaves_the_generator_to_other_threads(backend: CpuBackend) -> None:
    x = torch.ones(4)

    def body() -> torch.Tensor:
        # As another thread would, meanwhile.
        torch.default_generator.manual_seed(7)
        return x * 2

    with torch.random.fork_rng():
        torch.manual_seed(0)
        captured(backend, body)
        assert torch.initial_seed() == 7


def test_an_output_that_is_still_copied_is_not_overwritten(backend: CpuBackend) -> None:
    device, x = backend.devices[0], torch.ones(4)
    output, graph = captured(backend, lambda: x * 2)
    graph.replay()
    home = backend.host_empty((4,), torch.float32)
    device.results_out.wait(device.compute.record())
    device.results_out.copy(home, output)
    with pytest.raises(Unordered, match="replay on cpu:0/compute"):
        graph.replay()
    device.compute.wait(device.results_out.record())
    graph.replay()
    assert home.tolist() == [2, 2, 2, 2]


def test_memory_that_was_freed_is_not_read(backend: CpuBackend) -> None:
    held = [torch.ones(4)]
    _, graph = captured(backend, lambda: held[0] * 2)
    graph.replay()
    held.clear()
    with pytest.raises(Unordered, match="freed after it was captured"):
        graph.replay()


def test_what_a_body_returns_is_poison_until_a_replay(backend: CpuBackend) -> None:
    output, graph = captured(backend, lambda: torch.ones(4) * 2)
    assert output.isnan().all()
    graph.replay()
    assert output.tolist() == [2, 2, 2, 2]


def test_a_graph_overwrites_those_that_were_captured_later_into_its_pool(backend: CpuBackend) -> None:
    device, x, pool = backend.devices[0], torch.ones(4), backend.devices[0].graph_pool()
    with device.computing():
        first, one = device.capture(lambda _: x * 2, pool=pool)
        second, two = device.capture(lambda _: first * 2, pool=pool)
    one.replay()
    two.replay()
    assert (first.tolist(), second.tolist()) == ([2] * 4, [4] * 4)
    one.replay()
    assert second.isnan().all()


def test_uninitialised_memory_stays_poison(backend: CpuBackend) -> None:
    output, graph = captured(backend, lambda: torch.empty(3, 2))
    graph.replay()
    assert output.isnan().all()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda x: x.sum().item(), "reads values"),
        (lambda x: x[x > 0], "reads values"),
        (lambda x: x + torch.tensor([0.0, 1.0, 2.0, 3.0]), "values of Python"),
        (lambda x: x.expand(4, 4).to_sparse(), "reads values|layout"),
        (lambda x: x.bernoulli(0.5, generator=torch.Generator()), "a generator of its own"),
        (lambda x: torch.dropout(x, 0.5, True), "draws random numbers"),
        (lambda x: x.view(2, 3), "RuntimeError: shape"),
    ],
)
def test_refused_with_the_reason(backend: CpuBackend, body: Callable, reason: str) -> None:
    x = torch.ones(4)
    with pytest.raises(NotCapturable, match=reason):
        captured(backend, lambda: body(x))


class Noisy(nn.Module):
    """Two layers with dropout, an in-place operation and a buffer that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        hidden = torch.relu_(torch.dropout(self.first(x), 0.3, self.training))
        return torch.nn.functional.layer_norm(self.second(hidden) + x, (6,))


@given(seeds=st.lists(st.integers(0, 2**40), min_size=1, max_size=3), rows=st.integers(1, 4))
def test_replays_have_the_bits_of_eager_runs(seeds: list[int], rows: int) -> None:
    torch.manual_seed(0)
    layer, plain = Noisy(), Noisy()
    plain.load_state_dict(layer.state_dict())
    x = torch.zeros(rows, 6, requires_grad=True)
    for parameter in (x, *layer.parameters()):
        parameter.grad = torch.zeros_like(parameter)

    def body() -> torch.Tensor:
        output = layer(x)
        output.square().sum().backward()
        return output

    output, graph = captured(CpuBackend(1), body, num_draws=1)
    own = torch.zeros(rows, 6, requires_grad=True)
    for seed in seeds:
        values = torch.randn(rows, 6)
        x.data.copy_(values)
        own.data.copy_(values)
        graph.replay((seed,))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            expected = plain(own)
        expected.square().sum().backward()
        assert torch.equal(output, expected)
    assert layer.count.item() == len(seeds)
    for one, other in zip((x, *layer.parameters()), (own, *plain.parameters()), strict=True):
        assert torch.equal(one.grad, other.grad)
