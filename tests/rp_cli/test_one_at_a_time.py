"""What an earlier or another process has is not lost: its output folder, its trace, and lines not yet written."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import finetuning
import pytest
from programs import COMMAND_LINE, ended
from rp_cli.main import main
from rp_trainer.errors import Refused, Unwritable
from rp_trainer.finetuning import files as output
from rp_trainer.finetuning import kept
from rp_trainer.finetuning.reports import Metrics

pytestmark = pytest.mark.usefixtures("measured_once")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Commands that train for a moment."""
    folder = tmp_path_factory.mktemp("inputs")
    model = str(finetuning.make_model(folder / "model"))
    data = str(finetuning.json_lines(folder / "data.jsonl", finetuning.texts()))
    (folder / "text.txt").write_text("green bottles hang on the wall; " * 40)
    few = ["--devices", "cpu:1", "--steps", "2", "--num-microbatch", "1"]
    tuning = ["train", "--model", model, "--data", data, "--sequence", "24", "--batch", "2", *few]
    built_in = ["train", "--data", str(folder / "text.txt"), "--batch", "4", "--sequence", "8", *few]
    return {"fine-tuning": tuning, "the built-in job": built_in}


JOBS = pytest.mark.parametrize("job", ["fine-tuning", "the built-in job"])


@JOBS
def test_a_second_process_with_the_same_output_is_refused(
    job: str, jobs: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "deep" / "run"
    with output.locked(run):
        assert main([*jobs[job], "--output", str(run)]) == 2
        told = (
            f"roundpipe: --output {run} is in use by another process; wait for its end, or name another folder\n"
        )
        assert capsys.readouterr().err == told
        assert [path.name for path in run.iterdir()] == [".lock"]
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_was_killed_leaves_the_folder_free(tmp_path: Path) -> None:
    run = tmp_path / "run"
    code = (
        "import os, pathlib, signal, sys\nfrom rp_trainer.finetuning import files as output\n"
        "with output.locked(pathlib.Path(sys.argv[1])):\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert ended(code, str(run), imports=COMMAND_LINE)[0] == -signal.SIGKILL
    assert [path.name for path in run.iterdir()] == [".lock"]

    with output.locked(run):
        # It is as good as empty.
        output.check_output(run)
        with pytest.raises(Refused, match="in use"), output.locked(run):
            pass
    assert list(run.iterdir()) == []


def test_what_a_killed_process_has_forked_neither_keeps_its_lock_nor_gives_it_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    # A worker that would end by itself only long after this test; and one that ends inside the context.
    code = (
        "import os, pathlib, signal, sys\nfrom rp_trainer.finetuning import files as output\n"
        "with output.locked(pathlib.Path(sys.argv[1])):\n"
        "    if not (worker := os.fork()):\n"
        "        os.close(1), os.close(2), signal.alarm(600), signal.pause()\n"
        "    if not (brief := os.fork()):\n"
        "        sys.exit()\n"
        "    os.waitpid(brief, 0)\n"
        "    print(worker, *os.listdir(sys.argv[1]), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    status, said, _ = ended(code, str(run), imports=COMMAND_LINE)
    assert status == -signal.SIGKILL
    worker, *left = said.split()
    try:
        assert left == [".lock"]
        with output.locked(run):
            os.kill(int(worker), 0)
    finally:
        os.kill(int(worker), signal.SIGKILL)


@pytest.mark.later
@JOBS
def test_a_trace_replaces_no_file_unless_that_is_asked_for(
    job: str, jobs: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "model.py"
    trace.write_text("mine")
    command = [*jobs[job], "--output", str(tmp_path / "run"), "--profile", str(trace)]

    assert main(command) == 2
    told = f"roundpipe: --profile {trace} exists already; name another file, or replace it by --overwrite\n"
    assert capsys.readouterr().err == told
    assert trace.read_text() == "mine"
    assert not (tmp_path / "run").exists()

    assert main([*command, "--overwrite"]) == 0
    assert "traceEvents" in trace.read_text()


@pytest.mark.later
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
@JOBS
def test_lines_that_find_no_room_end_no_training(
    job: str,
    jobs: dict[str, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(kept, "METRICS", "/dev/full")
    run = tmp_path / "run"

    assert main([*jobs[job], "--output", str(run)]) == 1

    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("roundpipe: ")]
    assert [line.startswith("roundpipe: --output /dev/full cannot be written") for line in shown] == [True, True]
    assert [line.endswith("; the training continues") for line in shown] == [True, False]
    assert list(run.rglob("model.safetensors"))


def test_lines_that_found_no_room_are_written_when_there_is_some(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    metrics = Metrics(path)
    metrics.held_out(0, 1.0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
    try:
        for step in (1, 2):
            with pytest.raises(Unwritable, match="File too large"):
                metrics.held_out(step, 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    metrics.held_out(3, 1.0)
    metrics.close()
    assert [line["step"] for line in finetuning.lines(tmp_path)] == [0, 1, 2, 3]


def test_lines_are_gone_on_with_behind_those_of_the_checkpoint(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    for step in range(4):
        metrics.held_out(step, 1.0)
    metrics.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "held')
    for after, left in ((9, [0, 1, 2, 3]), (2, [0, 1, 2]), (0, [0])):
        Metrics(tmp_path / "metrics.jsonl", after=after).close()
        assert [line["step"] for line in finetuning.lines(tmp_path)] == left
