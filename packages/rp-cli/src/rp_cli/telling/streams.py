"""Standard output and standard error that never end a training: what they do not take is dropped."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

# A full disk, a closed pipe or terminal; a stream that was closed.
_CANNOT = (OSError, ValueError)


class Teller:
    """A text stream that drops what cannot be written; the first time, `told` is called with the error.

    Everything else is asked of `stream`. A standard stream that is missing writes nowhere.

    >>> with open("/dev/full", "w") as full:
    ...     teller = Teller(full, lambda error: print("dropped:", error.strerror))
    ...     print("a line", file=teller, flush=True)
    ...     silence(full)
    dropped: No space left on device
    """

    def __init__(self, stream: Any, told: Any) -> None:  # Any: a text file, or what a test has put there
        self._stream = stream
        self._told = told
        self._is_told = False

    def write(self, text: str) -> int:
        """Write, or drop the text."""
        try:
            return self._stream.write(text)
        except _CANNOT as error:
            self._tell(error)
            return len(text)

    def paint(self, text: str, colour: str) -> None:
        """Write in a colour, or drop the text. The stream must know how."""
        try:
            self._stream.paint(text, colour)
        except _CANNOT as error:
            self._tell(error)

    def flush(self) -> None:
        """Flush, or drop what is left."""
        try:
            self._stream.flush()
        except _CANNOT as error:
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        if not self._is_told:
            self._is_told = True
            self._told(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def telling() -> Generator[None]:
    """Inside the context nothing that is printed can fail: where one stream takes no more, the other one tells."""
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        out, err = (nowhere if stream is None else stream for stream in before)
        sys.stdout = Teller(out, partial(_say, err, "standard output"))
        sys.stderr = Teller(err, partial(_say, out, "standard error"))
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
            for stream in (out, err):
                silence(stream)


def _say(other: Any, name: str, error: Exception) -> None:
    with suppress(*_CANNOT):
        other.write(f"roundpipe: {name} cannot be written ({error}); the training goes on\n")
        other.flush()


def silence(stream: Any) -> None:
    """Lead a stream that cannot be flushed to nowhere, or Python would fail again at exit, with status 120."""
    try:
        stream.flush()
    except _CANNOT:
        with suppress(*_CANNOT, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
