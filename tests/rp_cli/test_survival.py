"""What only tells never ends a run, an error of the system is tried again, and the output folder may go away."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import finetuning
import programs
import pytest
from examples import examples
from rp_checkpoint import check
from rp_cli.main import main
from rp_trainer.finetuning.training import Training
from sometimes import one_in
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.usefixtures("measured_once")
STEPS = 6
SIZES = ["--sequence", "24", "--batch", "2", "--num-microbatch", "1", "--devices", "cpu:1"]
SIZES += ["--steps", str(STEPS), "--save-every", "2", "--keep", "1"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    model = finetuning.make_model(folder / "model")
    data = finetuning.json_lines(folder / "data.jsonl", finetuning.texts())
    return ["train", "--model", str(model), "--data", str(data), *SIZES]


def steps_in(folder: Path) -> list[int]:
    return [line["step"] for line in finetuning.lines(folder)]


@contextlib.contextmanager
def before_step(monkeypatch: pytest.MonkeyPatch, number: int, do: Callable[[], object]) -> Iterator[None]:
    """Something happens before a step."""
    step = Training.step

    def stepped(job: Training, now: int) -> Any:
        if now == number:
            do()
        return step(job, now)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "step", stepped)
        yield


# Errors of the system, one after another

CALLS = ["listdir", "scandir", "stat", "unlink", "rename", "replace", "rmdir", "mkdir", "fsync", "open", "pwrite"]


class Faults:
    """Makes one call on the output folder fail, once training has begun: the nth of those of one name."""

    def __init__(self, name: str, nth: int, folder: Path, number: int) -> None:
        self.name, self.left, self.folder, self.number = name, nth, str(folder), number
        self.real = getattr(os, name)
        self.is_on = self.is_raised = False

    def __call__(self, *given: Any, **more: Any) -> Any:
        if self.is_on and self._is_meant(given[0] if given else more.get("path")):
            self.left -= 1
            if self.left < 0 and not self.is_raised:
                self.is_raised = True
                raise OSError(self.number, os.strerror(self.number))
        return self.real(*given, **more)

    def _is_meant(self, what: Any) -> bool:
        if isinstance(what, int):
            with contextlib.suppress(OSError):
                return os.readlink(f"/proc/self/fd/{what}").startswith(self.folder)
            return False
        return what is not None and os.fsdecode(what).startswith(self.folder)


def trained_with(faults: Faults, inputs: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    told = io.StringIO()
    with (
        monkeypatch.context() as patch,
        before_step(monkeypatch, 1, lambda: setattr(faults, "is_on", True)),
        contextlib.redirect_stderr(told),
    ):
        patch.setattr(os, faults.name, faults)
        status = main([*inputs, "--output", faults.folder])
        faults.is_on = False
    return status, told.getvalue()


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [116, 5, 28], ids=["ESTALE", "EIO", "ENOSPC"])
@pytest.mark.parametrize(
    "name",
    # Each tries every call of a run, which takes ten seconds.
    [pytest.param(one, marks=() if one in ("open", "fsync", "rename") else pytest.mark.nightly) for one in CALLS],
)
def test_one_error_of_the_system_anywhere_loses_no_step_and_no_model(
    name: str, number: int, inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nth = 0
    while True:
        folder = tmp_path / f"run-{nth}"
        faults = Faults(name, nth, folder, number)

        status, told = trained_with(faults, inputs, monkeypatch)

        if not faults.is_raised:
            break
        assert status == 0, f"{name} {nth}: {told}"
        assert "Traceback" not in told
        assert [step for step in steps_in(folder) if step] == list(range(1, STEPS + 1))
        assert AutoModelForCausalLM.from_pretrained(folder / "model")
        checkpoints = sorted((folder / "checkpoints").glob("step-*"))
        assert checkpoints, f"{name} {nth}"
        check(checkpoints[-1])
        shutil.rmtree(folder)
        nth += 1 if nth < 5 else max(nth // 2 * (100 // examples(100)) // 4, 1)


@pytest.mark.later
def test_a_listing_that_fails_in_training_is_told_and_training_goes_on(
    inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"

    status, _ = trained_with(Faults("listdir", 2, folder, 116), inputs, monkeypatch)

    assert status == 0
    assert steps_in(folder)[-1] == STEPS


# Streams

PROGRAM = """
import subprocess
import sys
from rp_cli.command import main
sys.exit(main())
"""
STREAMS = {
    "stdout full": ">/dev/full",
    "stderr full": "2>/dev/full",
    "both full": ">/dev/full 2>&1",
    "stdout closed": ">&-",
    "stderr closed": "2>&-",
    "both closed": ">&- 2>&-",
    "stdout to nobody": "> >(true)",
    "both to nobody": "> >(true) 2>&1",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
def test_a_finished_run_has_status_0_whatever_becomes_of_what_it_prints(
    name: str, inputs: list[str], tmp_path: Path
) -> None:
    program = f"""
import subprocess, sys
command = [sys.executable, "-c", {PROGRAM!r}, *sys.argv[1:]]
sys.exit(subprocess.call(["bash", "-c", 'exec "$@" {STREAMS[name]}', "bash", *command]))
"""
    folder = tmp_path / "run"

    status, _, complaints = programs.ended(program, *inputs, "--output", str(folder))

    assert status == 0, complaints
    assert steps_in(folder)[-1] == STEPS
    assert (folder / "model" / "model.safetensors").exists()
    assert "Traceback" not in complaints
    if name == "stdout full":
        assert "roundpipe: standard output cannot be written" in complaints


def test_no_file_that_the_command_opens_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    program = f"""
import os, sys
from contextlib import suppress
from rp_cli.command import main

