"""Programs that tests run: one that hangs says where."""

from __future__ import annotations

import pytest
from programs import TORCH, Program

HANGS = """
import sys, threading

def hangs():
    print("has begun", file=sys.stderr, flush=True)
    threading.Event().wait()

hangs()
"""


def fails_while_it_runs() -> None:
    with Program(HANGS, imports=TORCH) as program:
        assert program.stderr.readline() == "has begun\n"
        raise TimeoutError


def test_a_test_that_fails_while_its_program_runs_tells_where_that_is() -> None:
    with pytest.raises(TimeoutError) as failure:
        fails_while_it_runs()
    assert "in hangs" in failure.value.__notes__[0]
