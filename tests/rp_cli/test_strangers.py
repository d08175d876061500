"""Folders of strangers: nothing of theirs runs, nothing hangs, and what is refused is told in a line."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import finetuning
import hostile_folders
import pytest
from hostile_folders import FOLDERS, MARKER
from programs import COMMAND_LINE, Program
from rp_cli.main import main
from rp_data.samples import Text
from rp_data.tokens import Reader
from rp_trainer.errors import Refused
from tokenizers.normalizers import Replace

# Most processor time of a process; a forked one that tokenizes has as much again.
LIMIT_S = 5
RUN = """
import io, os, resource, sys
import torch
torch.set_num_threads(1)
os.chdir(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]), int(sys.argv.pop(1))))
sys.stdin = io.StringIO("y\\n" * 1000)
from rp_cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    finetuning.json_lines(tmp_path / "chats.jsonl", finetuning.chats())
    yield tmp_path
    shutil.rmtree(tmp_path)


def commanded(*arguments: str) -> tuple[int, str]:
    with Program(RUN, os.getcwd(), str(LIMIT_S), *arguments, imports=COMMAND_LINE) as program:
        code, _, told = program.end()
    return code, told


PLAN = ["--gpu", "H100", "--ram", "100GB", "--sequence", "24"]
# What only tokenizing reads.
WITHOUT_PLAN = ("template", "tokenizer", "weights")
TRAIN = ["--data", "chats.jsonl", "--sequence", "24", "--batch", "2", "--steps", "1", "--devices", "cpu:1"]


ASKING = (
    "configuration",
    "configuration of a known type",
    "model only",
    "tokenizer",
    "tokenizer as a list",
    "all",
)


@pytest.mark.few(2)
@pytest.mark.parametrize("case", ASKING)
def test_the_command_runs_no_code_of_a_folder_whatever_is_answered(
    case: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile_folders.make(place / "model", FOLDERS[f"code: {case}"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))

    codes = main(["plan", "--model", "model", *PLAN]), main(["train", "--model", "model", "--output", "o", *TRAIN])

    assert not (place / MARKER).exists()
    told = capsys.readouterr().err
    assert ("never runs" in told) == (max(codes) == 2) == (case != "configuration of a known type")


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_data_that_is_no_file_is_refused_and_not_waited_for(
    kind: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finetuning.make_model(place / "model", weights=False)
    (place / "chats.jsonl").unlink()
    if kind == "pipe":
        os.mkfifo("chats.jsonl")
    else:
        Path("chats.jsonl").symlink_to("/dev/zero")

    code = main(["train", "--model", "model", "--output", "o", *TRAIN])

    assert code == 2
    assert f"--data chats.jsonl must be a file, but is a {kind}" in capsys.readouterr().err


def test_a_tokenizer_that_makes_many_tokens_of_a_letter_is_refused() -> None:
    tokenizer = finetuning.tokenizer()
    tokenizer.backend_tokenizer.normalizer = Replace("e", "e" * 10_000)

    with pytest.raises(Refused, match=r"a:1: the tokenizer must make at most 1384 tokens of 5 letters, but makes"):
        Reader(tokenizer, sequence=24, completions_only=False).read([Text("a:1", "these")])


@pytest.mark.slow
@pytest.mark.parametrize("case", FOLDERS)
def test_nothing_of_a_hostile_folder_runs_or_hangs_and_a_line_tells_what_is_wrong(case: str, place: Path) -> None:
    hostile_folders.make(place / "model", FOLDERS[case])

    ends = [commanded("train", "--model", "model", "--output", "o", *TRAIN)]
    if case.partition(":")[0] not in WITHOUT_PLAN:
        ends.append(commanded("plan", "--model", "model", *PLAN))

    assert not (place / MARKER).exists()
    for code, told in ends:
        assert code in (0, 2), told
        assert "Traceback" not in told
        assert "\x1b" not in told
        assert code == 0 or told.splitlines()[-1].startswith("roundpipe: "), told
        assert told.count("roundpipe: ") == (code != 0), told
        assert len(told) < 3000


def test_there_are_a_hundred_hostile_folders() -> None:
    assert len(FOLDERS) >= 100
