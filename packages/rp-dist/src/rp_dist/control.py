"""`Control`: a thread that sends heartbeats, watches those of other machines, and carries small messages.

Whatever a peer sends, the worst it can do is to end its own link. It has a separate socket to each machine, so
that it can tell which one is silent whatever the transfers do. Torch's store could not: it runs on one machine,
and its calls may block forever when that machine stops.
"""

from __future__ import annotations

import logging
import reprlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from rp_dist.admission import Admission
from rp_dist.ending import Ending, why_lost
from rp_dist.errors import Disagreement, DistError, MachineLost
from rp_dist.heard import Heard
from rp_dist.links import interfaces
from rp_dist.links.door import ClosedDoor, Door, Unknown
from rp_dist.links.frames import Link
from rp_dist.links.introduce import introduce
from rp_dist.links.secret import Secret
from rp_dist.links.values import encode
from rp_dist.messages import Hello, LostNotice, RefusedNotice, Welcome, parsed

_LOG = logging.getLogger(__name__)
SILENT = "it lives, but took no part in an exchange for"
# When a process ends, transfers may fail a moment before its control socket tells which one it was.
GRACE_S = 0.5
LEFT = "it has closed its machines, and takes no further part"
# How often to look after connections that are not known yet, while there are many.
_CROWDED_S = 0.05
# The most characters of a reason that is told to others.
_MOST_TEXT = 5000


