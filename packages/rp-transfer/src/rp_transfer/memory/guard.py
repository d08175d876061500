"""`Guard`: a reentrant lock that finalizers never take; they queue their changes of the guarded state instead."""

from __future__ import annotations

from _thread import RLock
from collections import deque
from collections.abc import Callable
from typing import cast


class Guard(RLock):  # pyright: ignore[reportGeneralTypeIssues] - the stubs call it final, CPython does not
    """A reentrant lock with a queue of actions that finalizers defer until the guarded state is next read.

    Python may collect garbage, and so run finalizers, at any point of any thread, under any lock. A finalizer that
    took a lock could deadlock. So it calls `afterwards`, and readers of the guarded state call `catch_up` first.

    Taking and releasing the lock are the interpreter's own C code. In Python methods, Ctrl-C could strike between
    taking the lock and recording it, and the lock would never be released.

    >>> guard, seen = Guard(), []
    >>> with guard:
    ...     guard.afterwards(lambda: seen.append("freed"))
    ...     seen.append("inside")
    >>> guard.catch_up()
    >>> seen
    ['inside', 'freed']
    """

    def __init__(self) -> None:
        self._left: deque[Callable[[], None]] = deque()

    def afterwards(self, action: Callable[[], None]) -> None:
        """Defer `action` to the next `catch_up`; takes no lock."""
        self._left.append(action)

    def catch_up(self) -> None:
        """Run the deferred actions, unless the calling thread holds the lock; call before reading the state."""
        if not self._left or self._is_inside():
            return
        with self:
            while self._left:
                self._left.popleft()()

    def _is_inside(self) -> bool:
        # `threading.Condition` calls this method too; the type stubs do not have it.
        return cast("Callable[[], bool]", getattr(self, "_is_owned"))()  # noqa: B009
