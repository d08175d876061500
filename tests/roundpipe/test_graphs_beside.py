"""`launch="graphs"` beside everything else that a model may be trained with: the bits of runs by Python."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from roundpipe import GradScaler, RoundPipe, RoundPipeRunConfig, Runtime, wrap_model_to_roundpipe
from roundpipe.optim import AdamW
from rp_sched import Plan
from test_graphs import (
    LAYERS,
    MICROBATCHES,
    PLANS,
    Last,
    Residual,
    assert_same,
    num_measured,
    on_few_devices,
    replays,
    row,
    summed_loss,
)
from torch import nn

__all__ = ["replays"]


@dataclass(frozen=True)
class Way:
    """A way to train. `without`: why its layers run without graphs, if they do."""

    layers: Callable[[], nn.Sequential] = row
    wrap: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    scaler: bool = False
    is_async: bool = False
    calls: int = 1
    autocast: torch.dtype | None = None
    grad_of_input: bool = False
    without: str | None = None


class Counting(Residual):
    """Writes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(x)


def adapted() -> nn.Sequential:
    """Weights are frozen but for one small matrix a layer."""
    layers = row()
    for layer in layers[:-1]:
        layer.up.requires_grad_(False)
        layer.norm.requires_grad_(False)
        layer.down.bias.requires_grad_(False)
    return layers


def hooked() -> nn.Sequential:
    layers = row()
    for layer in layers[:-1]:
        layer.down.register_forward_hook(lambda *seen: seen[-1] * 2)
    return layers


def tied() -> nn.Sequential:
    layers = row()
    layers[3].up.weight = layers[1].up.weight
    return layers


def frozen_first() -> nn.Sequential:
    layers = row()
    layers[:2].requires_grad_(False)
    return layers


def counting() -> nn.Sequential:
    return row(*(Counting() for _ in range(LAYERS - 1)))


WAYS = {
    "asynchronous steps": Way(is_async=True),
    "two blocks": Way(wrap={"double_buffer": True}, is_async=True),
    "masters in halves": Way(lambda: row().bfloat16(), wrap={"master": "split"}),
    "steps in backward": Way(lambda: row().bfloat16(), wrap={"master": "split", "step_in_backward": True}),
    "unpinned": Way(wrap={"pin_model": "off"}),
    "accumulated calls": Way(calls=3),
    "a scaler": Way(scaler=True),
    "autocast": Way(autocast=torch.bfloat16),
    "adapters": Way(adapted),
    "frozen layers": Way(frozen_first),
    "tied weights": Way(tied),
    "gradients of inputs": Way(grad_of_input=True),
    "layer by layer": Way(
        config={"recompute_grain": "layer"}, without='recompute_grain="layer" recomputes each layer apart'
    ),
    "hooks": Way(hooked, without="it has hooks"),
    "buffers": Way(counting, without="it has buffers"),
    "two microbatches": Way(config={"num_microbatch": 2}),
}


def trained(way: Way, launch: str, plan: Plan, runtime: Runtime, steps: int = 12) -> list[torch.Tensor]:
    """Losses, gradients of inputs, and the weights at last."""
    torch.manual_seed(0)
    layers = way.layers()
    dtype, found = next(layers.parameters()).dtype, []
    config = RoundPipeRunConfig(
        **{"num_microbatch": MICROBATCHES, "launch": launch, "execute_plan": plan, **way.config}
    )
    model = RoundPipe(layers, torch.float32, model_run_config=config, runtime=runtime, **way.wrap)
    optimizer = AdamW(model.optim_parameters(), lr=1e-2)
    scaler = GradScaler(8.0, growth_interval=3, runtime=runtime) if way.scaler else None

    def update() -> None:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
        optimizer.zero_grad()

    for step in range(steps + num_measured(runtime)):
        for call in range(way.calls):
            torch.manual_seed(17 * step + call)
            x = torch.randn(2 * MICROBATCHES, 8, dtype=dtype, requires_grad=way.grad_of_input)
            label = torch.randint(3, (2 * MICROBATCHES,))
            during = {"optimizer": optimizer} if model.steps_in_backward and call == way.calls - 1 else {}
            with torch.autocast("cpu", way.autocast, enabled=way.autocast is not None):
                loss = model.forward_backward((x,), label=label, loss_fn=scaled(scaler), **during)
            found += [loss.detach()] if x.grad is None else [loss.detach(), x.grad]
        if not model.steps_in_backward:
            model.step(update, is_async=way.is_async)
        if scaler is not None:
            scaler.update()
    model.synchronize()
    return found + [parameter.detach().clone() for parameter in layers.parameters()]


