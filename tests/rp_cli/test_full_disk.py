"""A disk that fills while a job writes: one line, and nothing half-written that looks whole."""

from __future__ import annotations

import json
from pathlib import Path

import finetuning
import programs
import pytest
from programs import COMMAND_LINE
from rp_cli.main import main
from rp_trainer.errors import Unwritable
from rp_trainer.finetuning.files import finished_files
from rp_trainer.finetuning.reports import Metrics, Reports
from transformers import AutoModelForCausalLM

SMALL = ["--steps", "1", "--batch", "4", "--sequence", "8", "--devices", "cpu:1"]
# A file may have so many bytes at most: the metrics and the options fit, the weights do not.
PROGRAM = """
import resource, sys
from rp_cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("green bottles hang on the wall; " * 40)
    return path


def _trained(text: Path, *arguments: str, stdout: int | None = None) -> tuple[int, list[str]]:
    """The exit status, and what it complained of."""
    command = ["train", *SMALL, "--data", str(text), *arguments]
    status, _, complaints = programs.ended(PROGRAM, *command, imports=COMMAND_LINE, stdout=stdout)
    assert "Traceback" not in complaints
    return status, complaints.splitlines()


@pytest.mark.slow
def test_a_model_that_finds_no_room_is_one_line_and_leaves_no_part_of_it(tmp_path: Path, text: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    # An earlier run's.
    folder.joinpath("options.json").write_text('{"roundpipe_version": "0"}')

    status, complaints = _trained(text, "--output", str(folder), "--overwrite")

    assert status == 1
    assert complaints[-1].startswith(f"roundpipe: --output {folder}: the model cannot be written")
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["checkpoints", "metrics.jsonl", "options.json", "report.html"]
    assert json.loads(folder.joinpath("options.json").read_text())["steps"] == 1


@pytest.mark.slow
def test_where_a_checkpoint_finds_no_room_the_model_is_written(tmp_path: Path) -> None:
    model = finetuning.make_model(tmp_path / "model")
    data = finetuning.json_lines(tmp_path / "data.jsonl", finetuning.texts())
    folder = tmp_path / "run"
    command = ["train", "--model", str(model), "--data", str(data), "--output", str(folder), "--devices", "cpu:1"]
    sizes = ["--sequence", "24", "--batch", "2", "--steps", "2", "--save-every", "1"]
    # The weights fit into a file, the optimizer's state does not.
    limit = (folder.parent / "model" / "model.safetensors").stat().st_size * 3 // 2
    program = PROGRAM.replace("100_000", str(limit))

    status, _, complaints = programs.ended(program, *command, *sizes, imports=COMMAND_LINE)

    assert status == 1
    assert f"roundpipe: --output {folder}: the checkpoint" in complaints.splitlines()[-1]
    assert AutoModelForCausalLM.from_pretrained(folder / "model")


@pytest.mark.slow
def test_a_stdout_that_takes_no_more_is_one_line_and_the_training_goes_on(text: Path) -> None:
    with Path("/dev/full").open("w") as full:
        status, complaints = _trained(text, stdout=full.fileno())

    assert status == 0
    told = "standard output cannot be written ([Errno 28] No space left on device); the training goes on"
    assert [line for line in complaints if "No space" in line] == [f"roundpipe: {told}"]
    assert not any("Exception ignored" in line for line in complaints)


@pytest.mark.later
def test_a_trace_that_finds_no_room_is_one_line(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *SMALL, "--data", str(text), "--profile", "/dev/full"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("roundpipe: --profile /dev/full cannot be written ([Errno 28]")


def test_metrics_that_find_no_room_say_so() -> None:
    with (
        pytest.raises(Unwritable, match="folder /dev/full cannot be written"),
        Reports(Metrics(Path("/dev/full"))) as reports,
    ):
        reports.held_out(0, 1.0)


def test_files_come_into_the_folder_together_or_not_at_all(tmp_path: Path) -> None:
    def write(last: str) -> None:
        with finished_files(tmp_path) as unfinished:
            unfinished.joinpath("a").write_text("new")
            assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []
            if last == "fails":
                raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        write("fails")
    assert list(tmp_path.iterdir()) == []
    write("is written")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "new")]
