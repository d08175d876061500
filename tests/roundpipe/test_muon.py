"""Muon in the engine: the steps of plain training, late or not, checkpoints, forecasts, and experts in stacks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing import Job, equal, job
from plain import batch, mlp, square_error
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, load_checkpoint, save_checkpoint
from roundpipe.optim import Muon, muon_groups


def made(parameters: Any, *, lr: float, state: Any = "fp32") -> Muon:
    """Muon for matrices and AdamW for biases; the iteration in fp32, whose last bits stay last bits."""
    every = list(parameters)
    others = {"params": [one for one in every if one.ndim < 2], "use_muon": False, "lr": 0.01}
    matrices = {"params": [one for one in every if one.ndim == 2]}
    return Muon([matrices, others], lr=lr, ns_dtype=torch.float32, state=state)


def muon_job(runtime: Runtime, **options: Any) -> Job:
    state = options.pop("state", "fp32")
    return job(runtime, layers=mlp(width=8), optimizer=partial(made, state=state), **options)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_training_is_that_of_plain_torch(devices: str, is_async: bool) -> None:
    layers = mlp(width=8)
    with Runtime(devices) as runtime:
        own = muon_job(runtime, is_async=is_async)
        # A scheduler would have to be repeated below.
        own.scheduler = None
        own.train(0, 4)
        found = own.weights()
    for name, wanted in plain_training(layers, 4, is_async=is_async).items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-5)


def plain_training(layers: torch.nn.Module, steps: int, *, is_async: bool) -> dict[str, torch.Tensor]:
    """Muon on plain parameters, torch's AdamW for the rest; gradients are a step old if steps are late."""
    named = dict(layers.named_parameters())
    matrices = [one for one in named.values() if one.ndim == 2]
    others = [one for one in named.values() if one.ndim < 2]
    optimizers = (
        Muon(matrices, lr=0.05, ns_dtype=torch.float32),
        torch.optim.AdamW(others, lr=0.01, weight_decay=0.1),
    )
    before = [one.detach().clone() for one in named.values()]
    for step in range(steps):
        now = [one.detach().clone() for one in named.values()]
        load(named.values(), before if is_async else now)
        inputs, labels = batch(8, step)
        grads = torch.autograd.grad(square_error(layers(inputs), labels), list(named.values()))
        load(named.values(), now)
        for one, grad in zip(named.values(), grads, strict=True):
            one.grad = grad
        for optimizer in optimizers:
            optimizer.step()
        before = now
    return {name: value.detach().clone() for name, value in named.items()}


def load(parameters: Any, values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for one, value in zip(parameters, values, strict=True):
            one.copy_(value)


@pytest.mark.few(1)
@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
def test_a_resumed_training_is_the_same_to_the_last_bit(tmp_path: Path, state: str) -> None:
    with Runtime("cpu:2") as runtime:
        own = muon_job(runtime, state=state, dtype=torch.bfloat16)
        own.train(0, 3)
        save_checkpoint(tmp_path / "c", own.model, own.optimizer, step=3, **own.parts).wait()
        wanted, weights = own.train(3, 5), own.weights()
    with Runtime("cpu:1") as runtime:
        other = muon_job(runtime, state=state, dtype=torch.bfloat16)
        assert load_checkpoint(tmp_path / "c", other.model, other.optimizer, **other.parts).notes == ()
        assert other.train(3, 5) == wanted
        assert equal(other.weights(), weights)


class Experts(torch.nn.Module):
    """Experts whose weights are one stack, and who all see everything."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = torch.nn.Parameter(torch.randn(3, 16, 8, generator=generator) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 8) to (batch, 16)."""
        return torch.einsum("eoi,bi->bo", self.up, x).tanh()


@pytest.mark.few(1)
@pytest.mark.parametrize(("state", "bytes_each"), [("fp32", 4), ("bf16", 2), ("8bit", 1.0625)])
def test_experts_are_trained_and_counted(state: Any, bytes_each: float) -> None:
    row = torch.nn.Sequential(torch.nn.Embedding(8, 8), Experts(), torch.nn.Linear(16, 8, bias=False))
    with Runtime("cpu:1") as runtime:
        config = RoundPipeRunConfig(num_microbatch=2)
        model = RoundPipe(row, optim_dtype=torch.float32, runtime=runtime, model_run_config=config)
        groups = muon_groups(model.named_model, model.optim_named_parameters(), lr=3e-3)
        optimizer = Muon(groups, lr=0.02, state=state)
        assert [[one.numel() for one in group["params"]] for group in groups] == [[384, 128], [64]]
        counters = 4 if state == "fp32" else 3 * 4
        wanted = (512 + 2 * 64) * bytes_each + counters
        assert model.memory_forecast(optimizer).whole.optimizer_state == wanted
        tokens = torch.arange(8)
        losses: list[float] = []
        for _ in range(15):
            loss = model.forward_backward((tokens,), label=tokens, loss_fn=torch.nn.functional.cross_entropy)
            losses.append(loss.item())
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        model.synchronize()
        assert model.memory_report(optimizer).optimizer_bytes == wanted
    assert losses[-1] < 0.75 * losses[0]
