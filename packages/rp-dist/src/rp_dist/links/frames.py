"""`Link`: JSON messages over one non-blocking socket, each with a code that only who knows the secret can make.

A frame is a head (the length of its body, and whether the message goes on in the next frame), the body, and a code
of head, body and the frame's number on this link in this direction. So a frame that was made up, changed,
repeated, left out, moved or sent back has a wrong code. A frame is short, so that little is kept before its code
was checked, and that a long message on a slow link shows signs of life. An empty message is a heartbeat.
"""

from __future__ import annotations

import hmac
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from rp_dist.links.handshake import Keys
from rp_dist.links.values import MOST_BYTES, decode, encode

_HEAD = struct.Struct("!I")
_NUMBER = struct.Struct("!Q")
CODE_BYTES = 16
FRAME_BYTES = 1 << 16
_GOES_ON = 1 << 31
# The first message of a machine that is not known yet.
HELLO_BYTES = 1024
_READ_BYTES = 1 << 16


class Forged(ConnectionError):
    """A frame was not made with this link's keys, or is not the next one."""


class Link:
    """The socket to one machine.

    `rank`: the machine's; None until it has said hello. `heard_s`: when data last arrived, by the monotonic clock.
    Any thread may send; one thread reads.
    """

    def __init__(self, sock: socket.socket, keys: Keys, rank: int | None = None) -> None:
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self.rank = rank
        self.heard_s = time.monotonic()
        self._keys = keys
        self._lock = threading.Lock()
        self._num_sent = 0
        self._num_read = 0
        self._unsent = bytearray()
        self._unread = bytearray()
        # The message that arrives, as far as its frames were checked, and whether another frame belongs to it.
        self._message = bytearray()
        self._goes_on = False

    def send(self, message: object) -> None:
        """Send a JSON value. Bytes that the socket does not accept at once are kept for `flush`."""
        self.send_body(encode(message))

    def beat(self) -> None:
        """Send a heartbeat."""
        self.send_body(b"")

    def send_body(self, body: bytes) -> None:
        """Send what `values.encode` has made, which several links may share."""
        with self._lock:
            for begin in range(0, len(body) or 1, FRAME_BYTES):
                goes_on = begin + FRAME_BYTES < len(body)
                self._append(body[begin : begin + FRAME_BYTES], goes_on=goes_on)
            self._write()

    def _append(self, piece: bytes, *, goes_on: bool) -> None:
        head = _HEAD.pack(len(piece) | _GOES_ON * goes_on)
        self._unsent += head + piece + _code(self._keys.outgoing, self._num_sent, head + piece)
        self._num_sent += 1

    def flush(self) -> None:
        """Send the remaining bytes, as far as the socket accepts them."""
        with self._lock:
            self._write()

    def has_unsent(self) -> bool:
        """Return whether bytes remain for `flush`."""
        return bool(self._unsent)

    def _write(self) -> None:
        # A broken connection is noticed where the link is read.
        with suppress(OSError):
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]

    def read(self) -> Iterator[Any]:
        """Receive once; yield the messages that are complete, without heartbeats.

        Raises `OSError` if the other side has ended, `Forged` for a wrong code, and `ValueError` for what is no
        bounded JSON. What came before that is yielded first.
        """
        data = self.socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionResetError("the connection was closed")
        yield from self.take(data)

    def take(self, data: bytes | bytearray) -> Iterator[Any]:
        """Yield the messages that these bytes, which were received, complete."""
        self._unread += data
        while self._take_frame():
            # Only a frame with the right code is a sign of life: anybody can send bytes.
            self.heard_s = time.monotonic()
            if not self._goes_on:
                body, self._message = bytes(self._message), bytearray()
                if body:
                    yield decode(body)

    def _take_frame(self) -> bool:
        """Check the next frame and add its body to the message; return whether it was complete."""
        if len(self._unread) < _HEAD.size:
            return False
        (head,) = _HEAD.unpack_from(self._unread)
        length = head & ~_GOES_ON
        if length > (FRAME_BYTES if self.rank is not None else HELLO_BYTES):
            raise Forged(f"a frame of {length} bytes, which is more than this protocol has")
        end = _HEAD.size + length
        if len(self._unread) < end + CODE_BYTES:
            return False
        framed, code = bytes(self._unread[:end]), self._unread[end : end + CODE_BYTES]
        if not hmac.compare_digest(code, _code(self._keys.incoming, self._num_read, framed)):
            raise Forged("a message whose code is wrong")
        self._num_read += 1
        del self._unread[: end + CODE_BYTES]
        self._goes_on = bool(head & _GOES_ON)
        self._message += framed[_HEAD.size :]
        if len(self._message) > (MOST_BYTES if self.rank is not None else HELLO_BYTES):
            raise ValueError("a message that is longer than this protocol has")
        return True

    def close(self) -> None:
        """Close the socket; bytes that were sent still arrive."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        self.socket.close()


def _code(key: bytes, number: int, framed: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number) + framed, "sha256")[:CODE_BYTES]
