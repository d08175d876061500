"""Handle Ctrl-C and SIGTERM so that the current training step finishes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

_NOTICE = b"\nroundpipe: stopping after this step; press Ctrl-C again to stop at once\n"
# Shells report a process that a signal has ended by this number plus the signal's.
_ENDED_BY = 128


class Interrupted(Exception):
    """A signal has ended the training. `exit_code`: the status that a shell reports for it."""

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.exit_code = _ENDED_BY + number


class Interruption:
    """Inside the context the first Ctrl-C is noted and prints a notice; the second raises `KeyboardInterrupt`.

    The same applies to SIGTERM, but the second one ends the process. Does nothing outside the main thread, since
    only that receives signals. `agree`: agrees with other machines on a signal, given the one received here; 0 for
    none.
    """

    def __init__(self, agree: Callable[[int], int] = int) -> None:
        self._noted = self._heeded = 0
        self._agree = agree
        self._before: dict[int, Any] = {}  # Any: what signal.signal returns
        self._in_charge = False

    @property
    def number(self) -> int:
        """The signal, once `is_asked`."""
        return self._heeded

    def is_asked(self) -> bool:
        """Return whether to stop after a signal here or on another machine; all machines call it together."""
        if not self._heeded:
            self._heeded = self._agree(self._noted)
        return self._heeded != 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._noted = number
        self._give_back()
        # Not through `sys.stderr`: the signal may interrupt a write to it, and streams are not reentrant.
        # A terminal that is gone takes nothing, and must not end the step.
        with suppress(OSError, ValueError):
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, _NOTICE)

    def _give_back(self) -> None:
        if self._in_charge:
            self._in_charge = False
            for number, before in self._before.items():
                signal.signal(number, before)

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
            self._in_charge = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()
