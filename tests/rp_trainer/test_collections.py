"""While trainers train, full collections of garbage pass by what their first steps have made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rp_trainer import RoundPipeOptions, RoundPipeTrainer
from tiny import ARGUMENTS, causal_lm, folder, padded, rows
from transformers import TrainerCallback, TrainingArguments


class Stopping(TrainerCallback):
    """Ends a training by an error."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control, kwargs
        if state.global_step == 4:
            raise ZeroDivisionError


def train(path: Path, options: RoundPipeOptions, steps: int, **settings: Any) -> None:
    arguments = TrainingArguments(folder(path, "out"), **{**ARGUMENTS, "max_steps": steps})
    RoundPipeTrainer(causal_lm(), arguments, padded, train_dataset=rows(), roundpipe=options, **settings).train()  # type: ignore[arg-type]


@pytest.mark.parametrize(("steps", "is_long"), [(3, False), (4, True)])
def test_of_a_trainer(
    tmp_path: Path, options: RoundPipeOptions, steps: int, is_long: bool, asked: list[str]
) -> None:
    train(tmp_path, options, steps)
    assert asked == ["freeze", "unfreeze"] * is_long


def test_all_is_seen_again_after_an_error(tmp_path: Path, options: RoundPipeOptions, asked: list[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, options, 6, callbacks=[Stopping()])
    assert asked == ["freeze", "unfreeze"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("steps", "is_long"), [(2, False), (3, True)])
def test_of_lightning(
    tmp_path: Path, options: RoundPipeOptions, steps: int, is_long: bool, asked: list[str]
) -> None:
    pytest.importorskip("lightning")
    from in_lightning import Rows, numbers, strategy, trainer

    trainer(tmp_path, strategy(options), max_steps=steps).fit(Rows(), numbers())
    assert asked == ["freeze", "unfreeze"] * is_long


@pytest.mark.filterwarnings("ignore")
def test_all_is_seen_again_after_an_error_in_lightning(
    tmp_path: Path, options: RoundPipeOptions, asked: list[str]
) -> None:
    pytest.importorskip("lightning")
    from in_lightning import Rows, numbers, strategy, trainer

    class Broken(Rows):
        def on_train_batch_end(self, *args: Any) -> None:
            del args
            if self.global_step == 5:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, strategy(options)).fit(Broken(), numbers())
    assert asked == ["freeze", "unfreeze"]
