"""Tickets taken on the launcher's thread, for tasks and jobs that enter them later or for that thread itself."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from rp_transfer import Ticket, Turns

from rp_engine.runtime.launcher import wait_until


class Take(Protocol):
    """Takes a ticket: a place in one line."""

    def __call__(self, line: Turns, *, write: bool) -> Ticket:
        """Take the last place, as a reader or a writer."""
        ...


@contextmanager
def taking_tickets() -> Generator[Take]:
    """Take tickets for work that will leave them later; leave them all if an exception ends the context.

    >>> line = Turns()
    >>> with taking_tickets() as take:
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
    """Hold a turn in the line on the launcher's own thread. An interrupt of the caller ends the wait for it.

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
