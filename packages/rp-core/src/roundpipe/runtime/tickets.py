"""Turns that are taken on the launcher's thread: for those who will work, or for that thread itself."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from rp_transfer import Ticket, Turns

from roundpipe.runtime.launcher import wait_until


class Take(Protocol):
    """Takes one place in a line."""

    def __call__(self, line: Turns, *, write: bool) -> Ticket:
        """The last one, as a reader or a writer."""
        ...


@contextmanager
def taking() -> Generator[Take]:
    """Within it, tickets are taken for somebody who will leave them; if it fails, nobody would.

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


@contextmanager
def own_turn(line: Turns, *, write: bool) -> Generator[None]:
    """Within it the launcher itself has its turn, for which it waits until its caller is interrupted.

    >>> with own_turn(Turns(), write=True):
    ...     pass
    """
    ticket = line.write() if write else line.read()
    try:
        wait_until(ticket.wait)
        ticket.enter()
        yield
    finally:
        ticket.leave()
