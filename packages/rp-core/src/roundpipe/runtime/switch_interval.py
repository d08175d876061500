"""How soon Python hands its lock on while models run: who brings weights must not wait for who calls layers."""

from __future__ import annotations

import sys
import threading

# By default a thread keeps the lock for 5 ms, in which a link moves a layer. Handing it on takes some 10 µs.
_SECONDS = 2e-4


class QuickSwitching:
    """From the first `hold` to the last `release`, no thread keeps Python's lock for long.

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
        """Shorten the interval, unless it is shorter already."""
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self._before = sys.getswitchinterval()
                _set(min(self._before, _SECONDS))

    def release(self) -> None:
        """The end of one `hold`; the last one brings back what was before."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                _set(self._before)


def _set(seconds: float) -> None:
    # Python counts whole microseconds and cuts off what is left: what it told must come back whole.
    sys.setswitchinterval(seconds + 5e-7)


# Python has one lock, and so has every process one of these.
quick_switching = QuickSwitching()
