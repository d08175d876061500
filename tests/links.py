"""Worse links for tests: the kernel limits the rate of this process's connections, or drops all that arrives.

Both act on the sockets themselves, so what runs is gloo as it is, over loopback.
Neither needs rights. Linux alone.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

_ATTACH_FILTER = 26
_MAX_PACING_RATE = 47
_RETURN_NOTHING = struct.pack("HBBI", 6, 0, 0, 0)


@contextmanager
def _duplicate(descriptor: int) -> Iterator[socket.socket]:
    found = socket.socket(fileno=os.dup(descriptor))
    try:
        yield found
    finally:
        found.close()


def _connections() -> Iterator[socket.socket]:
    """The TCP connections of this process, to whomever, as sockets that share them."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with _duplicate(int(name)) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                        found.getpeername()  # fails where it only listens
                        yield found


def limit(gb_s: float) -> int:
    """Let the connections that are open send `gb_s` (1e9 bytes a second) in all, in equal shares; their number.

    Nothing is lost; what is faster waits in the sender, as on a slow link. Each process limits what it sends.
    """
    found = len(list(_connections()))
    for connection in _connections():
        rate = struct.pack("Q", max(1, int(gb_s * 1e9 / found)))
        connection.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, rate)
    return found


def ports() -> list[int]:
    """The ports of this process's ends of its connections."""
    return [connection.getsockname()[1] for connection in _connections()]


def cut(peers: Collection[int] | None = None) -> int:
    """Drop all that arrives from now on, in silence, as a pulled cable would; the number of connections.

    `peers`: only what comes from these `ports` of another process. To cut off a machine, it cuts all,
    and the others cut its.
    """
    instruction = ctypes.create_string_buffer(_RETURN_NOTHING)
    program = struct.pack("HL", 1, ctypes.addressof(instruction))
    found = 0
    for connection in _connections():
        if peers is None or connection.getpeername()[1] in peers:
            connection.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
            found += 1
    return found
