"""Checkpoints are in the layout of `save_pretrained`: transformers and PEFT load them, also converted weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing import equal
from peft import LoraConfig, PeftModel, get_peft_model
from roundpipe import (
    AutoRoundPipe,
    CheckpointMismatch,
    CheckpointWarning,
    RoundPipe,
    RoundPipeRunConfig,
    Runtime,
    from_pretrained,
    load_checkpoint,
    save_checkpoint,
    wrap_model_to_roundpipe,
)
from rp_sched import Plan
from safetensors.torch import load_file
from tiny_models import tied, untied, with_experts
from torch import nn
from transformers import (
    AutoModelForCausalLM,
)

Wrapped = RoundPipe | AutoRoundPipe


def wrapped(
    make: Callable[[], nn.Module], runtime: Runtime, seed: int = 0, plan: Plan | None = None, **kwargs: Any
) -> Wrapped:
    torch.manual_seed(seed)
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
    return wrap_model_to_roundpipe(make(), runtime=runtime, model_run_config=config, **kwargs)


def train(model: Wrapped, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    found: list[float] = []
    for step in range(first, last):
        ids = torch.randint(0, 40, (4, 5), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (tied, torch.bfloat16),
        pytest.param(untied, torch.float32, marks=pytest.mark.slow),
        pytest.param(with_experts, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_from_pretrained_loads_a_checkpoint_and_training_goes_on_from_it(
    tmp_path: Path, two: Runtime, make: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    def half() -> nn.Module:
        return make().to(dtype)

    # Gradients of tied 16-bit weights are rounded once a task, so they depend on the plan, which is measured.
    plan = Plan([range(4)], None, [range(2, 4), range(2)])
    model = wrapped(half, two, plan=plan, optim_dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.optim_parameters(), lr=0.05)
    train(model, optimizer, 0, 2)
    path = save_checkpoint(tmp_path / "c", model, optimizer, shard_bytes=8000).path
    wanted = train(model, optimizer, 2, 4)
    other = wrapped(half, two, 1, plan, optim_dtype=torch.float32)
    another = torch.optim.AdamW(other.optim_parameters(), lr=0.05)
    load_checkpoint(path, other, another)
    assert train(other, another, 2, 4) == wanted
    # What transformers saves of the same model, and what it loads.
    path = save_checkpoint(tmp_path / "d", model, optimizer, shard_bytes=8000).path
    model.save_pretrained(tmp_path / "truth")
    wanted_files = every_tensor(tmp_path / "truth")
    found_files = every_tensor(path)
    assert equal(found_files, wanted_files)
    assert (path / "config.json").read_text() == (tmp_path / "truth/config.json").read_text()
    found = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).state_dict()
    assert equal(found, model.state_dict())
    assert equal(from_pretrained(path, dtype=dtype, runtime=two).state_dict(), found)


def every_tensor(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("model*.safetensors"):
        found |= load_file(file)
    return found


def lora() -> nn.Module:
    how = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.2)
    return get_peft_model(untied(), how)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("preset", [None, False], ids=["a row", "taken apart"])
def test_adapters_are_saved_as_peft_saves_them_and_go_on(
    tmp_path: Path, two: Runtime, preset: bool | None
) -> None:
    how = {"use_sequential_preset": preset, "lower_threshold": 0}
    model = wrapped(lora, two, **how)
    optimizer = torch.optim.AdamW(model.optim_parameters(), lr=0.05)
    train(model, optimizer, 0, 2)
    path = save_checkpoint(tmp_path / "c", model, optimizer, step=2).path
    wanted = train(model, optimizer, 2, 4)
    other = wrapped(lora, two, **how)
    another = torch.optim.AdamW(other.optim_parameters(), lr=0.05)
    load_checkpoint(path, other, another)
    assert train(other, another, 2, 4) == wanted
    # PEFT loads it, and it is the model after that step.
    truth = wrapped(lora, two, **how)
    optimizer = torch.optim.AdamW(truth.optim_parameters(), lr=0.05)
    train(truth, optimizer, 0, 2)
    truth.save_pretrained(tmp_path / "truth")
    assert equal(*(load_file(folder / "adapter_model.safetensors") for folder in (path, tmp_path / "truth")))
    assert (path / "adapter_config.json").exists()
    torch.manual_seed(0)
    found = PeftModel.from_pretrained(untied(), path).state_dict()
    assert equal(found, truth.state_dict())
    # The model below is not in it.
    assert not (path / "model.safetensors").exists()
    assert sum(file.stat().st_size for file in path.rglob("*.safetensors")) < 40_000


def test_full_and_adapted_models_are_told_apart(tmp_path: Path, two: Runtime) -> None:
    full, adapted = wrapped(untied, two), wrapped(lora, two)
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    one = save_checkpoint(tmp_path / "full", full).path
    other = save_checkpoint(tmp_path / "adapted", adapted).path
    with pytest.raises(CheckpointMismatch, match="is of a whole model, but this is a model with adapters"):
        load_checkpoint(one, adapted)
    with pytest.raises(CheckpointMismatch, match="add the same adapters before wrapping"):
        load_checkpoint(other, full)
    assert equal(adapted.state_dict(), before)


def test_adapters_of_a_model_with_other_weights_are_told(tmp_path: Path, two: Runtime) -> None:
    path = save_checkpoint(tmp_path / "c", wrapped(lora, two)).path
    with pytest.warns(CheckpointWarning, match="trained on a model with other weights"):
        load_checkpoint(path, wrapped(lora, two, 1))


def test_adapters_of_another_rank_are_refused(tmp_path: Path, two: Runtime) -> None:
    path = save_checkpoint(tmp_path / "c", wrapped(lora, two)).path

    def wider() -> nn.Module:
        how = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
        return get_peft_model(untied(), how)  # type: ignore[arg-type]

    with pytest.raises(CheckpointMismatch, match=r"lora_A.default.weight has shape \(4, 16\)"):
        load_checkpoint(path, wrapped(wider, two))


@pytest.mark.later
def test_a_cut_that_is_given_again_rounds_as_before(tmp_path: Path) -> None:
    def train_in(runtime: Runtime, plan: Plan | None, path: Path | None) -> tuple[Any, list[float]]:
        model = wrapped(lambda: untied().to(torch.bfloat16), runtime, optim_dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.optim_parameters(), lr=0.05)
        loaded = None if path is None else load_checkpoint(path, model, optimizer)
        config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
        losses: list[float] = []
        for step in range(0 if path is None else 2, 2 if path is None else 4):
            ids = torch.randint(0, 40, (4, 5), generator=torch.Generator().manual_seed(step))
            losses.append(
                model.forward_backward(input_kwargs={"input_ids": ids, "labels": ids}, run_config=config).item()
            )
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
            if path is None and step == 1:
                save_checkpoint(tmp_path / "c", model, optimizer, step=2)
        return (model, loaded), losses

    with Runtime("cpu:1") as runtime:
        train_in(runtime, None, None)
        (_, loaded), _ = train_in(runtime, None, tmp_path / "c")
    plan = loaded.plans["", "fused", 2]
    with Runtime("cpu:1") as runtime:
        _, first = train_in(runtime, plan, tmp_path / "c")
    with Runtime("cpu:2") as runtime:
        _, second = train_in(runtime, plan, tmp_path / "c")
    assert first == second
