"""A shorter GIL switch interval while a runtime is open: threads that copy weights must not wait for the GIL."""

from __future__ import annotations

import sys
import threading

# By default a thread keeps the GIL for 5 ms, enough to upload a layer. A switch takes about 10 µs.
_SECONDS = 2e-4


class QuickSwitching:
    """Shortens the GIL switch interval from the first `hold` to the last `release`.

    >>> switching = QuickSwitching()
    >>> before = sys.getswitchinterval()
    >>> switching.hold()
    >>> sys.getswitchinterval() < 1e-3
    True
    >>> switching.release()
    >>> sys.getswitchinterval() == before
    True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._before = 0.0

    def hold(self) -> None:
        """Shorten the interval unless it is shorter already, and count one more holder."""
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self._before = sys.getswitchinterval()
                _set(min(self._before, _SECONDS))

    def release(self) -> None:
        """End one `hold`; the last one restores the earlier interval."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                _set(self._before)


def _set(seconds: float) -> None:
    # Python counts whole microseconds and cuts off what is left: what it told must come back whole.
    sys.setswitchinterval(seconds + 5e-7)


# One for the process, as the interval is.
quick_switching = QuickSwitching()
