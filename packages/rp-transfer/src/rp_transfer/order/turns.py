"""Turns: the order in which readers and writers use one piece of host memory, decided before any of them runs.

The calling thread takes a place in line for each use, in program order, and hands the ticket to whoever carries
the use out. A reader waits for the writers before it, a writer for everyone before it. Tickets wait only for
earlier tickets, so if holders run in the order of their tickets the oldest can always go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from rp_transfer.api import Event, Stream


class Ticket:
    """One place in line. Enter it before the use and leave it after, on any one thread.

    A ticket that is left without being entered stands aside: those behind it wait for those before it.

    >>> line = Turns()
    >>> ticket = line.write()
    >>> ticket.enter()
    >>> ticket.leave()
    >>> ticket.over()
    True
    """

    __slots__ = ("_after", "_entered", "_events", "_left")

    def __init__(self, after: tuple[Ticket, ...]) -> None:
        self._after = after
        self._entered = False
        self._events: tuple[Event, ...] = ()
        self._left = threading.Event()

    def open(self) -> bool:
        """Whether everyone before has left, so that entering on a stream blocks nobody."""
        return all(ticket._left.is_set() for ticket in self._before())

    def wait(self, seconds: float) -> bool:
        """Wait so long at most for everyone before to leave; whether they have."""
        until = time.monotonic() + seconds
        return all(ticket._left.wait(max(until - time.monotonic(), 0.0)) for ticket in self._before())

    def _before(self) -> Iterator[Ticket]:
        # Each once, and whom a ticket stands behind only after the caller has seen to it that it has left.
        seen = set(self._after)
        waiting = list(self._after)
        while waiting:
            ticket = waiting.pop()
            yield ticket
            waiting.extend(earlier for earlier in ticket._after if earlier not in seen)
            seen.update(ticket._after)

    def enter(self, stream: Stream | None = None) -> None:
        """Wait for those before: on `stream` for their device work if one is given, else on the host.

        Either way the calling thread blocks until they have left, that is, have put their work on streams.

        Raises `RuntimeError` for a ticket that was left: those behind it do not wait for what comes now.
        """
        if self._left.is_set():
            raise RuntimeError("a ticket that was left cannot be entered; take another one")
        for event in self._events_before():
            if stream is None:
                event.synchronize()
            else:
                stream.wait(event)
        self._entered = True
        if stream is None:
            self._after = ()

    def _events_before(self) -> list[Event]:
        events: list[Event] = []
        for ticket in self._before():
            ticket._left.wait()
            events.extend(ticket._events)
        return events

    def leave(self, *events: Event) -> None:
        """The use is over once `events` have happened (at once without any). Leaving twice changes nothing."""
        if self._left.is_set():
            return
        self._events = events
        # Only `stream` has waited for those before: without an event of it nobody learns of that through us.
        if self._entered and events:
            self._after = ()
        self._left.set()

    def over(self) -> bool:
        """Whether nothing of this use itself is left to wait for. Never blocks."""
        return self._left.is_set() and all(event.query() for event in self._events)


class Turns:
    """The line for one piece of host memory. Only the calling thread (under its launch lock) takes tickets.

    >>> line = Turns()
    >>> first, second = line.write(), line.read()
    >>> second.open()
    False
    >>> first.enter()
    >>> first.leave()
    >>> second.open()
    True
    """

    def __init__(self) -> None:
        self._writer: Ticket | None = None
        self._readers: list[Ticket] = []

    def read(self) -> Ticket:
        """A place beside other readers, behind the last writer."""
        ticket = Ticket(() if self._writer is None else (self._writer,))
        self._readers = [reader for reader in self._readers if not reader.over()]
        self._readers.append(ticket)
        return ticket

    def write(self) -> Ticket:
        """A place alone, behind everyone before."""
        # A writer that nobody read after must be waited for by name: it has no reader that stands for it.
        before = tuple(self._readers) or (() if self._writer is None else (self._writer,))
        ticket = Ticket(before)
        self._writer = ticket
        self._readers = []
        return ticket
