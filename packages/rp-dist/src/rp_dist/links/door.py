"""`Door`: the port at which machines introduce themselves, open only while they do.

Anybody can connect to it. So at most a few connections are unknown at once, each for a few seconds, and all others
wait in the kernel, where they take no file. Whoever is not one of ours is dropped and remembered by a few words,
with which an opening that fails explains itself.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from rp_dist.links import handshake, interfaces
from rp_dist.links.frames import Forged, Link
from rp_dist.links.handshake import NotOurs, OtherVersion
from rp_dist.links.secret import Secret

_LOG = logging.getLogger(__name__)
MOST_UNKNOWN = 32
# How long a connection may take to introduce itself.
HELLO_S = 5.0
# How long it may when others wait for its place. The first bytes follow the connection itself, so they are here
# when it is accepted; the hello comes one journey there and back later.
_FIRST_BYTES_S = 0.25
_CROWDED_S = 1.0
# When this process has no file left, to try again at once would only take processor time.
_PAUSE_S = 0.5
_MOST_REMARKS = 8
OTHER_SECRET = "it knows another secret, or none: the secret must be the same on all machines"


class Unknown:
    """A connection that has not said hello yet. `link`: once it has told its nonce."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.since_s = time.monotonic()
        self.link: Link | None = None
        self.unread = bytearray()
        self.address = interfaces.plain(str(sock.getpeername()[0]))


class ClosedDoor:
    """Of a machine that does not listen, not yet or no more: nobody comes. `remarked`: what was noticed before."""

    address: str = ""
    port: int = 0

    def __init__(self, remarked: Sequence[str] = ()) -> None:
        self._remarked = remarked

    def sweep(self) -> None:
        """Nobody is here."""

    @property
    def is_busy(self) -> bool:
        """Whether `sweep` has something to do within fractions of a second."""
        return False

    def remarks(self) -> list[str]:
        """What was noticed of connections that were dropped; any thread may ask."""
        return list(self._remarked)

    def closed(self) -> ClosedDoor:
        """Listen no longer; return what is there then, which has the same remarks."""
        return self


