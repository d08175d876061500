"""Checkpoints: a run that was killed and resumed equals the uninterrupted one."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from resuming import trainer
from roundpipe import Runtime
from rp_trainer import RoundPipeTrainer
from tiny import ARGUMENTS, assert_same, causal_lm, logs, padded, rows, weights
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

PROGRAM = Path(__file__).parent / "resuming.py"


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))


class Broken(TrainerCallback):
    """Ends the training at the end of step 8."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        if state.global_step == 8:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [{"asynchronous": True}, {"step_in_backward": True}, pytest.param({}, marks=pytest.mark.nightly)],
    ids=str,
)
def test_a_run_that_was_broken_off_and_resumed_equals_the_uninterrupted_one(tmp_path, two, how):
    whole = trainer(str(tmp_path / "whole"), "trainer", two, **how)
    whole.train()
    broken = trainer(str(tmp_path / "broken"), "trainer", two, **how)
    broken.add_callback(Broken())
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    resume_and_compare(tmp_path / "broken", "trainer", two, whole, **how)


def test_after_an_interrupt_between_a_step_during_backward_and_the_trainers_step_training_begins_again(
    tmp_path, two
):
    class Once(TrainerCallback):
        has_been = False

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            del args, state, control
            if not self.has_been:
                self.has_been = True
                raise KeyboardInterrupt

    found = trainer(str(tmp_path), "trainer", two, step_in_backward=True)
    found.args.max_steps = 2
    found.add_callback(Once())
    with pytest.raises(KeyboardInterrupt):
        found.train()
    found.train()
    assert found.state.global_step == 2


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *(("trainer", "synchronous"), ("trainer", "asynchronous"), ("sft", "synchronous")),
        *(("adapters", "synchronous"), ("narrow adapters", "synchronous")),
    ],
)
def test_a_run_that_was_killed_and_resumed_equals_the_uninterrupted_one(tmp_path, two, kind, how):
    is_async = how == "asynchronous"
    whole = trainer(str(tmp_path / "whole"), kind, two, asynchronous=is_async)
    whole.train()
    folder = tmp_path / "killed"
    ended = subprocess.run([sys.executable, PROGRAM, folder, kind, how], capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()[-2000:]
    resume_and_compare(folder, kind, two, whole, asynchronous=is_async)


def resume_and_compare(folder: Path, kind: str, runtime: Runtime, whole: Any, **how: bool) -> None:
    assert saved_steps(folder) == [3, 6]
    # A folder of which the last file is not there counts for nothing, nor does half of one.
    (folder / "checkpoint-7").mkdir()
    (folder / "checkpoint-7" / "trainer_state.json").write_text('{"epoch": ')
    resumed = trainer(str(folder), kind, runtime, **how)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == whole.state.global_step == 16
    # The step's norm of before the checkpoint is not saved.
    names = ("loss", "learning_rate") if how.get("asynchronous") else ("loss", "learning_rate", "grad_norm")
    assert [line["step"] for line in logs(resumed)] == [line["step"] for line in logs(whole)]
    for here, there in zip(logs(resumed, names), logs(whole, names), strict=True):
        assert here == pytest.approx(there, rel=1e-6)
    for name, value in weights(resumed).items():
        torch.testing.assert_close(value, weights(whole)[name], rtol=1e-6, atol=1e-7, msg=name)


def test_a_checkpoint_is_a_model_that_others_load(tmp_path, two):
    found = trainer(str(tmp_path), "trainer", two)
    found.args.save_steps = found.args.max_steps = 2
    found.train()
    folder = tmp_path / "checkpoint-2"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for name, value in weights(found).items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert (folder / "training_args.bin").is_file()
    assert not (folder / "optimizer.pt").exists()
    found.save_model(str(tmp_path / "model"))
    assert not (tmp_path / "model" / "roundpipe").exists()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), loaded.parameters(), strict=True))


@pytest.mark.nightly
def test_a_checkpoint_of_plain_trainer_is_resumed_from(tmp_path, options):
    data = rows()
    settings = {**ARGUMENTS, "save_strategy": "steps", "save_steps": 4}
    wanted = Trainer(causal_lm(), TrainingArguments(str(tmp_path / "plain"), **settings), padded, data)
    wanted.train()
    args = TrainingArguments(str(tmp_path / "ours"), **settings)
    found = RoundPipeTrainer(causal_lm(3), args, padded, data, roundpipe=options)
    found.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-8"))
    assert_same(found, wanted)


@pytest.mark.nightly
def test_the_best_model_is_loaded_at_the_end(tmp_path, options):
    data = rows()
    best = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    settings = {**ARGUMENTS, **best, "load_best_model_at_end": True, "num_train_epochs": 1}
    # The worst one, which is not the last.
    settings["greater_is_better"] = True

    def trained(kind: type[Trainer], name: str, **given: object) -> Trainer:
        args = TrainingArguments(str(tmp_path / name), **settings)
        found = kind(causal_lm(), args, padded, data, data[:5], **given)
        found.train()
        return found

    wanted, found = trained(Trainer, "plain"), trained(RoundPipeTrainer, "ours", roundpipe=options)
    assert found.state.best_global_step == wanted.state.best_global_step < found.state.global_step
    assert_same(found, wanted)
    assert found.evaluate()["eval_loss"] == pytest.approx(found.state.best_metric, rel=1e-5)


def test_without_a_checkpoint_resuming_says_so(tmp_path, two):
    found = trainer(str(tmp_path), "trainer", two)
    with pytest.raises(ValueError, match="No valid checkpoint"):
        found.train(resume_from_checkpoint=True)
