"""Texts on a terminal: wrapped at spaces to its width, and with its colours where they are allowed."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from typing import Any

# Lines that go on are indented by so much more.
_INDENT = 2
# The answer to "does it fit?", and its colour. The first one in a text is painted.
_VERDICT = re.compile(r"(?P<red>does not fit)|^(?P<green>fits)\b", re.IGNORECASE | re.MULTILINE)


def columns(stream: Any) -> int | None:  # Any: a text file, or what a test has put there
    """Return the width of the terminal that a stream writes to; None if it writes to none.

    ``COLUMNS`` in the environment counts first, as it does for other programs.
    """
    try:
        if not stream.isatty():
            return None
        given = os.environ.get("COLUMNS", "")
        found = int(given) if given.isdecimal() else os.get_terminal_size(stream.fileno()).columns
    except (AttributeError, OSError, ValueError):
        return None
    # Some terminals say 0.
    return found or 80


def wrapped(text: str, width: int | None) -> str:
    """Return the text with lines of at most `width` characters, broken at spaces only; as it is for None.

    >>> print(wrapped("  memory: weights 1.2 GB, gradients 1.2 GB", 30))
      memory: weights 1.2 GB,
        gradients 1.2 GB
    """
    if width is None:
        return text
    return "\n".join(line if len(line) <= width else _broken(line, width) for line in text.split("\n"))


def _broken(line: str, width: int) -> str:
    own = len(line) - len(line.lstrip(" "))
    further = " " * (own + _INDENT)
    return textwrap.fill(
        line,
        width,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
        expand_tabs=False,
        replace_whitespace=False,
    )


def say(text: str, stream: Any = None) -> None:
    """Print a text, wrapped where there is a terminal; there ``fits`` is green and ``does not fit`` is red."""
    stream = sys.stdout if stream is None else stream
    width = columns(stream)
    text = wrapped(text, width)
    paint = getattr(stream, "paint", None) if width is not None and _has_colours() else None
    verdict = _VERDICT.search(text)
    if paint is None or verdict is None:
        print(text, file=stream, flush=True)
        return
    print(text[: verdict.start()], end="", file=stream)
    paint(verdict[0], str(verdict.lastgroup))
    print(text[verdict.end() :], file=stream, flush=True)


def _has_colours() -> bool:
    """Return whether colours are allowed: https://no-color.org, and terminals that have none."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in (None, "dumb")
