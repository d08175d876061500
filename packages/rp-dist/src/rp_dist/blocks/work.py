"""`Work`: one transfer that was launched."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_CHECK_S = 0.2
# From the loss of a machine until the transfers that it broke have let go of their blocks.
_RELEASE_S = 1.0


class Work:
    """A transfer under way. Its block may not be changed, nor read where it arrives, until `wait` has returned.

    `launched_s`, `ended_s`: when it was launched and when it ended, by `time.perf_counter`; None until it has.
    """

    def __init__(self, raise_loss: Callable[[], None]) -> None:
        self.launched_s = time.perf_counter()
        self.ended_s: float | None = None
        self._raise_loss = raise_loss
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until the transfer is complete here: what arrives is there, what leaves may be overwritten.

        Raises `MachineLost` where a machine is lost before that; then what the block holds is undefined.
        """
        lost_s: float | None = None
        while not self._ended.wait(_CHECK_S):
            try:
                self._raise_loss()
            except BaseException:
                lost_s = lost_s or time.monotonic()
                if time.monotonic() - lost_s > _RELEASE_S:
                    raise
        if self._error is not None:
            self._raise_loss()
            raise self._error

    def finish(self, error: BaseException | None = None) -> None:
        """Say that it is complete, or what went wrong; the first time counts."""
        if not self._ended.is_set():
            self._error = error
            self.ended_s = time.perf_counter()
            self._ended.set()
