"""Programs that run tests on a copy of the code with one thing broken, a number in, how it ended out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def started(program: Path) -> Iterator[Callable[[int], str]]:
    """Start a program that `serve`\\ s; asked for a number, it says how that ended."""
    process = subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def ended(number: int) -> str:
        process.stdin.write(f"{number}\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, f"{program.name} ended"
        return json.loads(answer)

    with process:
        try:
            yield ended
        finally:
            process.stdin.close()


def serve(how_it_ends: Callable[[int], str]) -> None:
    """Answer until there are no more numbers. Tests run in forks: what they import is imported once, before."""
    for line in sys.stdin:
        sys.stdout.write(json.dumps(how_it_ends(int(line))) + "\n")
        sys.stdout.flush()
