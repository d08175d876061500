"""Turns that are taken together, on the calling thread: all are given up again if that fails."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from rp_transfer import Ticket, Turns


class Take(Protocol):
    """Takes one place in a line."""

    def __call__(self, line: Turns, *, write: bool) -> Ticket:
        """The last one, as a reader or a writer."""
        ...


@contextmanager
def taking() -> Generator[Take]:
    """Within it, tickets are taken for somebody who will leave them; if it fails, as by Ctrl-C, nobody would.

    >>> line = Turns()
    >>> with taking() as take:
    ...     ticket = take(line, write=True)
    >>> ticket.open(), line.write().open()
    (True, False)
    """
    taken: list[Ticket] = []

    def take(line: Turns, *, write: bool) -> Ticket:
        taken.append(line.write() if write else line.read())
        return taken[-1]

    try:
        yield take
    except BaseException:
        for ticket in taken:
            ticket.leave()
        raise
