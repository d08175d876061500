"""`Work`: one launched transfer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_CHECK_S = 0.2
# How long broken transfers may take to release their blocks after a machine is lost.
_RELEASE_S = 1.0


class Work:
    """A transfer in progress. Until `wait` returns, its block must not be changed, nor read on the receiving side.

    `launched_s`, `ended_s`: when it was launched and when it ended (None before), by `time.perf_counter`.
    """

    def __init__(self, raise_loss: Callable[[], None]) -> None:
        self.launched_s = time.perf_counter()
        self.ended_s: float | None = None
        self._raise_loss = raise_loss
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until the transfer is complete here: data has arrived, or sent memory may be overwritten.

        Raises `MachineLost` if a machine is lost before. The content of the block is then undefined.
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
        """Mark the transfer as complete or failed; only the first call counts."""
        if not self._ended.is_set():
            self._error = error
            self.ended_s = time.perf_counter()
            self._ended.set()
