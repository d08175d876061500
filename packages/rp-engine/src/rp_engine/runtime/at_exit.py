"""The exit of the process, at which runtimes that are still open are closed."""

from __future__ import annotations

import atexit
import sys
import weakref
from contextlib import ExitStack
from functools import partial
from typing import Protocol

from rp_optim.jobs import finish_all

from rp_engine.runtime.late_errors import report_remaining


class Open(Protocol):
    """A runtime, as far as the end of the process knows it."""

    def close(self) -> None:
        """Finish launched work and end the threads."""
        ...

    def fail(self, error: BaseException) -> None:
        """Tell other machines of the error that has ended this process."""
        ...


class AtExit:
    """Closes open runtimes when the process exits, then reports errors that no call has raised."""

    def __init__(self) -> None:
        self.has_begun = False
        self._open: weakref.WeakSet[Open] = weakref.WeakSet()
        self._hook = partial(self._run)

    def close(self, runtime: Open) -> None:
        """Close this runtime at exit."""
        self._open.add(runtime)
        # Register again for each runtime: exit hooks run last first, and this one must run before those of the
        # devices' libraries.
        before, self._hook = self._hook, partial(self._run)
        atexit.register(self._hook)
        atexit.unregister(before)

    def _run(self) -> None:
        self.has_begun = True
        with ExitStack() as stack:
            stack.callback(report_remaining)
            stack.callback(finish_all)
            # What has ended the process, if it was an error.
            error: BaseException | None = getattr(sys, "last_value", None)
            for runtime in list(self._open):
                stack.callback(runtime.close)
                if error is not None:
                    stack.callback(runtime.fail, error)


AT_EXIT = AtExit()
