"""With asynchronous steps each call reads weights that are one step older, and nothing else differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from one_step_late import LateTrainer
from rp_trainer import RoundPipeTrainer
from tiny import ARGUMENTS, assert_same, causal_lm, logs, padded, rows
from transformers import Trainer, TrainingArguments

DATA = rows()


def script(kind: type[Trainer], path: Path, settings: dict[str, Any], **given: Any) -> Trainer:
    args = TrainingArguments(str(path), **{**ARGUMENTS, **settings})
    trainer = kind(causal_lm(), args, padded, DATA, DATA[:5], **given)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 4},
        pytest.param({"eval_strategy": "steps", "eval_steps": 3}, marks=pytest.mark.nightly),
        pytest.param({"label_smoothing_factor": 0.1, "num_train_epochs": 1}, marks=pytest.mark.nightly),
    ],
    ids=["accumulated", "evaluated", "smoothed"],
)
def test_losses_and_weights_are_those_of_one_step_late(tmp_path, options, settings):
    wanted = script(LateTrainer, tmp_path, settings)
    found = script(RoundPipeTrainer, tmp_path, settings, roundpipe=replace(options, asynchronous=True))
    assert_same(found, wanted, ("loss", "learning_rate", "eval_loss"))
    # And that is something else than without.
    with pytest.raises(AssertionError):
        assert_same(found, script(Trainer, tmp_path, settings), ("loss", "learning_rate", "eval_loss"))


@pytest.mark.nightly
def test_the_norm_that_is_logged_is_that_of_the_step_before(tmp_path, options):
    wanted = logs(script(LateTrainer, tmp_path, {}), ("grad_norm",))
    found = logs(
        script(RoundPipeTrainer, tmp_path, {}, roundpipe=replace(options, asynchronous=True)), ("grad_norm",)
    )
    assert "grad_norm" not in found[0]
    norms = [line["grad_norm"] for line in found[1:]]
    assert norms == pytest.approx([line["grad_norm"] for line in wanted[:-1]], rel=1e-4)
