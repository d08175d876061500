"""The launcher: a thread that launches calls and waits for them, safe from Ctrl-C.

Python raises Ctrl-C anywhere in the main thread's code, even between taking a ticket and recording it. So the
calling thread only submits bodies and waits; the launcher runs them. An interrupt of the caller ends a body only
at its next wait, never in between.

Deferring the signal instead would replace the user's signal handler, would work in the main thread only, and would
not hold back `SIGTERM` handlers or a timeout's alarm, which may raise in the same places.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import TypeVar

import torch
from rp_errors import held_back, warn_user
from rp_optim.jobs import Worker

from rp_engine.errors import add_note, in_words

_Result = TypeVar("_Result")

_LOG = logging.getLogger(__name__)
# How often the launcher looks for an interrupt of its caller while it waits.
_LOOK_S = 0.02
# How long an interrupted caller waits for the launcher to reach its next wait and for tasks to end. Work still
# running after that continues in the background, and the next call waits for it.
_PATIENCE_S = 0.3


class _Caller:
    """A thread that waits for a body. `interrupt`: the exception that ended its wait, if any. `told`: warnings."""

    def __init__(self) -> None:
        self.interrupt: BaseException | None = None
        self.told: list[tuple[str, type[Warning]]] = []


_NOBODY = _Caller()


class _Here(threading.local):
    caller = _NOBODY


_HERE = _Here()


def wait_until(over: Callable[[float], bool]) -> None:
    """Call `over` until it returns true. Its argument: for how many seconds it may wait.

    On a launcher's thread: raises the exception that interrupted the caller meanwhile.
    """
    caller = _HERE.caller
    while not over(_LOOK_S):
        if caller.interrupt is not None:
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
        """Whether the calling thread is the launcher's."""
        return self._worker.is_current()

    def is_here(self) -> bool:
        """Whether its thread is in this process; false in a process forked from the one that started it."""
        return self._worker.is_here()

    def run(self, body: Callable[[], _Result]) -> _Result:
        """Run `body` on the launcher's thread; return its result or raise its error.

        An interrupt of the calling thread, such as `KeyboardInterrupt`, ends the body at its next `wait_until` and
        is raised here.
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
            # An error's traceback keeps this frame alive, and with it these references.
            del outcome, body
            for words, category in caller.told:
                warn_user(words, category)

    def run_later(self, body: Callable[[], object]) -> None:
        """Run `body` before those of later calls; nobody waits for it. An error is logged."""
        self._worker.submit(_logged, body)

    def close(self) -> None:
        """Finish the submitted bodies and end the thread. May be called twice."""
        self._worker.close()


def _logged(body: Callable[[], object]) -> None:
    try:
        body()
    except Exception:
        _LOG.exception("work that was left to the launcher failed")


def _note_besides(interrupt: BaseException, error: BaseException | None) -> None:
    if error is not None:
        add_note(interrupt, f"RoundPipe: another error was {in_words(error)}")


def _carry_out(caller: _Caller, body: Callable[[], _Result]) -> _Result:
    _HERE.caller = caller
    try:
        with held_back(caller.told):
            return body()
    finally:
        _HERE.caller = _NOBODY


def _compute_with(num_threads: int) -> None:
    # A device's worker may have set the number that new threads start with. The number is read first, since a
    # thread's first read would undo an earlier set, as in rp_optim.
    torch.get_num_threads()
    torch.set_num_threads(num_threads)
