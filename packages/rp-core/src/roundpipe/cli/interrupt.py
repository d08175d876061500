"""Handling of Ctrl-C that lets the current training step finish."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

_NOTICE = b"\nroundpipe: stopping after this step; press Ctrl-C again to stop at once\n"


class Interrupted(Exception):
    """The user pressed Ctrl-C; `main` prints the message as one line and returns 130."""


class Interruption:
    """Inside the context the first Ctrl-C sets `asked` and prints a notice; the second raises `KeyboardInterrupt`.

    Does nothing outside the main thread, which alone receives signals.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None  # Any: what signal.signal returns
        self._in_charge = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.asked = True
        self._give_back()
        # Not through `sys.stderr`: the signal may interrupt a write to it, and streams are not reentrant.
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, _NOTICE)

    def _give_back(self) -> None:
        if self._in_charge:
            self._in_charge = False
            signal.signal(signal.SIGINT, self._before)

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
            self._in_charge = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()
