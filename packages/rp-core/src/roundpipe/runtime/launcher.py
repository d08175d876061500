"""The launcher: the thread on which calls are launched and waited for, where no Ctrl-C comes.

Python raises Ctrl-C anywhere in the main thread's code, also where a turn was just taken or is about to be given
up. So that thread only hands bodies over and waits; what has begun goes on to its end, or to its next wait, which
the caller's interrupt ends.

Why not defer the signal instead: exchanging its handler takes another program's handler away, works in the main
thread only, and holds back neither `SIGTERM` nor a timeout's alarm, which may raise in the same places.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import TypeVar

import torch
from rp_optim.jobs import Worker

from roundpipe.errors import add_note, in_words

_Result = TypeVar("_Result")

# How often the launcher looks for an interrupt of its caller while it waits.
_LOOK_S = 0.02
# So long an interrupted caller waits for the launcher to come to its next wait, and for tasks to step aside. What
# is still under way then goes on behind its back, and the next call waits for that.
_PATIENCE_S = 0.3


class _Caller:
    """Whoever waits for a body; `interrupt` is what that wait was ended by."""

    def __init__(self) -> None:
        self.interrupt: BaseException | None = None


class _Here(threading.local):
    caller: _Caller | None = None


_HERE = _Here()


def wait_until(over: Callable[[float], bool]) -> None:
    """Call `over`, which waits so many seconds for something, until it is true.

    On a launcher's thread: raises what has interrupted the caller meanwhile.
    """
    caller = _HERE.caller
    while not over(_LOOK_S):
        if caller is not None and caller.interrupt is not None:
            raise caller.interrupt


class Launcher:
    """Runs bodies one after another, in their callers' context variables.

    >>> launcher = Launcher(num_threads=1)
    >>> launcher.run(lambda: threading.current_thread().name)
    'roundpipe-launcher'
    >>> launcher.close()
    """

    def __init__(self, *, num_threads: int) -> None:
        self._worker = Worker("roundpipe-launcher", partial(_compute_with, num_threads))

    def is_current(self) -> bool:
        """Whether the calling thread is this one."""
        return self._worker.is_current()

    def is_here(self) -> bool:
        """Whether its thread is in this process, not in the one that this one was forked from."""
        return self._worker.is_here()

    def run(self, body: Callable[[], _Result]) -> _Result:
        """What `body` returns or raises, on the launcher's thread.

        An interrupt of the calling thread ends the body at its next `wait_until`, and arrives as itself.
        """
        caller = _Caller()
        outcome = self._worker.submit(copy_context().run, _carry_out, caller, body)
        try:
            outcome.wait()
        except BaseException as interrupt:
            caller.interrupt = interrupt
            if outcome.wait(_PATIENCE_S) and (error := outcome.exception()) is not interrupt:
                _note_besides(interrupt, error)
            raise
        try:
            return outcome.result()
        finally:
            # What is raised holds this frame.
            del outcome, body

    def close(self) -> None:
        """Finish the bodies and end the thread. May be called twice."""
        self._worker.close()


def _note_besides(interrupt: BaseException, error: BaseException | None) -> None:
    if error is not None:
        add_note(interrupt, f"RoundPipe: besides, {in_words(error)}")


def _carry_out(caller: _Caller, body: Callable[[], _Result]) -> _Result:
    _HERE.caller = caller
    try:
        return body()
    finally:
        _HERE.caller = None


def _compute_with(num_threads: int) -> None:
    # A device's worker may have set the count that new threads take; asked first, as in rp_optim.
    torch.get_num_threads()
    torch.set_num_threads(num_threads)
