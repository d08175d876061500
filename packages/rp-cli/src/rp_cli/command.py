"""The entry point of the `roundpipe` command, which imports torch only once Ctrl-C is handled."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

_INTERRUPTED = 130
# Where the classes of our warnings are.
_OURS = ("roundpipe.", "rp_")
_TOLD = b"roundpipe: interrupted\n"


class _AtOnce:
    """Between `begin` and `end` Ctrl-C ends the process at once, with one line.

    An exception in the midst of an import may arrive as another one, or not at all.
    """

    def __init__(self) -> None:
        self._before: Any = None  # Any: what signal.signal returns

    def begin(self) -> None:
        """Take Ctrl-C over, unless it is ignored: shells let what a script starts in the background do so."""
        before = signal.getsignal(signal.SIGINT)
        if self._before is None and callable(before):
            self._before = before
            signal.signal(signal.SIGINT, _end)

    def end(self) -> None:
        """Give it back."""
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None


_AT_ONCE = _AtOnce()


def main() -> int:
    """Run the command and return its exit status; Ctrl-C outside of its work ends it with one line."""
    _hold_streams()
    _AT_ONCE.begin()
    from rp_cli.main import main as run

    warnings.showwarning = partial(_show_warning, warnings.showwarning)
    try:
        status = run(imported=_AT_ONCE.end)
        # Nothing is left to do but the interpreter's end.
        with suppress(OSError):
            sys.stdout.flush()
        _AT_ONCE.begin()
    except BaseException as error:
        if not _came_of_ctrl_c(error):
            raise
        os.write(2, _TOLD)
        return _INTERRUPTED
    return status


def _hold_streams() -> None:
    """Lead standard streams that are closed to nowhere: files would get their numbers, and what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The system gives the lowest number that is free: this one.
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))


def _show_warning(
    show: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any, **more: Any
) -> None:
    """Show our own warnings in a line, without the place in our code; others as Python does."""
    if not category.__module__.startswith(_OURS):
        show(message, category, *where, **more)
        return
    from tqdm import tqdm  # the command imports as little as it can before it handles Ctrl-C

    tqdm.write(f"roundpipe: warning: {' '.join(str(message).split())}", file=sys.stderr)


def _came_of_ctrl_c(error: BaseException | None) -> bool:
    """Return whether an error is Ctrl-C, or was raised from it by the interrupted code, such as an import."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _end(number: int, frame: FrameType | None) -> None:
    del number, frame
    os.write(2, _TOLD)
    os._exit(_INTERRUPTED)
