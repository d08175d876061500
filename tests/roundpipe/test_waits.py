"""A wait that is missing from the engine makes a test fail: each of them, removed one at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from remove_waits import WAITS

HERE = Path(__file__).parent


def launch(program: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / program), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.timeout(300)
def test_the_scenarios_pass_with_every_wait_in_place() -> None:
    process = launch("waiting.py")
    out, error = process.communicate(timeout=240)
    assert process.returncode == 0, error
    assert (out, error) == ("", "")


@pytest.mark.timeout(1500)
def test_the_scenarios_fail_without_any_one_wait() -> None:
    halves = [launch("remove_waits.py", *map(str, range(first, len(WAITS), 2))) for first in (0, 1)]
    ended: dict[int, str] = {}
    for process in halves:
        out, error = process.communicate(timeout=1400)
        assert process.returncode == 0, error
        ended |= {line["number"]: line["ended"] for line in map(json.loads, out.splitlines())}
    assert sorted(ended) == list(range(len(WAITS)))
    unnoticed = [WAITS[number].what for number, how in ended.items() if how not in ("failed", "hung")]
    assert unnoticed == []
