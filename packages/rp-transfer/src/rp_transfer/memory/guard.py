"""A lock under which memory may end at any moment."""

from __future__ import annotations

from _thread import RLock
from collections import deque
from collections.abc import Callable
from typing import cast


class Guard(RLock):  # pyright: ignore[reportGeneralTypeIssues] - the stubs call it final, CPython does not
    """A lock that its holder may take again, and a list of what finalizers have to do when nobody is inside.

    Python may collect garbage, and so free memory, in the middle of anybody's work, under any lock. So finalizers
    take none: what has to be written down waits here until the next time that what is guarded is looked at.

    Entering and leaving are the interpreter's own: in methods of ours, Ctrl-C could come between taking the lock
    and saying so, and nobody would ever give it back.

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
        """Leave `action` to the next `catch_up`; takes no lock."""
        self._left.append(action)

    def catch_up(self) -> None:
        """Run what was left, unless the calling thread is inside; before what is guarded is looked at."""
        if not self._left or self._is_inside():
            return
        with self:
            while self._left:
                self._left.popleft()()

    def _is_inside(self) -> bool:
        # As `threading.Condition` asks such locks; the type stubs do not know it.
        return cast("Callable[[], bool]", getattr(self, "_is_owned"))()  # noqa: B009
