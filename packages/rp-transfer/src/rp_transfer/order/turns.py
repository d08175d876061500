"""`Turns`: a queue of readers and writers of one piece of host memory, in an order fixed before any of them runs.

The calling thread takes a ticket for each use, in program order, and passes it to the thread that carries the use
out. A reader waits for the writers before it, a writer for all uses before it. Tickets wait only for earlier
tickets, so if threads enter theirs in order the oldest can always proceed, and there is no deadlock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from rp_transfer.api import Event, Stream


class Ticket:
    """A place in the queue of a `Turns`. Enter it before the use and leave it after, both on one thread.

    A ticket may be left without being entered: tickets behind it then wait for those before it. `writes`: whether
    it is a writer's, with which nothing else uses the memory.

    >>> line = Turns()
    >>> ticket = line.write()
    >>> ticket.enter()
    >>> ticket.leave()
    >>> ticket.over()
    True
    """

    __slots__ = ("_after", "_entered", "_events", "_left", "writes")

    def __init__(self, after: tuple[Ticket, ...], *, writes: bool = False) -> None:
        self.writes = writes
        self._after = after
        self._entered = False
        self._events: tuple[Event, ...] = ()
        self._left = threading.Event()

    def open(self) -> bool:
        """Return whether all earlier tickets have been left, so that `enter` with a stream does not block."""
        return all(ticket._left.is_set() for ticket in self._before())

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` until all earlier tickets have been left; return whether they have."""
        until = time.monotonic() + seconds
        return all(ticket._left.wait(max(until - time.monotonic(), 0.0)) for ticket in self._before())

    def _before(self) -> Iterator[Ticket]:
        # Yields each ticket once. Reads a ticket's `_after` only after the caller has waited for that ticket:
        # until then `enter` and `leave` may still change it.
        seen = set(self._after)
        waiting = list(self._after)
        while waiting:
            ticket = waiting.pop()
            yield ticket
            waiting.extend(earlier for earlier in ticket._after if earlier not in seen)
            seen.update(ticket._after)

    def enter(self, stream: Stream | None = None) -> None:
        """Wait for the uses before this one. If `stream` is given, it waits for their device work, else the host.

        In both cases the calling thread blocks until their tickets are left, so until their work is enqueued.

        Raises `RuntimeError` for a ticket that was left: later tickets would not wait for this use.
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
        """End the use, which is over once `events` have finished. A second call does nothing."""
        if self._left.is_set():
            return
        self._events = events
        # An event recorded on the entered stream also covers the uses before this one. Without an event, later
        # tickets must wait for those themselves.
        if self._entered and events:
            self._after = ()
        self._left.set()

    def lend(self) -> Ticket:
        """Return a ticket for a part of this use. Entering it enters this one; leaving it does nothing.

        So the parts of one use can run one after another on threads that wait for each other.
        """
        return _Lent(self)

    def over(self) -> bool:
        """Return whether this use itself has finished. Never blocks."""
        return self._left.is_set() and all(event.query() for event in self._events)


class _Lent(Ticket):
    """A ticket whose owner leaves it."""

    __slots__ = ("_owner",)

    def __init__(self, owner: Ticket) -> None:
        super().__init__((), writes=owner.writes)
        self._owner = owner

    def open(self) -> bool:
        return self._owner.open()

    def wait(self, seconds: float) -> bool:
        return self._owner.wait(seconds)

    def enter(self, stream: Stream | None = None) -> None:
        self._owner.enter(stream)

    def leave(self, *events: Event) -> None:
        del events


class Turns:
    """The queue of one piece of host memory. Only one thread takes tickets.

    >>> line = Turns()
    >>> first, second = line.write(), line.read()
    >>> second.open()
    False
    >>> first.enter()
    >>> first.leave()
    >>> second.open()
    True
    >>> first.writes, second.writes
    (True, False)
    """

    def __init__(self) -> None:
        self._writer: Ticket | None = None
        self._readers: list[Ticket] = []

    def read(self) -> Ticket:
        """Take a reader's ticket: it waits for the last writer, and shares the memory with other readers."""
        ticket = Ticket(() if self._writer is None else (self._writer,))
        self._readers = [reader for reader in self._readers if not reader.over()]
        self._readers.append(ticket)
        return ticket

    def write(self) -> Ticket:
        """Take a writer's ticket: it waits for all uses before it."""
        # Readers have waited for the last writer; without readers, wait for that writer itself.
        before = tuple(self._readers) or (() if self._writer is None else (self._writer,))
        ticket = Ticket(before, writes=True)
        self._writer = ticket
        self._readers = []
        return ticket
