"""`Link`: JSON messages over one non-blocking socket, with empty messages as heartbeats."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Any

_LENGTH = struct.Struct("!I")
MAX_BYTES = 1 << 28
BEAT = b""
_READ_BYTES = 1 << 16


class Link:
    """The socket to one machine.

    `rank`: the machine's; None until it has said hello. `heard_s`: when data last arrived, by the monotonic clock.
    Any thread may send; one thread reads.
    """

    def __init__(self, sock: socket.socket, rank: int | None = None) -> None:
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self.rank = rank
        self.heard_s = time.monotonic()
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._unread = bytearray()

    def send(self, message: object) -> None:
        """Send a JSON value. Bytes that the socket does not accept at once are kept for `flush`."""
        self._send(json.dumps(message).encode())

    def beat(self) -> None:
        """Send a heartbeat."""
        self._send(BEAT)

    def _send(self, payload: bytes) -> None:
        with self._lock:
            self._unsent += _LENGTH.pack(len(payload)) + payload
            self._write()

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

    def read(self) -> list[Any]:
        """Return the arrived messages, without heartbeats. Raises `OSError` if the other side has ended."""
        data = self.socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionResetError("the connection was closed")
        self.heard_s = time.monotonic()
        self._unread += data
        messages: list[Any] = []
        while (payload := self._next()) is not None:
            if payload:
                messages.append(json.loads(payload))
        return messages

    def _next(self) -> bytes | None:
        if len(self._unread) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._unread)
        if length > (MAX_BYTES if self.rank is not None else _READ_BYTES):
            raise ConnectionResetError("the received data does not follow this protocol")
        end = _LENGTH.size + length
        if len(self._unread) < end:
            return None
        payload = bytes(self._unread[_LENGTH.size : end])
        del self._unread[:end]
        return payload

    def close(self) -> None:
        """Close the socket; bytes that were sent still arrive."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        self.socket.close()
