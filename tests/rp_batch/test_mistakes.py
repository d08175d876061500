"""A mistake of one line in the package makes a test fail: many mistakes, one at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "mistakes.py"


def launch(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, error = process.communicate(timeout=280)
    assert process.returncode == 0, error
    return [json.loads(line) for line in out.splitlines()]


def test_without_a_mistake_their_tests_pass() -> None:
    assert [line["ended"] for line in lines(launch("none"))] == ["passed"]


@pytest.mark.timeout(300)
def test_every_mistake_is_noticed_by_the_test_that_should() -> None:
    halves = [launch(first, "2") for first in "01"]
    ended = {line["number"]: line for half in halves for line in lines(half)}
    assert sorted(ended) == list(range(len(ended)))
    assert len(ended) >= 10
    assert [line["what"] for line in ended.values() if line["ended"] != "failed"] == []
