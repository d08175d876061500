"""A model that rp-engine trains without a wrapper is saved and goes on as if it had not stopped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rp_batch
import torch
from rp_checkpoint import (
    CheckpointManager,
    ModelFacts,
    PartFacts,
    PlainModel,
    description_of,
    is_finished,
    load_checkpoint,
    save_checkpoint,
)
from rp_checkpoint.errors import CheckpointMismatch, CheckpointWarning
from rp_engine import Arrivals, Engine, RoundPipeRunConfig, Runtime, WholeModel
from rp_sched import Plan
from safetensors.torch import load_file
from torch import nn


class Training:
    """Trains a small row of layers by the engine alone."""

    def __init__(self, runtime: Runtime, seed: int) -> None:
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.engine = Engine("plain", lambda: list(module), runtime)
        self.whole = WholeModel("plain", [self.engine.host], runtime)
        self.model = PlainModel(runtime, self.whole, module)
        self.optimizer = torch.optim.AdamW(self.whole.masters().values(), lr=0.05)

    def backward(self) -> float:
        """One training call; returns its loss."""
        parts = rp_batch.split(((torch.ones(4, 4),), {}), 2)
        labels = rp_batch.split(torch.ones(4, 1), 2)
        arrivals = Arrivals(self.model.runtime.backend, ())
        config = RoundPipeRunConfig()
        losses, _ = self.engine.forward_backward(parts, labels, arrivals, _loss, config, keep=False)
        return float(losses)

    def train(self, steps: int) -> list[float]:
        """Some asynchronous steps; returns the losses of their calls."""
        losses = []
        for _ in range(steps):
            losses.append(self.backward())
            self.whole.step(lambda: (self.optimizer.step(), self.optimizer.zero_grad()), is_async=True)
        return losses


def _loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs - labels).square().sum()


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with Runtime("cpu:2") as runtime:
        yield runtime


def test_a_model_without_a_wrapper_continues_to_the_last_bit(runtime: Runtime, tmp_path: Path) -> None:
    own, resumed = Training(runtime, seed=0), Training(runtime, seed=1)
    own.train(3)
    saved = save_checkpoint(tmp_path / "c", own.model, own.optimizer, step=3)
    expected = own.train(3)

    loaded = load_checkpoint(saved.path, resumed.model, resumed.optimizer)

    assert loaded.step == 3
    assert resumed.train(3) == expected


def test_files_have_the_names_of_the_modules_state_dict(runtime: Runtime, tmp_path: Path) -> None:
    own = Training(runtime, seed=0)

    saved = save_checkpoint(tmp_path / "c", own.model, own.optimizer)

    found = load_file(saved.path / "model.safetensors")
    assert {name: tuple(one.shape) for name, one in found.items()} == {
        name: tuple(one.shape) for name, one in own.model.module.state_dict().items()
    }
    assert all(torch.equal(found[name], one) for name, one in own.model.module.state_dict().items())


def test_a_folder_tells_what_it_is_without_being_loaded(runtime: Runtime, tmp_path: Path) -> None:
    own = Training(runtime, seed=0)
    manager = CheckpointManager(tmp_path)

    path = manager.save(own.model, step=7, metric=0.5, wait=True).path

    assert is_finished(path)
    assert not is_finished(tmp_path)
    facts = description_of(path)["facts"]
    assert (facts["step"], facts["metric"]) == (7, 0.5)
    assert facts["model"]["class"] == "torch.nn.modules.container.Sequential"


def test_a_model_of_other_names_is_refused(runtime: Runtime, tmp_path: Path) -> None:
    own, other = Training(runtime, seed=0), Training(runtime, seed=0)
    saved = save_checkpoint(tmp_path / "c", own.model)

    renamed = replace(other.model, module=nn.ModuleDict({"row": other.model.module}))

    with pytest.raises(CheckpointMismatch, match=r"0\.bias, 0\.weight, 2\.bias and 1 more only in the checkpoint"):
        load_checkpoint(saved.path, renamed)


def test_a_wrapper_of_ones_own_says_how_it_was_trained(runtime: Runtime, tmp_path: Path) -> None:
    class Own(PlainModel):
        def checkpoint_facts(self) -> ModelFacts:
            part = PartFacts({"num_microbatch": 4}, 2, {("fused", 4): plan})
            return ModelFacts("own.Model", torch.float32, {"row": part})

    plan = Plan((range(0, 1),), range(1, 3), (range(0, 1),))
    plain = Training(runtime, seed=0).model
    model = Own(plain.runtime, plain.whole, plain.module)

    loaded = load_checkpoint(save_checkpoint(tmp_path / "c", model).path, model)

    assert loaded.plans == {("row", "fused", 4): plan}
    assert loaded.num_microbatch == {"row": 4}


def test_a_warning_points_at_the_line_that_saves(runtime: Runtime, tmp_path: Path) -> None:
    own = Training(runtime, seed=0)
    own.backward()

    with pytest.warns(CheckpointWarning, match="gradients of calls since the last step") as told:
        save_checkpoint(tmp_path / "c", own.model)

    assert told[0].filename == __file__


@pytest.mark.parametrize("model", [nn.Linear(2, 2), None, PlainModel, "model"], ids=lambda one: type(one).__name__)
def test_what_is_no_model_that_an_engine_trains_is_refused(model: Any, tmp_path: Path) -> None:
    for use in (save_checkpoint, load_checkpoint):
        with pytest.raises(TypeError, match=r"must be a RoundPipe or AutoRoundPipe, but is a .*; wrap it first"):
            use(tmp_path / "c", model)
