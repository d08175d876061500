"""Work of a model that may go on after the call that launched it has returned, and its late errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Launched(Protocol):
    """Work of a model that may continue after the call that launched it has returned."""

    def over(self) -> bool:
        """Whether all of it has ended, or part of it has failed."""
        ...

    def wait(self) -> None:
        """Block until all of it has ended."""
        ...

    def errors(self) -> list[BaseException]:
        """Block until all of it has ended; return its error, once, if it has one."""
        ...


class UnderWay:
    """The work that was launched and whose end was not noted yet. `note_over`: called with each that has ended."""

    def __init__(self, note_over: Callable[[Launched], None]) -> None:
        self._note_over = note_over
        self._launched: list[Launched] = []

    def follow(self, work: Launched) -> None:
        """Track this work: if it fails after the launching call has returned, a later call raises its error."""
        if work not in self._launched:
            self._launched.append(work)

    def wait(self) -> None:
        """Block until all of it has ended."""
        for work in self._launched:
            work.wait()

    def errors(self) -> list[BaseException]:
        """The errors of work that has ended since the last call of this."""
        over = [work for work in self._launched if work.over()]
        self._launched = [work for work in self._launched if work not in over]
        for work in over:
            self._note_over(work)
        return [error for work in over for error in work.errors()]