def scaled(scaler: GradScaler | None) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    if scaler is None:
        return summed_loss
    return lambda output, label: scaler.scale(summed_loss(output, label))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["all fused", "other stages back"])
@pytest.mark.parametrize("name", WAYS)
def test_a_way_of_training_has_the_bits_of_runs_by_python(
    name: str, plan: str, runtime: Runtime, replays: list[range], caplog: pytest.LogCaptureFixture
) -> None:
    way = WAYS[name]
    expected = trained(way, "eager", PLANS[plan], runtime)
    assert not replays

    with caplog.at_level(logging.INFO, "rp_engine"):
        found = trained(way, "graphs", PLANS[plan], runtime)

    assert_same(found, expected)
    if way.without is None:
        assert replays
    else:
        assert not replays
        assert f"run without graphs: {way.without}" in caplog.text


class Apart(nn.Module):
    """Is no row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(8, 8), nn.ModuleList(map(wide, range(3))), Last()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        for block in self.blocks:
            x = block(x) + x
        return self.last(x)


def wide(_: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))


@pytest.mark.slow
def test_parts_of_a_model_taken_apart_have_graphs_too(replays: list[range]) -> None:
    def run(launch: str, runtime: Runtime) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module, found = Apart(), []
        config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, launch=launch)
        model = wrap_model_to_roundpipe(module, lower_threshold=1, runtime=runtime, model_run_config=config)
        optimizer = AdamW(model.optim_parameters(), lr=1e-2)
        for step in range(60):
            torch.manual_seed(step)
            loss = summed_loss(model(torch.randn(2 * MICROBATCHES, 8)), torch.randint(3, (2 * MICROBATCHES,)))
            loss.backward()
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            found.append(loss.detach())
        model.synchronize()
        return found + [parameter.detach().clone() for parameter in module.parameters()]

    # With plans of its own, of which several devices would take some that add in another order.
    with Runtime("cpu:1") as runtime:
        expected = run("eager", runtime)
        assert_same(run("graphs", runtime), expected)
    assert replays


@pytest.mark.slow
@on_few_devices
def test_models_that_share_devices_have_graphs_of_their_own(runtime: Runtime, replays: list[range]) -> None:
    def run(launch: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, launch=launch, execute_plan=PLANS["two stages"])
        rows, found = [row().bfloat16(), row()], []
        models = [RoundPipe(one, torch.float32, model_run_config=config, runtime=runtime) for one in rows]
        optimizers = [AdamW(model.optim_parameters(), lr=1e-2) for model in models]
        for step in range(30):
            for model, optimizer, layers in zip(models, optimizers, rows, strict=True):
                torch.manual_seed(step)
                x = torch.randn(2 * MICROBATCHES, 8, dtype=next(layers.parameters()).dtype)
                label = torch.randint(3, (2 * MICROBATCHES,))
                found.append(model.forward_backward((x,), label=label, loss_fn=summed_loss).detach())
                model.step(lambda one=optimizer: (one.step(), one.zero_grad()))
        for model in models:
            model.synchronize()
        return found + [parameter.detach().clone() for layers in rows for parameter in layers.parameters()]

    expected = run("eager")
    assert_same(run("graphs"), expected)
    assert len(replays) > 20


@pytest.mark.slow
def test_a_model_that_only_evaluates_has_graphs(runtime: Runtime, replays: list[range]) -> None:
    def run(launch: str) -> list[torch.Tensor]:
        plan = Plan(forward=[range(LAYERS)])
        config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, launch=launch, execute_plan=plan)
        model = RoundPipe(row().eval(), model_run_config=config, runtime=runtime)
        with torch.no_grad():
            return [model(torch.full((2 * MICROBATCHES, 8), float(call))) for call in range(16)]

    assert_same(run("graphs"), run("eager"))
    assert replays


@pytest.mark.slow
def test_an_error_of_a_layer_under_graphs_comes_as_it_is(runtime: Runtime) -> None:
    class Failing(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if is_over:
                raise KeyError("mine")
            return super().forward(x)

    is_over = False
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, launch="graphs", execute_plan=PLANS["all fused"])
    layers = row(*(Failing() for _ in range(LAYERS - 1)))
    model = RoundPipe(layers, torch.float32, model_run_config=config, runtime=runtime)

    def call() -> None:
        label = torch.zeros(2 * MICROBATCHES, dtype=torch.long)
        model.forward_backward((torch.ones(2 * MICROBATCHES, 8),), label=label, loss_fn=summed_loss)

    for _ in range(12):
        call()
    is_over = True

    with pytest.raises(KeyError, match="mine") as raised:
        call()

    assert "layer 0 (Failing), forward, microbatch 0" in "".join(raised.value.__notes__)