sys.argv = ["roundpipe", "--version"]
with suppress(SystemExit):
    main()
print("not lost in a file")
held = [os.readlink(f"/proc/self/fd/{{number}}") for number in range(3)]
open({str(tmp_path / "held")!r}, "w").write(" ".join(held))
"""

    subprocess.run(["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", sys.executable, "-c", program], check=True)

    assert (tmp_path / "held").read_text() == "/dev/null /dev/null /dev/null"


class Closed(io.StringIO):
    """A stream that fails from the third write on."""

    writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        if self.writes > 2:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


@pytest.mark.later
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_pipe_that_breaks_is_told_on_the_other_stream(
    name: str, inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = io.StringIO()
    monkeypatch.setattr(sys, name, Closed())
    monkeypatch.setattr(sys, "stderr" if name == "stdout" else "stdout", other)

    assert main([*inputs, "--output", str(tmp_path / "run")]) == 0

    told = "standard output" if name == "stdout" else "standard error"
    assert other.getvalue().count(f"roundpipe: {told} cannot be written") == 1


# The output folder


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def removed(folder: Path) -> None:
    # A checkpoint may be written meanwhile.
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


def emptied(folder: Path) -> None:
    removed(folder)
    folder.mkdir()


def without_options(folder: Path) -> None:
    (folder / "options.json").unlink()


def without_checkpoints(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def without_lock(folder: Path) -> None:
    (folder / ".lock").unlink()


def replaced_by_a_file(folder: Path) -> None:
    removed(folder)
    folder.write_text("mine")


def replaced_by_another_run(folder: Path) -> None:
    removed(folder)
    folder.mkdir()
    (folder / "options.json").write_text('{"roundpipe_version": "0"}')
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')


# What happens, where the run ends then, and its status.
CHANGES: dict[str, tuple[Callable[[Path], None], str, int]] = {
    "moved": (moved, "elsewhere", 0),
    "removed": (removed, "run", 0),
    "emptied": (emptied, "run", 0),
    "without options": (without_options, "run", 0),
    "without checkpoints": (without_checkpoints, "run", 0),
    "without lock": (without_lock, "run", 0),
    "a file": (replaced_by_a_file, "run-1", 1),
    "another run": (replaced_by_another_run, "run-1", 1),
}


@pytest.mark.later
@pytest.mark.parametrize("name", one_in(6, CHANGES))
def test_a_run_ends_well_whatever_becomes_of_its_folder(
    name: str,
    inputs: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change, place, wanted = CHANGES[name]
    folder = tmp_path / "run"

    with before_step(monkeypatch, 4, lambda: change(folder)):
        status = main([*inputs, "--output", str(folder)])

    shown = capsys.readouterr()
    assert status == wanted, shown.err
    assert AutoModelForCausalLM.from_pretrained(tmp_path / place / "model")
    assert f"{tmp_path / place / 'model'}" in shown.out + shown.err
    assert "Traceback" not in shown.err
    assert steps_in(tmp_path / place) == list(range(1, STEPS + 1))
    assert (tmp_path / place / "report.html").is_file()
    if name == "another run":
        assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "options.json"]
    assert not (tmp_path / place / ".lock").exists()


@pytest.mark.later
@pytest.mark.parametrize("name", one_in(6, CHANGES))
def test_what_an_interrupted_run_says_to_do_works(
    name: str,
    inputs: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change, place, _ = CHANGES[name]
    folder = tmp_path / "run"

    def do() -> None:
        change(folder)
        os.kill(os.getpid(), 2)

    with before_step(monkeypatch, 4, do):
        status = main([*inputs, "--output", str(folder)])

    told = capsys.readouterr().err.splitlines()[-1]
    assert status == 130, told
    option = "" if place == "run" else f"--output {tmp_path / place} and "
    assert told.endswith(f"a checkpoint is saved: the same command with {option}--resume goes on")

    assert main([*inputs, "--output", str(tmp_path / place), "--resume"]) == 0

    assert "goes on after step 4" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / place / "model")


@pytest.mark.slow
def test_a_full_disk_that_is_freed_later_loses_one_checkpoint(
    inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real, full = tmp_path / "run", os.pwrite, [True]

    def pwrite(*given: Any) -> int:
        if full:
            raise OSError(28, "No space left on device")
        return real(*given)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with before_step(monkeypatch, 4, full.clear):
        assert main([*inputs, "--output", str(folder)]) == 0

    (checkpoint,) = (folder / "checkpoints").iterdir()
    check(checkpoint)
    assert json.loads((folder / "options.json").read_text())["steps"] == STEPS


@pytest.mark.later
def test_where_no_checkpoint_can_be_written_an_interrupted_run_says_where_it_begins(
    inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, before_step(monkeypatch, 4, lambda: os.kill(os.getpid(), 2)):
        patch.setattr(os, "pwrite", full)
        status = main([*inputs, "--output", str(folder)])

    told = capsys.readouterr().err.splitlines()[-1]
    assert status == 1
    assert "No space left on device" in told
    assert "interrupted after step 4" in told
    assert told.endswith("make room, and the same command with --resume begins with step 1")
    assert not (tmp_path / "run-1").exists()

    assert main([*inputs, "--output", str(folder), "--resume"]) == 0
    assert "no checkpoint yet: begins with step 1" in capsys.readouterr().out
