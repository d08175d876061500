"""Frozen layers cost nothing in backward, and adapters train alone over a base that stays in its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plain import PLAN_NAMES, assert_near, batch, gradients, mlp, plans, square_error, train_call, twin, weights
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, profile
from rp_sched import Plan
from safetensors.torch import load_file, save_file
from torch import nn

pytestmark = pytest.mark.timeout(60)
FROZEN = ("layer 0", "layer 1", "layer 2", "layer 3")


def frozen_bottom() -> nn.Sequential:
    """Five layers, of which only the last one has something to train."""
    layers = mlp()
    layers[:3].requires_grad_(False)
    return layers


def touching_frozen(taken: profile, kind: str) -> list[str]:
    """The names of the spans of one kind that are about a frozen layer."""
    return [span.name for span in taken.spans if span.kind == kind and any(name in span.name for name in FROZEN)]


@pytest.mark.pairwise
@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("plan_name", PLAN_NAMES)
def test_for_backward_frozen_bottom_layers_are_neither_uploaded_nor_run(
    runtime: Runtime, tmp_path: Path, plan_name: str, grain: Any
) -> None:
    layers = frozen_bottom()
    truth = twin(layers)
    plan = plans(5, 3)[plan_name]
    config = RoundPipeRunConfig(
        num_microbatch=3,
        recompute_grain=grain,
        execute_plan=None if plan is None else Plan(plan.forward, plan.fused, plan.backward),
    )
    model = RoundPipe(layers, runtime=runtime, model_run_config=config)
    x, y = batch(6)
    with profile(tmp_path / "forward.json") as forward:
        loss = square_error(model(x), y)
    with profile(tmp_path / "backward.json") as backward:
        loss.backward()
        model.synchronize()
    assert touching_frozen(forward, "upload")
    assert touching_frozen(backward, "upload") == []
    assert touching_frozen(backward, "layer") == []
    assert [span.name for span in backward.spans if span.kind == "layer" and "layer 4" in span.name]
    train_call(truth, x, y, microbatches=3)
    assert_near(gradients(layers), gradients(truth), 1e-5)


@pytest.mark.parametrize("plan_name", PLAN_NAMES)
def test_in_a_fused_call_frozen_bottom_layers_run_once_a_microbatch(
    runtime: Runtime, tmp_path: Path, plan_name: str
) -> None:
    layers = frozen_bottom()
    truth = twin(layers)
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plans(5, 3)[plan_name])
    model = RoundPipe(layers, runtime=runtime, model_run_config=config)
    x, y = batch(6)
    # The first runs of layers may be tried twice.
    model(x)
    with profile(tmp_path / "trace.json") as taken:
        model.forward_backward((x,), None, y, square_error)
        model.synchronize()
    assert len(touching_frozen(taken, "layer")) == 3 * len(FROZEN)
    train_call(truth, x, y, microbatches=3)
    assert_near(gradients(layers), gradients(truth), 1e-5)


class Lora(nn.Module):
    """What PEFT puts in a linear layer's place: the frozen layer, and named pairs of small ones beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        self.scaling = {"default": 0.5}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.base_layer(x)
        for name, into in self.lora_A.items():
            found = found + self.lora_B[name](into(self.lora_dropout[name](x))) * self.scaling[name]
        return found


def adapted() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Lora(nn.Linear(4, width)) for width in (4, 4, 4, 3)))


def from_file(layers: nn.Sequential, path: Path) -> nn.Sequential:
    """The same layers, whose frozen weights are those of a memory-mapped file."""
    frozen = {name: tensor for name, tensor in layers.state_dict().items() if "base_layer" in name}
    save_file(frozen, path)
    found = twin(layers)
    found.load_state_dict(load_file(path), strict=False, assign=True)
    return found


def lies_in(path: Path, tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is a file's, mapped into this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split(" ", 1)[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return line.endswith(str(path))
    return False


@pytest.mark.slow
@pytest.mark.parametrize("plan_name", PLAN_NAMES)
def test_adapters_train_alone_over_a_base_that_stays_in_its_mapped_file(
    runtime: Runtime, tmp_path: Path, plan_name: str
) -> None:
    path = tmp_path / "base.safetensors"
    truth = adapted()
    layers = from_file(truth, path)
    before = path.read_bytes()
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plans(4, 3)[plan_name])
    model = RoundPipe(layers, runtime=runtime, model_run_config=config, pin_model="off")
    assert all("lora_" in name for name, _ in model.optim_named_parameters())
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.05)
    plain = torch.optim.SGD([p for p in truth.parameters() if p.requires_grad], lr=0.05)
    for seed in range(3):
        x, y = batch(7, seed)
        loss = model.forward_backward((x,), None, y, square_error)
        assert_near(loss, train_call(truth, x, y, microbatches=3), 1e-4)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        plain.step()
        plain.zero_grad()
    model.synchronize()
    assert_near(weights(layers), weights(truth), 1e-4)
    assert all(lies_in(path, layer.base_layer.weight) for layer in layers)
    assert all(parameter.grad is None for parameter in layers.parameters() if not parameter.requires_grad)
    assert path.read_bytes() == before
