"""Trainings that are killed at any moment resume, and end as if nobody had killed them, to the last bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpointing import LAST
from rp_checkpoint import check, is_finished

PROGRAM = Path(__file__).with_name("checkpointing.py")


class Runs:
    """Runs the program of `checkpointing.py`: one process, which imports torch once, forks one for each run."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def start(self, folder: Path) -> int:
        """Start a run in this folder; return its process."""
        folder.mkdir(exist_ok=True)
        assert self._server.stdin is not None
        self._server.stdin.write(f"{folder}\n")
        self._server.stdin.flush()
        while not (line := self.line()).startswith("started"):
            assert line in ("ready", "step"), line
        return int(line.split()[1])

    def line(self) -> str:
        """The next line of the output."""
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, "the program has ended"
        return line.strip()

    def end(self) -> int:
        """Wait for the end of the run; return its status."""
        while not (line := self.line()).startswith("ended"):
            pass
        return int(line.split()[1])

    def close(self) -> None:
        """End the program."""
        self._server.communicate(timeout=100)

    def to_the_end(self, folder: Path) -> dict[str, str]:
        """Run in this folder; return what the weights are at the end."""
        self.start(folder)
        assert self.end() == 0
        found: dict[str, str] = json.loads((folder / "weights").read_text())
        return found


@pytest.fixture
def runs() -> Iterator[Runs]:
    """The program."""
    made = Runs()
    yield made
    made.close()


def losses(folder: Path) -> dict[int, set[float]]:
    """Every loss that was told for each step: a step is taken again after a kill."""
    found: dict[int, set[float]] = {}
    for line in (folder / "losses").read_text().splitlines():
        step, loss = json.loads(line)
        found.setdefault(step, set()).add(loss)
    return found


def kill(runs: Runs, folder: Path, chance: random.Random) -> bool:
    """Start a run and kill it, some moment after some of its steps, most often in the midst of saving.

    Returns whether it had not ended before.
    """
    process = runs.start(folder)
    for _ in range(chance.randrange(0, 5)):
        if runs.line().startswith("ended"):
            return False
    time.sleep(chance.random() * 0.03)
    os.kill(process, signal.SIGKILL)
    was_killed = runs.end() == signal.SIGKILL
    for path in (folder / "checkpoints").glob("*"):
        # Whole or not there.
        if not path.name.startswith(".") and is_finished(path):
            check(path)
        else:
            assert path.name.startswith("."), path
    return was_killed


def killed_and_resumed(runs: Runs, folder: Path, kills: int, seed: int) -> None:
    wanted = runs.to_the_end(folder / "untroubled")
    told = losses(folder / "untroubled")
    assert len(told) == LAST
    chance = random.Random(seed)
    done, number = 0, 0
    while done < kills:
        there = folder / f"{number}"
        for _ in range(min(4, kills - done)):
            done += kill(runs, there, chance)
        assert runs.to_the_end(there) == wanted
        assert losses(there) == told
        number += 1


@pytest.mark.slow
def test_a_few_kills_change_nothing(tmp_path: Path, runs: Runs) -> None:
    killed_and_resumed(runs, tmp_path, 4, seed=0)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_300_kills_change_nothing(tmp_path: Path, runs: Runs) -> None:
    kills, seed = (
        int(os.environ.get(f"ROUNDPIPE_{name}", usual)) for name, usual in (("KILLS", 300), ("SEED", 1))
    )
    killed_and_resumed(runs, tmp_path, kills, seed)
