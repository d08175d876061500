"""`Ending`: how the work of machines ends: with the first error, of which all are told, or without one."""

from __future__ import annotations

import reprlib
import threading
from collections.abc import Callable

from rp_dist.errors import Closed, DistError, MachineLost
from rp_dist.links.frames import Forged

_RESET = "its process ended, or its connection was reset"


def _nothing() -> None:
    """Of what nobody is told; also on a loss before there are transfers."""


class Ending:
    """The error that ended the machines' work, and whether this machine has ended; any thread may ask.

    `changed`: notified of both, and by others of all else that `wait` may wait for. `on_loss`: called once, on a
    separate thread, when there is an error.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.on_loss: Callable[[], None] = _nothing
        self.error: DistError | None = None
        self.has_ended = False
        self._aborting: list[threading.Thread] = []

    @property
    def has_error(self) -> bool:
        """Whether it was an error that ended the work."""
        return self.error is not None

    def raise_error(self) -> None:
        """Raise the error that ended the machines' work, if there is one."""
        if (error := self.error) is not None:
            raise _again(error)
        if self.has_ended:
            raise Closed("the machines are closed; open them again")

    def wait(self, is_so: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until `is_so()`, at most `seconds`; return whether it is. Raises at once if the work has ended."""
        with self.changed:
            self.changed.wait_for(lambda: self.has_error or self.has_ended or is_so(), seconds)
            if not (answer := is_so()):
                self.raise_error()
            return answer

    def end_with(self, error: DistError, tell: Callable[[], None] = _nothing) -> None:
        """End with an error, of which `tell` tells the others; only the first one counts."""
        with self.changed:
            if self.has_error or self.has_ended:
                return
            self.error = error
            # Stored so that `join` waits for it: a thread inside gloo when the interpreter ends would abort the
            # process.
            others_told = threading.Event()
            aborting = threading.Thread(target=self._abort, args=(others_told,), name="rp-dist-abort", daemon=True)
            self._aborting.append(aborting)
            aborting.start()
            self.changed.notify_all()
        try:
            tell()
        finally:
            others_told.set()

    def _abort(self, others_told: threading.Event) -> None:
        # Break connections only after the others have been told of the loss.
        others_told.wait()
        self.on_loss()

    def end(self) -> None:
        """End, whatever the others do."""
        with self.changed:
            self.has_ended = True
            self.changed.notify_all()

    def join(self) -> None:
        """Wait until `on_loss` has returned, if it was called."""
        for thread in self._aborting:
            if thread.is_alive():
                thread.join()


def _again(error: DistError) -> DistError:
    # If several threads raised one object, it would collect the tracebacks of all.
    return MachineLost(error.rank, error.why) if isinstance(error, MachineLost) else type(error)(*error.args)


def why_lost(error: Exception) -> str:
    """Return why a machine is lost whose link ended with an error."""
    if isinstance(error, Forged):
        return f"its connection carried {error}: somebody changed or added to what it sent"
    if isinstance(error, OSError):
        return _RESET
    return f"it sent what is no message ({type(error).__name__}: {reprlib.repr(str(error))})"
