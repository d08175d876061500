"""What a run says of its data, and what a resumed one remembers of it."""

from __future__ import annotations

import json
import shutil
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import finetuning
import pytest
from rp_cli.finetune import resumed
from rp_cli.main import main
from rp_estimate.machine.hardware import Machine

pytestmark = pytest.mark.usefixtures("measured_once")

DATED = "{{ strftime_now('%d %b %Y %H:%M:%S') }}" + finetuning.CHATML
BAD = [{"messages": []}, {"messages": [{"role": "user", "content": "one"}]}, {"text": "one"}, {"txt": "one"}]
GIVEN = ["train", "--model", "model", "--data", "a.jsonl", "--output", "run", "--completions-only", "--steps", "1"]
GIVEN += ["--sequence", "64", "--batch", "2", "--devices", "cpu:1", "--skip-bad-rows"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    good = finetuning.chats(6)
    path = finetuning.json_lines(folder / "a.jsonl", [*good[:2], *BAD, *good[2:]])
    path.write_text(path.read_text() + "{\n")
    finetuning.make_model(folder / "model", template=DATED)
    return folder


@pytest.fixture
def place(
    whole: Path,
    machines: dict[str, Machine],  # noqa: ARG001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Path:
    """A folder with a finished run, of which standard output is in ``said``."""
    monkeypatch.chdir(whole)
    if not (whole / "run").is_dir():
        assert main(GIVEN) == 0
        (whole / "said").write_text(capsys.readouterr().out)
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    monkeypatch.chdir(copy)
    return copy


class Tomorrow(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:
        return datetime.now(tz) + timedelta(days=1)


@pytest.mark.slow
def test_bad_rows_are_skipped_where_asked_and_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = (place / "said").read_text()

    assert "data: 6 samples;" in said
    assert "--data: 5 bad rows are skipped: --data a.jsonl:3: 'messages' must be a list of at least one" in said
    assert "; and 2 more" in said
    assert main([*GIVEN[:-1], "--overwrite"]) == 2
    assert "a.jsonl:3: 'messages' must be a list" in capsys.readouterr().err


def test_a_resumed_run_has_the_date_of_the_first(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resumed, "datetime", Tomorrow)

    assert main([*GIVEN, "--resume"]) == 0
    assert "the run in run is finished" in capsys.readouterr().out

    # Without it, tokens are those of another day.
    options = json.loads((place / "run" / "options.json").read_text())
    del options["clock"]
    (place / "run" / "options.json").write_text(json.dumps(options))
    assert main([*GIVEN, "--resume"]) == 2
    assert "make other tokens now" in capsys.readouterr().err
