"""Full collections of garbage pass by what a training has made in its first steps."""

from __future__ import annotations

import gc
from pathlib import Path

import finetuning
import pytest
from programs import COMMAND_LINE, ended
from roundpipe import ShortCollections
from rp_cli.main import main


@pytest.fixture
def command(tmp_path: Path, request: pytest.FixtureRequest) -> list[str]:
    if request.param == "fine-tuning":
        finetuning.make_model(tmp_path / "model")
        data = finetuning.json_lines(tmp_path / "data.jsonl", finetuning.texts())
        places = ["--model", str(tmp_path / "model"), "--data", str(data), "--output", str(tmp_path / "run")]
        return ["train", *places, "--sequence", "24", "--batch", "2", "--devices", "cpu:1"]
    text = tmp_path / "text.txt"
    text.write_text("green bottles hang on the wall; " * 40)
    return ["train", "--data", str(text), "--batch", "4", "--sequence", "8", "--devices", "cpu:1"]


@pytest.mark.later
@pytest.mark.usefixtures("measured_once")
@pytest.mark.parametrize("command", ["training", "fine-tuning"], indirect=True)
@pytest.mark.parametrize(("steps", "is_long"), [(2, False), (5, True)])
def test_what_the_first_steps_made_is_passed_by_until_the_training_ends(
    command: list[str], steps: int, is_long: bool, asked: list[str]
) -> None:
    assert main([*command, "--steps", str(steps)]) == 0
    assert asked == ["freeze", "unfreeze"] * is_long


def test_all_is_seen_again_after_an_error(asked: list[str]) -> None:
    def fail() -> None:
        with ShortCollections() as collections:
            for _ in range(4):
                collections.note_step()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert asked == ["freeze", "unfreeze"]


def test_what_the_caller_has_frozen_stays(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)
    with ShortCollections() as collections:
        for _ in range(4):
            collections.note_step()
    assert asked == []


def test_outside_of_a_training_nothing_is_done(asked: list[str]) -> None:
    collections = ShortCollections()
    for _ in range(4):
        collections.note_step()
    collections.end()
    with collections:
        for _ in range(2):
            collections.note_step()
    # The third step since the training began.
    collections.note_step()
    assert asked == []


def test_each_training_is_counted_by_itself(asked: list[str]) -> None:
    collections = ShortCollections()
    for _ in range(2):
        with collections:
            for _ in range(3):
                assert asked == []
                collections.note_step()
        assert asked == ["freeze", "unfreeze"]
        asked.clear()


def test_in_a_process_of_its_own() -> None:
    program = """
import gc
gc.unfreeze()
from roundpipe import ShortCollections
with ShortCollections() as collections:
    for _ in range(3):
        print(gc.get_freeze_count())
        collections.note_step()
    print(gc.get_freeze_count() > 1000)
print(gc.get_freeze_count())
"""
    assert ended(program, imports=COMMAND_LINE) == (0, "0\n0\n0\nTrue\n0\n", "")
