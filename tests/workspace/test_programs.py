"""Programs that tests run: one that hangs says where, and all end as they should."""

from __future__ import annotations

import pytest
from programs import TORCH, Program, ended

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


LEAVES = """
import atexit, sys

class Last:
    def __del__(self):
        print("taken apart", flush=True)

last = Last()
atexit.register(print, "at exit")
END
"""


@pytest.mark.parametrize(
    ("end", "status"), [("", 0), ("sys.exit(3)", 3), ("sys.exit('over')", 1), ("raise ValueError('no')", 1)]
)
@pytest.mark.parametrize("whole_end", [False, True])
def test_a_program_ends_with_its_status_and_is_taken_apart_where_that_is_asked_for(
    end: str, status: int, whole_end: bool
) -> None:
    said = "at exit\n" + "taken apart\n" * whole_end

    found, out, complaints = ended(LEAVES.replace("END", end), imports=TORCH, whole_end=whole_end)

    assert (found, out) == (status, said)
    assert ("ValueError: no" in complaints, "over\n" in complaints) == ("raise" in end, "over" in end)
