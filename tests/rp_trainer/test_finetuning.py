"""Our own loop without the command: a few lines of Python that train, stop, go on and keep what is asked for."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import ended
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, wrap_model_to_roundpipe
from rp_trainer.finetuning import (
    Diverged,
    Evaluation,
    InFolder,
    Interrupted,
    InTurn,
    Refused,
    Settings,
    TrainingOutcome,
    fine_tune,
    taken,
)
from rp_trainer.finetuning.training import Training
from tiny import causal_lm
from transformers import BertConfig, BertForMaskedLM

STEPS = 6
SETTINGS = Settings(steps=STEPS, lr=1e-2, save_every=2, eval_every=3)
TOKENS = torch.arange(96).reshape(12, 8) % 7 + 2
ROWS = [{"input_ids": part, "labels": part} for part in TOKENS.split(4)]


@pytest.fixture
def model() -> Iterator[RoundPipe]:
    with Runtime("cpu:1") as runtime:
        yield wrapped(runtime)


def wrapped(runtime: Runtime) -> RoundPipe:
    config = RoundPipeRunConfig(num_microbatch=2)
    model = wrap_model_to_roundpipe(causal_lm(), model_run_config=config, runtime=runtime)
    assert isinstance(model, RoundPipe)
    return model


def in_folder(path: Path, settings: Settings = SETTINGS) -> TrainingOutcome:
    """A program of a few lines, which goes on where it was stopped."""
    with Runtime("cpu:1") as runtime, taken(path, resume=True) as folder:
        model = wrapped(runtime)
        save: Any = model.named_model.save_pretrained
        kept = InFolder(folder, save)
        return fine_tune(model, InTurn(ROWS), settings, evaluation=Evaluation(ROWS), kept=kept)


def lines(folder: Path) -> list[dict[str, Any]]:
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in ("step", "loss", "held_out_loss") if name in line} for line in read]


@pytest.mark.later
def test_it_trains_in_memory_and_keeps_nothing(model: RoundPipe) -> None:
    outcome = fine_tune(model, InTurn(ROWS), SETTINGS, evaluation=Evaluation(ROWS))

    assert outcome.steps == STEPS
    assert list(outcome.held_out) == [0, 3, STEPS]
    assert outcome.held_out[STEPS] < outcome.held_out[0]


@pytest.mark.later
def test_a_program_that_was_stopped_goes_on_to_the_same_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_folder(tmp_path / "whole")
    step = Training.step

    def stopped(training: Training, now: int) -> Any:
        if now == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(training, now)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "step", stopped)
        with pytest.raises(Interrupted, match="the same call with resume=True goes on") as caught:
            in_folder(tmp_path / "stopped")
    outcome = in_folder(tmp_path / "stopped")

    assert caught.value.exit_code == 128 + signal.SIGTERM
    assert outcome.steps == STEPS
    assert lines(tmp_path / "stopped") == lines(tmp_path / "whole")
    model = (tmp_path / "stopped" / "model" / "model.safetensors").read_bytes()
    assert model == (tmp_path / "whole" / "model" / "model.safetensors").read_bytes()


def stopping(**given: Any) -> Settings:
    """A loss that does not fall, since the rate is far too high after the first steps."""
    return Settings(steps=20, lr=0.5, schedule="constant", warm_up=1, eval_every=1, save_every=1, **given)


@pytest.mark.later
def test_a_training_ends_early_where_the_held_out_loss_does_not_fall(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rp_trainer")

    outcome = in_folder(tmp_path, stopping(early_stopping=3))

    losses = list(outcome.held_out.values())
    lowest = min(outcome.held_out, key=outcome.held_out.__getitem__)
    assert outcome.steps == lowest + 3 == max(outcome.held_out) < 20
    assert min(losses) == losses[-4]
    (told,) = [message for message in caplog.messages if "ends early" in message]
    assert f"the lowest, {min(losses):.4f}, was after step {lowest}, " in told
    assert ("is kept in" in told) == (lowest > 0)
    assert (tmp_path / "model").is_dir()


def test_a_loss_that_falls_by_less_than_the_threshold_does_not_count(model: RoundPipe) -> None:
    how = replace(SETTINGS, eval_every=1, early_stopping=2, early_stopping_threshold=100.0)

    assert fine_tune(model, InTurn(ROWS), how, evaluation=Evaluation(ROWS)).steps == 2


@pytest.mark.later
def test_a_run_that_goes_on_remembers_how_long_the_loss_has_not_fallen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = in_folder(tmp_path / "whole", stopping(early_stopping=3))
    step = Training.step

    def stopped(training: Training, now: int) -> Any:
        if now == whole.steps - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(training, now)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "step", stopped)
        with pytest.raises(Interrupted):
            in_folder(tmp_path / "stopped", stopping(early_stopping=3))

    assert in_folder(tmp_path / "stopped", stopping(early_stopping=3)).steps == whole.steps


def test_several_calls_a_step_sum_up_to_one(model: RoundPipe) -> None:
    whole = [{name: torch.cat([row[name] for row in ROWS]) for name in ROWS[0]}]

    with Runtime("cpu:1") as runtime:
        once, _ = Training(wrapped(runtime), InTurn(whole), SETTINGS).step(1)
    thrice, _ = Training(model, InTurn(ROWS, accumulation=3), SETTINGS).step(1)

    assert thrice.loss == pytest.approx(once.loss, rel=1e-5)


def test_messages_name_the_arguments_of_the_call(model: RoundPipe, tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"must stay finite, .*; try a lower lr\b"):
        fine_tune(model, InTurn(ROWS), Settings(steps=20, lr=1e30, clip=0))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(Refused, match=f"folder {tmp_path} has other files in it"), taken(tmp_path):
        pass


def test_no_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="there must be a batch and a call a step, but are 0 and 1"):
        InTurn([])


def test_the_loop_needs_neither_trainer_nor_accelerate() -> None:
    code = (
        "import sys, rp_trainer.finetuning\n"
        "print({'accelerate', 'transformers.trainer', 'trl', 'lightning'} & set(sys.modules))"
    )
    assert ended(code) == (0, "set()\n", "")


def test_the_errors_and_the_signals_need_no_torch() -> None:
    code = "import sys, rp_trainer.errors, rp_trainer.stopping\nprint('torch' in sys.modules)"
    # A process that is not forked from one that has imported torch.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


@pytest.mark.later
def test_a_program_that_has_ended_trains_nothing_when_it_is_started_again(tmp_path: Path) -> None:
    in_folder(tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run" / "model").iterdir()}

    outcome = in_folder(tmp_path / "run")

    assert outcome == TrainingOutcome(STEPS, {})
    with pytest.raises(Refused, match="needs the same settings, but steps was 6 and is 12"):
        in_folder(tmp_path / "run", replace(SETTINGS, steps=12))
    assert {path: path.read_bytes() for path in (tmp_path / "run" / "model").iterdir()} == before


@pytest.mark.later
def test_a_model_that_is_there_is_replaced(tmp_path: Path) -> None:
    in_folder(tmp_path / "run")
    with Runtime("cpu:1") as runtime, taken(tmp_path / "run", overwrite=True) as folder:
        model = wrapped(runtime)
        (tmp_path / "run" / "model" / "old").touch()
        save: Any = model.named_model.save_pretrained
        fine_tune(model, InTurn(ROWS), SETTINGS, kept=InFolder(folder, save))

    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert not (tmp_path / "run" / "model" / "old").exists()


def test_a_run_goes_on_with_its_own_settings_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Training, "has_labels", lambda *_: True)
        patch.setattr(Evaluation, "loss", lambda *_: float("nan"))
        with pytest.raises(Diverged):
            in_folder(tmp_path / "run")

    with pytest.raises(Refused, match=r"resume=True needs the same settings, but lr was 0.01 and is 0.02"):
        in_folder(tmp_path / "run", Settings(steps=STEPS, lr=2e-2))
    with pytest.raises(Refused, match="needs the same settings, but steps was 6 and is 5"):
        in_folder(tmp_path / "run", Settings(steps=5, lr=1e-2))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"schedule": "linear"}, "schedule must be one of cosine, constant, but is 'linear'"),
        ({"steps": -3}, "steps must be a whole number of at least 1, but is -3"),
        ({"clip": -1.0}, "clip must be a number of at least 0, but is -1.0"),
        ({"lr": float("nan")}, "lr must be a number of at least 0, but is nan"),
        ({"lr": "1e-3"}, "lr must be a number of at least 0, but is '1e-3'"),
        ({"warm_up": 1.5}, "warm_up must be a whole number of steps, or a part of them below 1, but is 1.5"),
        ({"eval_every": 0}, "eval_every must be None or a whole number of at least 1, but is 0"),
        ({"keep": 0}, "keep must be a whole number of at least 1, but is 0"),
        ({"step_in_backward": True}, "clip must be 0 with step_in_backward=True, but is 1.0"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_where_they_are_made(given: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=re.escape(words)):
        Settings(**{"steps": 2, **given})


def test_an_optimizer_that_is_not_known_is_refused_with_the_nearest(model: RoundPipe) -> None:
    with pytest.raises(Refused, match=r"optimizer must be one of .*, but is 'lioon'; did you mean lion\?"):
        fine_tune(model, InTurn(ROWS), Settings(steps=1, optimizer="lioon"))
    with pytest.raises(Refused, match=r"optimizer sgd: .*betas"):
        fine_tune(model, InTurn(ROWS), Settings(steps=1, optimizer="sgd", betas=(0.9, 0.99)))


@pytest.mark.later
def test_batches_without_a_label_that_counts_are_told(model: RoundPipe) -> None:
    nothing = {**ROWS[0], "labels": torch.full_like(ROWS[0]["labels"], -100)}

    with pytest.raises(Refused, match="no label of step 1 counts"):
        fine_tune(model, InTurn([nothing]), SETTINGS)
    with pytest.raises(Refused, match="no label of the held-out data counts"):
        fine_tune(model, InTurn(ROWS), SETTINGS, evaluation=Evaluation([nothing]))
    with pytest.raises(ValueError, match="held-out data must have a batch"):
        Evaluation([])

    found = fine_tune(model, InTurn(ROWS), Settings(steps=1), evaluation=Evaluation([*ROWS, nothing]))
    assert found.held_out[0] > 0


def test_the_held_out_loss_counts_labels_as_the_model_does() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    plain = BertForMaskedLM(config).eval()
    masked = TOKENS[:4].where(torch.rand(4, 8) < 0.5, -100)
    masked[:2, 0], masked[2:, 0] = 3, -100
    batches = [{"input_ids": TOKENS[at : at + 2], "labels": masked[at : at + 2]} for at in (0, 2)]
    losses = [plain(**batch).loss.item() for batch in batches]
    counts = [int((batch["labels"] != -100).sum()) for batch in batches]

    with Runtime("cpu:1") as runtime:
        model = wrap_model_to_roundpipe(copy.deepcopy(plain), runtime=runtime)
        assert isinstance(model, RoundPipe)
        found = fine_tune(model, InTurn(batches), Settings(steps=1), evaluation=Evaluation(batches)).held_out[0]

    wanted = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    assert found == pytest.approx(wanted, rel=1e-5)
