"""A lock under which memory may end at any moment."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType


class Guard:
    """A lock that its holder may take again, and that runs what finalizers left once nobody is inside.

    Python may collect garbage, and so free memory, in the middle of the holder's own work. What has to be
    written down about it waits here until that work is whole again.

    >>> guard, seen = Guard(), []
    >>> with guard:
    ...     guard.afterwards(lambda: seen.append("freed"))
    ...     seen.append("inside")
    >>> seen
    ['inside', 'freed']
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._left: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            while self._depth == 1 and self._left:
                self._left.popleft()()
        finally:
            self._depth -= 1
            self._lock.release()

    def afterwards(self, action: Callable[[], None]) -> None:
        """Run `action` as soon as nobody is inside: at once, or when whoever is leaves."""
        self._left.append(action)
        with self:
            pass