class Control:
    """Heartbeats and small messages between `size` machines, of which this is number `rank`.

    A machine is lost if it is silent for `timeout_s` (minus two heartbeats, so that the error comes in time), or
    if its socket closes before it has said goodbye. The first machine to notice tells the others, so that all name
    the same one.

    `ending`: whether, and with what error, the machines' work has ended. `waited_s`: returns how long a transfer
    from a machine has been waited for, since a machine that has said goodbye will not deliver it. `patience_s`:
    how long a machine that is alive may delay an exchange; None for no limit.
    """

    def __init__(
        self, rank: int, size: int, timeout_s: float, run: str = "", secret: Secret | None = None
    ) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        # The name of this run, which anybody may know, and the key of its messages' codes.
        self.run, self.secret = run, secret or Secret.made()
        self.waited_s: Callable[[int], float] = _not_at_all
        self.patience_s: float | None = None
        # What other machines have said, and who they are.
        self.heard = Heard()
        self._admission = Admission(rank, size)
        self._beat_s = min(1.0, timeout_s / 10)
        self.ending = Ending()
        self._changed = self.ending.changed
        self._links: dict[int, Link] = {}
        # Where this machine listens; None for all addresses, or if it does not.
        self.address: str | None = None
        self._door = ClosedDoor()
        self._selector = selectors.DefaultSelector()
        self._wakes, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="rp-dist-control", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    # Links

    def listen(self, address: str | None) -> None:
        """Accept other machines at an address (None: at all) until all have come. To be called before `start`."""
        self._door.closed()
        self.address = address
        self._door = Door(self._selector, address)

    @property
    def place(self) -> tuple[str, int]:
        """The address (empty: all) and the port at which this machine listens; port 0 if it does not."""
        return self._door.address, self._door.port

    def hello(self) -> list[Any]:
        """Return the message in which this machine introduces itself."""
        return self._admission.hello(*self.place)

    def connect(self, sock: socket.socket, rank: int, deadline_s: float) -> None:
        """Introduce this machine over a connection to machine `rank`.

        Raises `OSError` if no machine of this run answers, and `Disagreement` if one does that has another secret,
        speaks another version, or refuses this machine.
        """
        link, messages = introduce(sock, self.secret, self.run, self.hello(), deadline_s)
        try:
            for message in messages:
                self._hear_first(link, rank, message) if link.rank is None else self._handle(link, message)
        except BaseException:
            link.close()
            raise
        self._admit(link, rank)

    def _hear_first(self, link: Link, rank: int, message: Any) -> None:
        answer = parsed(message)
        if isinstance(answer, RefusedNotice):
            self.refuse(answer.why)
            self.raise_error()
        if answer != Welcome(rank):
            raise ConnectionError(f"rank {rank} was expected, but {reprlib.repr(message)} was the answer")
        link.rank = rank

    def _admit(self, link: Link, rank: int) -> None:
        self._selector.register(link.socket, selectors.EVENT_READ, link)
        with self._changed:
            self._links[rank] = link
            self._changed.notify_all()
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):
            self._wakes.send(b"!")

    # Methods for other threads

    def raise_error(self) -> None:
        """Raise the error that ended the machines' work, if there is one."""
        self.ending.raise_error()

    @property
    def error(self) -> DistError | None:
        """The error that ended the machines' work; None if there is none."""
        return self.ending.error

    def wait(self, is_so: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until `is_so()`, at most `seconds`; return whether it is. Raises at once if a machine is lost."""
        return self.ending.wait(is_so, seconds)

    def missing(self) -> list[int]:
        """Return the ranks that have no link yet."""
        return [rank for rank in range(self.size) if rank != self.rank and rank not in self._links]

    def places(self) -> dict[int, tuple[str, int]]:
        """Return the addresses and ports at which the machines that have said hello listen."""
        return self._admission.places()

    def own_address(self) -> str | None:
        """Return the address of this machine that others use: that of the interface, or of its first link."""
        if self.address is not None or not self._links:
            return self.address
        return interfaces.local_end(next(iter(self._links.values())).socket)

    def remarks(self) -> str:
        """Return what was noticed of connections that were dropped, as the end of a sentence; empty for none."""
        return "".join(f"; {remark}" for remark in self._door.remarks())

    def tell(self, message: object) -> None:
        """Send a message to all machines. Raises `InvalidTransfer` for what JSON cannot hold."""
        body = encode(message)
        for link in list(self._links.values()):
            link.send_body(body)
        if any(link.has_unsent() for link in list(self._links.values())):
            self._wake()

    def keep(self, key: str, value: str) -> None:
        """Put an entry into the store in which gloo's groups meet, on all machines."""
        with self._changed:
            self.heard.kept[key] = value
            self._changed.notify_all()
        self.tell(["put", key, value])

    def exchange(self, value: object, channel: int = 0) -> list[Any]:
        """Send a JSON value to all machines; return one from each, in the order of ranks."""
        self.raise_error()
        self.tell(["say", channel, value])
        queues = [self.heard.said(rank, channel) for rank in range(self.size)]
        queues[self.rank].append(value)
        self.wait(lambda: all(queues) or any(not queues[rank] for rank in self.heard.left), self.patience_s)
        for rank, queue in enumerate(queues):
            if not queue:
                self.give_up(rank, LEFT if rank in self.heard.left else f"{SILENT} {self.patience_s:.3g} s")
                self.raise_error()
        return [queue.popleft() for queue in queues]

    def has_left(self, rank: int) -> bool:
        """Return whether a machine has said goodbye."""
        return rank in self.heard.left

    def give_up(self, rank: int, why: str) -> None:
        """Declare a machine lost, on this and all other machines; only the first declaration counts."""
        why = why if len(why) < _MOST_TEXT else f"{why[:_MOST_TEXT]} ..."
        self.ending.end_with(MachineLost(rank, why), partial(self.tell, ["lost", rank, why]))

    def refuse(self, why: str) -> None:
        """End with a `Disagreement` on this machine only."""
        self.ending.end_with(Disagreement(why))

    def fail(self, reason: str) -> None:
        """Tell the others that this machine ends with an error."""
        self.give_up(self.rank, f"it failed: {reason}")

    def leave(self) -> None:
        """Say goodbye, wait until all others have, and end. Raises `MachineLost` for one that has not in time."""
        self.tell(["bye"])
        if not self.wait(lambda: len(self.heard.left) == self.size - 1, self.patience_s):
            for rank in [rank for rank in self._links if rank not in self.heard.left]:
                self.give_up(rank, f"it lives, but has not closed its machines for {self.patience_s:.3g} s")
            self.raise_error()
        self.end()

    def end(self) -> None:
        """End the thread and close the sockets, whatever the others do. May be called twice."""
        self.ending.end()
        self._wake()
        if self._thread.is_alive():
            self._thread.join()
        self.ending.join()

    def dispose(self) -> None:
        """Close what was opened here, if the thread never started."""
        self.ending.end()
        self._shut()

    # The thread

    def _run(self) -> None:
        try:
            self._serve_until_the_end()
        except BaseException as error:
            # Nobody would notice: without this thread no call ends.
            _LOG.exception("the thread of heartbeats failed")
            self.give_up(self.rank, f"its thread of heartbeats failed: {type(error).__name__}: {error}")
        finally:
            self._shut()

    def _serve_until_the_end(self) -> None:
        beat_at = time.monotonic()
        while not self.ending.has_ended:
            for link in list(self._links.values()):
                self._select_events(link)
            self._serve_all(min(beat_at - time.monotonic(), _CROWDED_S if self._door.is_busy else self._beat_s))
            now = time.monotonic()
            if now >= beat_at:
                self._beat()
                beat_at = now + self._beat_s
            self._give_up_silent()
            self._look_after_door()

    def _look_after_door(self) -> None:
        if self.missing() and not self.ending.has_error:
            self._door.sweep()
        else:
            # Nobody else may come now, so nobody else takes files or time.
            self._door = self._door.closed()

    def _serve_all(self, seconds: float) -> None:
        for key, mask in self._selector.select(max(0.0, seconds)):
            self._serve(key.data, mask)

    def _select_events(self, link: Link) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.has_unsent() else 0)
        with suppress(KeyError, ValueError):
            if self._selector.get_key(link.socket).events != events:
                self._selector.modify(link.socket, events, link)

    def _beat(self) -> None:
        for link in list(self._links.values()):
            link.beat()

    def _give_up_silent(self) -> None:
        if self._silent():
            # If this thread was stalled itself, read first what has arrived meanwhile.
            self._serve_all(0)
        for rank, seconds in self._silent():
            self.give_up(rank, f"no sign of life for {seconds:.1f} s")
        now = time.monotonic()
        for rank, since in list(self.heard.left.items()):
            # Pieces that it sent before have had that much time to arrive.
            if min(now - since, self.waited_s(rank)) > self.timeout_s:
                self.give_up(rank, LEFT)

    def _silent(self) -> list[tuple[int, float]]:
        """Return the machines that have been silent for too long, each with its seconds of silence."""
        now, limit_s = time.monotonic(), self.timeout_s - 2 * self._beat_s
        silent = [
            (rank, now - link.heard_s) for rank, link in list(self._links.items()) if rank not in self.heard.left
        ]
        return [(rank, seconds) for rank, seconds in silent if seconds > limit_s]

    def _serve(self, data: Link | Unknown | Door | None, mask: int) -> None:
        if data is None:
            with suppress(BlockingIOError):
                self._woken.recv(4096)
        elif isinstance(data, Door):
            data.accept()
        elif isinstance(data, Unknown):
            self._serve_unknown(data)
        else:
            self._serve_link(data, mask)

    def _serve_unknown(self, unknown: Unknown) -> None:
        # An earlier one of the same round may have ended the opening.
        if not isinstance(door := self._door, Door) or not door.knows(unknown):
            return
        link: Link | None = None
        try:
            for link, message in door.read(unknown, self.secret, self.run):
                if link.rank is not None:
                    self._handle(link, message)
                elif not self._greet(door, unknown, link, message):
                    return
        except Exception as error:
            if link is None or link.rank is None:
                door.drop(unknown, f"it did not introduce itself ({type(error).__name__})")
            else:
                self._drop_link(link, why_lost(error))

    def _serve_link(self, link: Link, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            link.flush()
        if not mask & selectors.EVENT_READ:
            return
        try:
            for message in link.read():
                self._handle(link, message)
        except BlockingIOError:
            return
        except Exception as error:
            self._drop_link(link, why_lost(error))

    def _drop_link(self, link: Link, why: str) -> None:
        # First, so that this machine learns why it is given up, if it still can.
        if link.rank is not None and link.rank not in self.heard.left:
            self.give_up(link.rank, why)
        with suppress(KeyError):
            self._selector.unregister(link.socket)
        link.close()

    def _handle(self, link: Link, found: Any) -> None:
        assert link.rank is not None
        message = parsed(found)
        if isinstance(message, LostNotice) and message.rank < self.size:
            self._hear_of_loss(message.rank, message.why)
        elif isinstance(message, RefusedNotice):
            self.refuse(message.why)
        else:
            with self._changed:
                self.heard.note(link.rank, message)
                self._changed.notify_all()

    def _hear_of_loss(self, rank: int, why: str) -> None:
        self.give_up(rank, f"the other machines gave this one up: {why}" if rank == self.rank else why)

    def _greet(self, door: Door, unknown: Unknown, link: Link, message: Any) -> bool:
        """Admit or refuse a connection that has introduced itself; return whether it was admitted."""
        hello = parsed(message)
        if not isinstance(hello, Hello):
            raise ValueError("not a hello")
        if self.heard.left or self.ending.has_error:
            door.drop(unknown, "it came after the end")  # a machine that is opening again already
            return False
        if (why := self._admission.refusal(hello)) is not None:
            link.send(["refused", why])
            door.drop(unknown, why)
            self.ending.end_with(Disagreement(why), partial(self.tell, ["refused", why]))
            return False
        link.rank = hello.rank
        self._admission.admit(hello, unknown.address)
        link.send(["welcome", self.rank])
        door.admit(unknown)
        self._admit(link, hello.rank)
        return True

    def _shut(self) -> None:
        self._door = self._door.closed()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Link):
                key.data.close()
        self._selector.close()
        self._wakes.close()
        self._woken.close()


def _not_at_all(_: int) -> float:
    """Return the waiting time of transfers before there are any."""
    return 0.0
