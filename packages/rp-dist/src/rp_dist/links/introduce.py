"""The side of a link that connects: it tells who it is, and hears whether it is welcome."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

from rp_dist.errors import Disagreement
from rp_dist.links import handshake
from rp_dist.links.frames import Forged, Link
from rp_dist.links.handshake import NotOurs, OtherVersion
from rp_dist.links.secret import Secret

# A machine answers at once; a program of another kind may wait for ever.
ANSWER_S = 5.0


def introduce(
    sock: socket.socket, secret: Secret, run: str, hello: object, deadline_s: float
) -> tuple[Link, Iterator[Any]]:
    """Introduce this machine; return the link, and the messages that came with the answer.

    Raises `OSError` if no machine of this run answers before `deadline_s` (by the monotonic clock), and
    `Disagreement` if one does that has another secret or speaks another version.
    """
    deadline_s = min(deadline_s, time.monotonic() + ANSWER_S)
    host = ":".join(map(str, sock.getpeername()[:2]))
    try:
        return _introduce(sock, secret, run, hello, deadline_s)
    except OtherVersion as error:
        sock.close()
        raise Disagreement(f"the machine at {host} cannot take part: {error}") from None
    except Forged:
        sock.close()
        raise Disagreement(
            f"the machine at {host} has another secret than this one; ROUNDPIPE_SECRET, or the file that "
            "ROUNDPIPE_SECRET_FILE names, must be the same on all machines, or set on none"
        ) from None
    except BaseException:
        sock.close()
        raise


def _introduce(
    sock: socket.socket, secret: Secret, run: str, hello: object, deadline_s: float
) -> tuple[Link, Iterator[Any]]:
    own = handshake.nonce()
    sock.settimeout(max(0.01, deadline_s - time.monotonic()))
    sock.sendall(handshake.request(own))
    found = _answer(sock, deadline_s)
    if handshake.run_in(found) != run:
        raise NotOurs("it takes part in another run")
    link = Link(sock, handshake.keys(secret, run, own, handshake.nonce_in(found), accepts=False))
    link.send(hello)
    while True:
        if not _is_readable(sock, deadline_s - time.monotonic()):
            raise TimeoutError("no answer to a hello")
        messages = link.read()
        # Who knows another secret answers, too; then reading raises `Forged`.
        for first in messages:
            return link, chain([first], messages)


def _answer(sock: socket.socket, deadline_s: float) -> bytes:
    found = b""
    while len(found) < handshake.ANSWER_BYTES:
        sock.settimeout(max(0.01, deadline_s - time.monotonic()))
        data = sock.recv(handshake.ANSWER_BYTES - len(found))
        if not data:
            raise ConnectionResetError("the connection was closed")
        found += data
        handshake.check(found)
    return found


def _is_readable(sock: socket.socket, seconds: float) -> bool:
    poll = select.poll()  # `select.select` takes no more than 1024 files
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(max(0.0, 1000 * seconds)))
