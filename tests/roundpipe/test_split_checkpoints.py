"""Checkpoints of masters in halves: resumed to the last bit, and loaded as whole ones and the other way."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import roundpipe
import torch
from checkpointing import Job, equal, job, with_dropout
from roundpipe import (
    CheckpointMismatch,
    CheckpointWarning,
    HostMemoryShort,
    Runtime,
    load_checkpoint,
    save_checkpoint,
)
from rp_optim import Master, SplitMaster, write_weights
from rp_optim.kernels.halves import to_halves
from rp_transfer import HostLimit
from safetensors.torch import load_file

HOW: dict[str, Any] = {"dtype": torch.bfloat16}
split = partial(job, master="split", **HOW)
whole = partial(job, master="whole", **HOW)


def values(own: Job) -> dict[str, torch.Tensor]:
    """Weights and masters after the last step."""
    own.model.synchronize()
    return {name: value.clone() for name, value in own.model.state_dict().items()} | masters(own)


def masters(own: Job) -> dict[str, torch.Tensor]:
    return {
        f"master of {name}": one.joined() if isinstance(one, SplitMaster) else one.detach().clone()
        for name, one in own.model.optim_named_parameters()
    }


def are_split(own: Job) -> bool:
    return all(isinstance(one, SplitMaster) and one.is_split for one in own.model.optim_parameters())


def save(own: Job, path: Path, step: int) -> None:
    save_checkpoint(path, own.model, own.optimizer, step=step, **own.parts).wait()


@pytest.mark.few(1)
@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("kind", ["fp32", "8bit"])
def test_a_resumed_training_is_the_same_to_the_last_bit(tmp_path: Path, kind: Any, is_async: bool) -> None:
    how = {"optimizer": partial(roundpipe.optim.AdamW, state=kind), "is_async": is_async}
    torch.manual_seed(3)
    with Runtime("cpu:2") as runtime:
        own = split(runtime, **how)
        own.train(0, 4)
        save(own, tmp_path / "c", 4)
        wanted, last = own.train(4, 7), values(own)
        assert are_split(own)
    with Runtime("cpu:1") as runtime:
        other = split(runtime, layers=with_dropout(5), **how)
        assert load_checkpoint(tmp_path / "c", other.model, other.optimizer, **other.parts).notes == ()
        assert other.train(4, 7) == wanted
        assert equal(values(other), last)
        assert are_split(other)


@pytest.mark.few(1)
@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("was", ["split", "whole"])
def test_either_kind_of_masters_goes_on_with_the_others_checkpoint(
    tmp_path: Path, was: str, is_async: bool
) -> None:
    made = {"split": split, "whole": whole}
    torch.manual_seed(3)
    with Runtime("cpu:1") as runtime:
        own = made.pop(was)(runtime, is_async=is_async)
        own.train(0, 4)
        save(own, tmp_path / "c", 4)
        other = next(iter(made.values()))(runtime, layers=with_dropout(5), is_async=is_async)
        assert load_checkpoint(tmp_path / "c", other.model, other.optimizer, **other.parts).notes == ()
        assert equal(masters(other), masters(own))
        # The random numbers are those of the checkpoint.
        state = torch.get_rng_state()
        losses, last = other.train(4, 7), values(other)
        torch.set_rng_state(state)
        assert own.train(4, 7) == losses
        assert equal(values(own), last)


def test_what_is_saved_are_fp32_masters_and_their_upper_halves(tmp_path: Path) -> None:
    with Runtime("cpu:1") as runtime:
        own = split(runtime)
        own.train(0, 3)
        save(own, tmp_path / "c", 3)
        # An asynchronous step: the model's own file has its result, which calls do not read yet.
        model = load_file(tmp_path / "c" / "model.safetensors")
        saved = load_file(next((tmp_path / "c").rglob("masters*.safetensors")))
        for name, value in masters(own).items():
            key = name.removeprefix("master of ")
            assert torch.equal(saved[f"masters/{key}"], value)
            assert torch.equal(model[key], to_halves(value)[0])
        own.model.synchronize()
        assert equal(model, own.model.state_dict())
        assert are_split(own)


def test_masters_made_whole_are_rounded_in_the_file_as_calls_will_read_them(tmp_path: Path) -> None:
    with Runtime("cpu:1") as runtime:
        own = split(runtime)
        own.train(0, 2)
        tie = 1 + 2.0**-8

        def update() -> None:
            with torch.no_grad():
                for master in own.model.optim_parameters():
                    master.fill_(tie)

        with pytest.warns(roundpipe.TrainingWarning, match="because fill_"):  # noqa: PT031 - it saves after the step
            own.model.step(update)
            save(own, tmp_path / "c", 3)
        model = load_file(tmp_path / "c" / "model.safetensors")
        assert all(set(value.flatten().tolist()) == {1 + 2.0**-7} for value in model.values())
        own.model.synchronize()
        assert equal(own.model.state_dict(), model)


def test_without_second_blocks_the_last_steps_result_is_read_at_once_and_that_is_told(tmp_path: Path) -> None:
    with Runtime("cpu:1") as runtime:
        own = split(runtime, is_async=True)
        own.train(0, 3)
        save(own, tmp_path / "c", 3)
        other = split(runtime, layers=with_dropout(5), is_async=False, double_buffer=False)
        with pytest.warns(CheckpointWarning, match="read the last step's result at once"):
            load_checkpoint(tmp_path / "c", other.model, other.optimizer, **other.parts)
        assert not other.model.is_behind()
        assert equal(values(other), values(own))
        other.train(3, 5)
        assert are_split(other)


def test_second_blocks_that_do_not_fit_are_refused_before_anything_is_loaded_or_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Runtime("cpu:1") as runtime:
        own = split(runtime, is_async=True)
        own.train(0, 3)
        save(own, tmp_path / "c", 3)
        # It has its masters and gradients, but no second blocks before the first asynchronous step.
        other = split(runtime, layers=with_dropout(5), is_async=False)
        other.train(0, 2)
        before, held = values(other), other.model.memory_report(other.optimizer)
        with monkeypatch.context() as patched:
            patched.setattr(runtime, "host_limit", lambda: HostLimit("the machine", 1 << 30, 0))
            with pytest.raises(HostMemoryShort, match=r"(?s)second blocks.*double_buffer=False"):
                load_checkpoint(tmp_path / "c", other.model, other.optimizer, **other.parts)
        assert other.model.memory_report(other.optimizer) == held
        assert equal(values(other), before)
        # Synchronous steps, which take no second blocks, go on.
        other.train(2, 3)
        load_checkpoint(tmp_path / "c", other.model, other.optimizer, **other.parts)
        assert other.model.memory_report().second_blocks_bytes > 0
        assert equal(values(other), values(own))


def test_a_refused_checkpoint_leaves_masters_in_halves_as_they_were(tmp_path: Path) -> None:
    with Runtime("cpu:1") as runtime:
        own = split(runtime, is_async=True)
        own.train(0, 3)
        save(own, tmp_path / "c", 3)
        other = split(runtime, layers=with_dropout(5), optimizer=torch.optim.SGD)
        before = values(other)
        with pytest.raises(CheckpointMismatch, match="the state of AdamW, but the optimizer is SGD"):
            load_checkpoint(tmp_path / "c", other.model, other.optimizer, **other.parts)
        assert equal(values(other), before)


def test_large_masters_are_written_and_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rp_checkpoint.files.tensor_file.STRIDE_BYTES", 28)
    with Runtime("cpu:1") as runtime:
        own, other = split(runtime), split(runtime, layers=with_dropout(5))
        own.train(0, 2)
        save(own, tmp_path / "c", 2)
        load_checkpoint(tmp_path / "c", other.model, other.optimizer, **other.parts)
        assert equal(values(other), values(own))


def test_whole_masters_on_a_tie_are_rounded_away_when_they_become_halves() -> None:
    even, away = torch.zeros(1, dtype=torch.bfloat16), SplitMaster(torch.zeros(1, dtype=torch.bfloat16))
    value = torch.full((1,), 1 + 2.0**-8)
    write_weights([Master(value)], [even])
    away.write(0, value)
    assert (even.item(), away.upper.item()) == (1.0, 1 + 2.0**-7)
