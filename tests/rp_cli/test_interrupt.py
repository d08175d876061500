"""Ctrl-C and --profile of the training job, on a process of its own and with the real signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from programs import COMMAND_LINE, Program
from roundpipe import TrainingWarning
from rp_cli import command as roundpipe_command
from rp_cli.main import main
from rp_trainer.stopping import Interruption
from transformers import AutoModelForCausalLM

LIMIT_S = 90
SMALL = ["--devices", "cpu:2", "--batch", "4", "--sequence", "8"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(b"%d bottles hang on the wall; " % count for count in range(200)))
    return path


def endless(text: Path, *arguments: str) -> Program:
    """A job that nobody would wait for."""
    code = "import sys\nfrom rp_cli.main import main\nsys.exit(main())"
    command = ["train", "--data", str(text), "--steps", "1000000", *SMALL, *arguments]
    return Program(code, *command, imports=COMMAND_LINE)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_steps(program: Program, metrics: Path, steps: int) -> None:
    until = time.monotonic() + LIMIT_S
    while len(lines(metrics)) < steps + 1:
        assert program.is_running(), program.end()
        assert time.monotonic() < until, "the job does not get on"
        time.sleep(0.05)


def test_ctrl_c_ends_the_training_after_its_step_and_saves_a_checkpoint(text: Path, tmp_path: Path) -> None:
    folder, trace = tmp_path / "run", tmp_path / "trace.json"
    with endless(text, "--output", str(folder), "--profile", str(trace)) as program:
        wait_for_steps(program, folder / "metrics.jsonl", 3)
        os.kill(program.pid, signal.SIGINT)
        status, printed, shown = program.end()
        complaints = shown.splitlines()

    assert status == 130
    steps = [line["step"] for line in lines(folder / "metrics.jsonl")]
    assert steps == list(range(len(steps)))
    assert complaints[-1] == (
        f"roundpipe: interrupted after step {steps[-1]} of 1000000; a checkpoint is saved: the same command with "
        "--resume goes on"
    )
    assert "roundpipe: stopping after this step; press Ctrl-C again to stop at once" in complaints
    assert printed.count("held-out loss") == 1
    AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / f"step-{steps[-1]:08}")
    assert f"the trace is in {trace}" in printed
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
    assert sum(name.startswith("forward_backward of") for name in names) == steps[-1]


@pytest.mark.slow
def test_without_an_output_folder_it_ends_as_well(text: Path, tmp_path: Path) -> None:
    with endless(text, "--profile", str(tmp_path / "trace.json")) as program:
        # Told after the second step; lines of steps may be a minute apart.
        while not (line := program.stderr.readline()).startswith("memory in use: "):
            assert line, "it has ended"
        os.kill(program.pid, signal.SIGINT)
        status, printed, shown = program.end()
        complaints = shown.splitlines()

    assert status == 130
    assert complaints[-1].startswith("roundpipe: interrupted after step ")
    assert complaints[-1].endswith(" of 1000000; nothing is kept")
    assert "the model is in" not in printed
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


PROJECT = Path(__file__).parents[2] / "packages" / "rp-cli" / "pyproject.toml"
# As slow as the real one, and interrupted.
SLOW = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(100)\n"


def _command() -> str:
    module, function = tomllib.loads(PROJECT.read_text())["project"]["scripts"]["roundpipe"].split(":")
    return f"import sys\nfrom {module} import {function}\nsys.exit({function}())"


def _started(*arguments: str, beside: Path) -> tuple[int, str, str]:
    """How Python ends, which finds modules in the folder `beside` first, and what it wrote."""
    path = os.pathsep.join([str(beside), str(PROJECT.parent / "src"), *sys.path])
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=beside,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("how", [["-c", _command()], ["-m", "rp_cli"], ["-W", "ignore", "-m", "rp_cli"]])
def test_ctrl_c_while_torch_is_imported_is_one_line(tmp_path: Path, how: list[str]) -> None:
    (tmp_path / "torch.py").write_text(SLOW)
    assert _started(*how, "train", "--steps", "3", beside=tmp_path) == (130, "", "roundpipe: interrupted\n")


def test_other_programs_that_import_the_package_keep_their_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(SLOW)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__main__.py").touch()
    imported = "try: import roundpipe\nexcept KeyboardInterrupt: print('as ever')\n"
    (tmp_path / "mine" / "__init__.py").write_text(imported)
    for how in (["-m", "mine"], ["-m", "mine", "-m", "rp_cli"], ["-c", imported, "-m", "rp_cli"]):
        assert _started(*how, beside=tmp_path) == (0, "as ever\n", "")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], int]], int]]:
    """Runs the command with something else in the place of its work; Ctrl-C is handled as ever afterwards."""
    monkeypatch.setattr(roundpipe_command, "_AT_ONCE", roundpipe_command._AtOnce())
    usual = signal.getsignal(signal.SIGINT)

    def run(work: Callable[[], int]) -> int:
        monkeypatch.setattr("rp_cli.main.main", lambda *, imported: (imported(), work())[-1])
        return roundpipe_command.main()

    yield run
    signal.signal(signal.SIGINT, usual)


def test_the_command_shows_its_own_warnings_in_one_line(
    command: Callable[[Callable[[], int]], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)

    def work() -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("some weights\n are lost", TrainingWarning, stacklevel=1)
        return 0

    assert command(work) == 0

    assert capsys.readouterr().err == "roundpipe: warning: some weights are lost\n"


def test_ctrl_c_that_an_interrupted_import_turns_into_another_error_is_one_line(
    command: Callable[[Callable[[], int]], int], capfd: pytest.CaptureFixture[str]
) -> None:
    def work() -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            raise ModuleNotFoundError("Could not import module") from error
        return 0

    assert command(work) == 130
    assert capfd.readouterr().err == "roundpipe: interrupted\n"


def test_an_error_without_ctrl_c_is_shown_whole(command: Callable[[Callable[[], int]], int]) -> None:
    def work() -> int:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ZeroDivisionError from error

    with pytest.raises(ZeroDivisionError):
        command(work)


def test_ctrl_c_after_the_work_ends_the_interpreter_at_once(tmp_path: Path) -> None:
    code = (
        "import atexit, os, signal, sys, time, types\n"
        "work = sys.modules['rp_cli.main'] = types.ModuleType('rp_cli.main')\n"
        "work.main = lambda *, imported: (imported(), print('all of it'), 0)[-1]\n"
        "atexit.register(time.sleep, 100)\natexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
    )
    told = (130, "all of it\n", "roundpipe: interrupted\n")
    assert _started("-c", code + _command(), beside=tmp_path) == told


def test_the_second_ctrl_c_is_not_held_back(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        assert not interruption.is_asked()
        signal.raise_signal(signal.SIGINT)
        assert interruption.is_asked()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopping after this step" in capfd.readouterr().err


def test_without_ctrl_c_the_handler_is_given_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    assert not interruption.is_asked()


@pytest.mark.slow
def test_a_profile_is_written_and_its_summary_printed(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    assert main(["train", "--data", str(text), *SMALL, "--steps", "3", "--profile", str(trace)]) == 0

    printed = capsys.readouterr().out
    # Evaluations come before and after.
    assert "\n3 calls and 3 steps in " in printed
    assert "cpu:0" in printed
    assert f"the trace is in {trace}" in printed
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.usefixtures("no_model")
def test_a_profile_that_cannot_be_written_is_refused(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path, tmp_path / "no such folder" / "trace.json"):
        assert main(["train", "--data", str(text), *SMALL, "--profile", str(path)]) == 2
        shown = capsys.readouterr().err
        assert shown.startswith(f"roundpipe: --profile {path} cannot be written")
        assert shown.count("\n") == 1


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.default_int_handler])
def test_while_it_imports_ctrl_c_is_handled_unless_it_was_ignored(monkeypatch: Any, before: Any) -> None:
    found: list[Any] = []

    class Imported(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name == "main":
                found.append(signal.getsignal(signal.SIGINT))
            return lambda *, imported: (imported(), found.append(signal.getsignal(signal.SIGINT)), 0)[-1]

    monkeypatch.setitem(sys.modules, "rp_cli.main", Imported("rp_cli.main"))
    monkeypatch.setattr(roundpipe_command, "_AT_ONCE", roundpipe_command._AtOnce())
    usual = signal.signal(signal.SIGINT, before)
    try:
        assert roundpipe_command.main() == 0
    finally:
        signal.signal(signal.SIGINT, usual)
    importing, running = found[0], found[-1]
    assert running == before
    assert importing == signal.SIG_IGN if before == signal.SIG_IGN else importing.__module__ == "rp_cli.command"