class Door(ClosedDoor):
    """Listens on `address` (all addresses if it is None). `secret`, `run`: what hellos must be made with.

    All methods are for one thread.
    """

    def __init__(self, selector: selectors.BaseSelector, address: str | None) -> None:
        self.address = address or ""
        self._remarks: dict[str, str] = {}
        self._selector = selector
        self._unknown: list[Unknown] = []
        self._accepts_at_s = 0.0
        self._is_watched = False
        self._listener = interfaces.listener(address)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._watch()
        if address is None:
            _LOG.warning(
                "rp_dist listens on all network interfaces, at port %d, while machines open: MASTER_ADDR is no "
                "address of this machine alone; name the interface in %s",
                *(self.port, interfaces.VARIABLE),
            )

    def accept(self) -> None:
        """Accept the next connection, if there is room for another one that is unknown."""
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as error:
            self._pause(error)
            return
        try:
            unknown = Unknown(sock)
        except OSError:  # it has gone already
            sock.close()
            return
        self._unknown.append(unknown)
        self._selector.register(sock, selectors.EVENT_READ, unknown)
        self.sweep()

    def _pause(self, error: OSError) -> None:
        self._accepts_at_s = time.monotonic() + _PAUSE_S
        self._remark("accept", f"this machine could not accept a connection ({error.strerror})")
        self.sweep()

    def sweep(self) -> None:
        """Drop connections that took too long, and listen again when there is room. To be called now and then."""
        is_full = len(self._unknown) >= MOST_UNKNOWN
        now = time.monotonic()
        for unknown in list(self._unknown):
            crowded_s = _FIRST_BYTES_S if unknown.link is None else _CROWDED_S
            if now - unknown.since_s > (crowded_s if is_full else HELLO_S):
                self.drop(unknown, "it said no hello in time")
        self._watch()

    @property
    def is_busy(self) -> bool:
        """Whether `sweep` has something to do within fractions of a second."""
        return not self._is_watched

    def _watch(self) -> None:
        has_room = len(self._unknown) < MOST_UNKNOWN and time.monotonic() >= self._accepts_at_s
        if has_room and not self._is_watched:
            self._selector.register(self._listener, selectors.EVENT_READ, self)
        elif self._is_watched and not has_room:
            self._selector.unregister(self._listener)
        self._is_watched = has_room

    def read(self, unknown: Unknown, secret: Secret, run: str) -> Iterator[tuple[Link, Any]]:
        """Read what an unknown connection sent; yield its link with each message whose code is right."""
        try:
            yield from self._read(unknown, secret, run)
        except BlockingIOError:
            return
        except Exception as error:
            if not self.knows(unknown):
                raise  # of a machine that has just been admitted
            self._drop_for(unknown, error, run)

    def _drop_for(self, unknown: Unknown, error: Exception, run: str) -> None:
        if isinstance(error, Forged) and unknown.link is not None:
            # The other side learns from the code of this frame that its secret is another one.
            unknown.link.beat()
            self.drop(unknown, OTHER_SECRET)
        elif isinstance(error, NotOurs):
            self.drop(unknown, str(error))
        elif isinstance(error, OtherVersion):
            with suppress(OSError):
                unknown.socket.send(handshake.answer(handshake.nonce(), run))
            self.drop(unknown, str(error))
        else:
            self.drop(unknown, f"it did not introduce itself ({type(error).__name__})")

    def _read(self, unknown: Unknown, secret: Secret, run: str) -> Iterator[tuple[Link, Any]]:
        if unknown.link is not None:
            for message in unknown.link.read():
                yield unknown.link, message
            return
        # No more than the first bytes, so that all others are read with the link's own bounds.
        data = unknown.socket.recv(handshake.REQUEST_BYTES - len(unknown.unread))
        if not data:
            raise ConnectionResetError("the connection was closed")
        unknown.unread += data
        handshake.check(unknown.unread)
        if len(unknown.unread) == handshake.REQUEST_BYTES:
            own = handshake.nonce()
            unknown.socket.sendall(handshake.answer(own, run))
            keys = handshake.keys(secret, run, handshake.nonce_in(unknown.unread), own, accepts=True)
            unknown.link = Link(unknown.socket, keys)

    def knows(self, unknown: Unknown) -> bool:
        """Return whether a connection is still open and unknown."""
        return unknown in self._unknown

    def admit(self, unknown: Unknown) -> None:
        """Forget a connection that is known now; its link goes on elsewhere."""
        self._forget(unknown)

    def drop(self, unknown: Unknown, why: str) -> None:
        """Close a connection, and remember why."""
        self._forget(unknown)
        with suppress(OSError):
            unknown.socket.shutdown(socket.SHUT_WR)
        unknown.socket.close()
        self._remark(why, f"a connection from {unknown.address} was dropped: {why}")

    def _forget(self, unknown: Unknown) -> None:
        if unknown in self._unknown:
            self._unknown.remove(unknown)
            self._selector.unregister(unknown.socket)

    def _remark(self, why: str, text: str) -> None:
        # Strangers must fill neither the log nor this, and not keep out what a user needs to know.
        if why not in self._remarks and (len(self._remarks) < _MOST_REMARKS or why is OTHER_SECRET):
            self._remarks[why] = text
            _LOG.warning("%s", text)

    def remarks(self) -> list[str]:
        """What was noticed of connections that were dropped; any thread may ask."""
        return list(self._remarks.values())

    def closed(self) -> ClosedDoor:
        """Listen no longer, and close the connections that are unknown; return what is there then."""
        for unknown in list(self._unknown):
            self._forget(unknown)
            unknown.socket.close()
        if self._is_watched:
            self._selector.unregister(self._listener)
            self._is_watched = False
        self._listener.close()
        return ClosedDoor(self.remarks())
