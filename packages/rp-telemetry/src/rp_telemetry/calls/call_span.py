"""`CallSpan`: when a call was launched and when it ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class CallSpan:
    """A call's number among the launches of its runtime, and when it was launched and ended, in seconds.

    >>> one, two = CallSpan(1, 0.0, 5.0), CallSpan(2, 4.0, 9.0)
    >>> two.follows(one), one.follows(two)
    (True, False)
    """

    number: int = 0
    launched_s: float = 0.0
    ended_s: float = 0.0

    @classmethod
    def begin(cls, number: int) -> CallSpan:
        """Return the span of a call that is launched now."""
        now = time.perf_counter()
        return cls(number, now, now)

    def until_now(self) -> CallSpan:
        """Return the span extended to now, when a part of the call has ended."""
        return replace(self, ended_s=time.perf_counter())

    def follows(self, other: CallSpan) -> bool:
        """Return whether it was launched right after `other`, and before that one ended, so devices had work."""
        return self.number == other.number + 1 and self.launched_s < other.ended_s
