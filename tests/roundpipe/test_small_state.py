"""Optimizer state in 16 and 8 bits in the engine: trained with, saved, loaded as another kind, and counted."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import roundpipe
import torch
from checkpointing import equal, job, with_dropout
from plain import mlp
from roundpipe import CheckpointMismatch, CheckpointWarning, RoundPipe, Runtime, load_checkpoint, save_checkpoint
from rp_engine.engine.memory.forecast import MemoryForecast
from rp_state.host_bytes.kinds import HostBytes
from rp_transfer import HostLimit

KINDS = ("bf16", "8bit")
OPTIMIZERS = (roundpipe.optim.AdamW, roundpipe.optim.Lion, roundpipe.optim.Adafactor)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda made: made.__name__)
def test_a_resumed_training_is_the_same_to_the_last_bit(tmp_path: Path, optimizer: Any, kind: str) -> None:
    how = {"optimizer": partial(optimizer, state=kind), "dtype": torch.bfloat16}
    torch.manual_seed(3)
    with Runtime("cpu:2") as runtime:
        own = job(runtime, **how)
        own.train(0, 4)
        save_checkpoint(tmp_path / "c", own.model, own.optimizer, step=4, **own.parts).wait()
        wanted, weights = own.train(4, 7), own.weights()
    with Runtime("cpu:1") as runtime:
        other = job(runtime, layers=with_dropout(5), **how)
        assert load_checkpoint(tmp_path / "c", other.model, other.optimizer, **other.parts).notes == ()
        assert other.train(4, 7) == wanted
        assert equal(other.weights(), weights)


@pytest.mark.few(1)
@pytest.mark.parametrize(("was", "now"), [("fp32", "8bit"), ("8bit", "fp32"), ("bf16", "8bit"), ("8bit", "bf16")])
def test_a_checkpoint_is_loaded_as_another_kind_and_says_so(tmp_path: Path, was: str, now: str) -> None:
    with Runtime("cpu:1") as runtime:
        own = job(runtime, optimizer=partial(roundpipe.optim.AdamW, state=was))
        own.train(0, 2)
        save_checkpoint(tmp_path / "c", own.model, own.optimizer, step=2, **own.parts).wait()
        other = job(runtime, optimizer=partial(roundpipe.optim.AdamW, state=now))
        names = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "8bit": "8 bits"}
        with pytest.warns(CheckpointWarning, match=f"state was {names[was]} and is {names[now]} now"):
            load_checkpoint(tmp_path / "c", other.model, other.optimizer, **other.parts)
        # Loading converts all of it, before the first step.
        parameters = [one for group in other.optimizer.param_groups for one in group["params"]]
        assert all(("exp_avg_codes" in other.optimizer.state[one]) == (now == "8bit") for one in parameters)
        other.train(2, 4)


class Scaled(torch.nn.Module):
    """Multiplies by one number."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.numbers = torch.nn.Parameter(torch.tensor(2.0)), torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.number * self.numbers


@pytest.mark.parametrize("kind", ["fp32", *KINDS])
def test_nothing_is_said_of_counters_and_scales_in_a_parameters_shape(tmp_path: Path, kind: str) -> None:
    how = {"optimizer": partial(roundpipe.optim.AdamW, state=kind), "optim_dtype": torch.bfloat16}
    with Runtime("cpu:1") as runtime:
        own = job(runtime, layers=torch.nn.Sequential(Scaled(), *mlp()[:3], torch.nn.Linear(6, 3)), **how)
        own.train(0, 2)
        save_checkpoint(tmp_path / "c", own.model, own.optimizer, step=2, **own.parts).wait()
        other = job(runtime, layers=torch.nn.Sequential(Scaled(), *mlp()[:3], torch.nn.Linear(6, 3)), **how)
        assert load_checkpoint(tmp_path / "c", other.model, other.optimizer, **other.parts).notes == ()


def test_state_in_8_bits_is_refused_by_torchs_optimizer(tmp_path: Path) -> None:
    with Runtime("cpu:1") as runtime:
        own = job(runtime, optimizer=partial(roundpipe.optim.AdamW, state="8bit"))
        own.train(0, 2)
        save_checkpoint(tmp_path / "c", own.model, own.optimizer, step=2, **own.parts).wait()
        other = job(runtime, optimizer=torch.optim.AdamW)
        before = {name: value.clone() for name, value in other.weights().items()}
        with pytest.raises(
            CheckpointMismatch, match=r"state in 8 bits, which torch\.optim\.adamw\.AdamW does not support"
        ):
            load_checkpoint(tmp_path / "c", other.model, other.optimizer, **other.parts)
        assert equal(other.weights(), before)


@pytest.mark.parametrize(("kind", "bytes_each"), [("fp32", 8), ("bf16", 4), ("8bit", 2.125)])
def test_reports_and_forecasts_count_it(kind: Any, bytes_each: float) -> None:
    with Runtime("cpu:1") as runtime:
        model = RoundPipe(
            torch.nn.Sequential(torch.nn.Linear(256, 256, bias=False), torch.nn.Linear(256, 256, bias=False)),
            optim_dtype=torch.float32,
            runtime=runtime,
        )
        optimizer = roundpipe.optim.AdamW(model.optim_parameters(), state=kind)
        counters = 2 * 4
        wanted = 2 * 256 * 256 * bytes_each + counters
        assert model.memory_forecast(optimizer).whole.optimizer_state == wanted
        x = torch.randn(2, 256)
        model.forward_backward(input_args=(x,), label=x, loss_fn=torch.nn.functional.mse_loss)
        model.step(optimizer.step)
        model.synchronize()
        assert model.memory_report(optimizer).optimizer_bytes == wanted


def test_refusals_suggest_it_where_state_is_whole() -> None:
    def told(state: int) -> str:
        whole = HostBytes(weights=20, gradients=20, masters=40, optimizer_state=state)
        return MemoryForecast("m", "to train", whole, HostBytes(), HostLimit("the machine", 100, 100)).explained(
            "needs"
        )

    assert 'state="bf16" or "8bit" of roundpipe.optim' in told(80)
    assert 'state="bf16"' not in told(20)


def test_refusals_do_not_suggest_it_twice_where_masters_are_in_halves() -> None:
    def told(state: int) -> str:
        whole = HostBytes(weights=20, gradients=20, masters=20, optimizer_state=state)
        limit = HostLimit("the machine", 100, 100)
        return MemoryForecast("m", "to train", whole, HostBytes(), limit, adam_bytes=80).explained("needs")

    assert 'state="bf16" or "8bit" of roundpipe.optim' in told(80)
    assert 'state="bf16"' not in told(21)


def test_steps_that_are_late_have_the_same_numbers() -> None:
    # The noise goes by the step's number and the parameter's place, not by when the step runs.
    def trained(devices: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        with Runtime(devices) as runtime:
            own = job(runtime, layers=mlp(), optimizer=partial(roundpipe.optim.AdamW, state="8bit"), is_async=True)
            own.train(0, 4)
            return own.weights()

    assert equal(trained("cpu:1"), trained("cpu:2"))
