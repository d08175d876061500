"""Streams that write control characters as escapes, so that no name or message can command the terminal."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

# Control characters, such as ESC; invisible ones, such as those that turn the order of letters; halves of pairs;
# and separators that some programs take for an end of line.
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# Some scripts join letters by the last two.
_KEPT = frozenset("\n\t\u200c\u200d")
# Bold, too: plain red and green are hard to read on some grounds.
_COLOURS = {"red": "1;31", "green": "1;32"}


def visible(text: str) -> str:
    r"""Return the text with an escape, such as ``\x1b``, for each character that a terminal obeys or hides.

    Line ends and tabs stay.

    >>> print(visible("a\x1b[2Jb\u202e\n") + "c")
    a\x1b[2Jb\u202e
    c
    """
    # Most texts have none, and this test is fast.
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in _KEPT else _escaped(one) for one in text)


def _escaped(character: str) -> str:
    if unicodedata.category(character) not in _INVISIBLE:
        return character
    return character.encode("unicode_escape").decode("ascii")


class Visible:
    """A text stream that writes what is `visible` of a text to another one, and otherwise is that one."""

    def __init__(self, stream: Any) -> None:  # Any: a text file, or what a test or notebook has in its place
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text; return its length. It may begin and end with a carriage return, as progress bars do."""
        inner = text.strip("\r")
        start, _, end = text.partition(inner) if inner else (text, "", "")
        self._stream.write(start + visible(inner) + end)
        return len(text)

    def paint(self, text: str, colour: str) -> None:
        """Write a text in red or green, on a terminal that has these."""
        self._stream.write(f"\x1b[{_COLOURS[colour]}m{visible(text)}\x1b[0m")

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _as_visible(stream: Any) -> Any:
    """Return the visible stream. A process that was started without one has None, where `print` writes nothing."""
    return stream if stream is None or isinstance(stream, Visible) else Visible(stream)


@contextmanager
def visible_output() -> Generator[None]:
    """Make stdout and stderr visible inside the context, for whoever writes to them there.

    They stay so if an error ends it that nobody expected: the interpreter prints its message afterwards.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_as_visible(one) for one in before)
    try:
        yield
    except Exception:
        raise
    except BaseException:
        sys.stdout, sys.stderr = before
        raise
    sys.stdout, sys.stderr = before
