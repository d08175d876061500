"""One line on a terminal that says what is being worked on, and is gone afterwards."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress

from rp_estimate.saying import Say, silent


@contextmanager
def status() -> Generator[Say]:
    """Yield a function that replaces the line on stderr; where that is no terminal, it writes nothing.

    >>> with status() as say:
    ...     say("planning")
    """
    if not sys.stderr.isatty():
        yield silent
        return
    try:
        yield _say
    finally:
        _say("")
        _write("\r")


def _say(text: str) -> None:
    # Spaces over what was there: the command escapes control sequences, which could be a stranger's.
    width = shutil.get_terminal_size().columns - 1
    _write(f"\r{text[:width]:<{width}}")


def _write(text: str) -> None:
    # Nobody may be there to read it.
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
