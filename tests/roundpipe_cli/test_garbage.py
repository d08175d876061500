"""Full collections of garbage pass by what a training has made in its first steps."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import finetuning
import pytest
from roundpipe.cli import main
from roundpipe.cli.training.garbage import collect_less


@pytest.fixture
def command(tmp_path: Path, request: pytest.FixtureRequest) -> list[str]:
    if request.param == "fine-tuning":
        finetuning.make_model(tmp_path / "model")
        data = finetuning.json_lines(tmp_path / "data.jsonl", finetuning.texts())
        places = ["--model", str(tmp_path / "model"), "--data", str(data), "--output", str(tmp_path / "run")]
        return ["train", *places, "--sequence", "24", "--batch", "2", "--devices", "cpu:1"]
    text = tmp_path / "text.txt"
    text.write_text("green bottles hang on the wall; " * 40)
    return ["train", "--data", str(text), "--batch-size", "4", "--seq-len", "8", "--devices", "cpu:1"]


@pytest.mark.usefixtures("measured_once")
@pytest.mark.parametrize("command", ["training", "fine-tuning"], indirect=True)
@pytest.mark.parametrize(("steps", "times"), [(2, 0), (5, 1)])
def test_what_the_first_steps_made_is_passed_by_once(
    command: list[str], steps: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(1))
    assert main([*command, "--steps", str(steps)]) == 0
    assert len(frozen) == times


def test_garbage_goes_first_and_what_comes_later_is_collected() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.own = self

    earlier, kept = weakref.ref(Cycle()), Cycle()
    collect_less(3)
    later = weakref.ref(Cycle())
    assert earlier() is None
    gc.collect()
    assert later() is None
    assert kept.own is kept
