"""What a stranger sends to a port: packets of many kinds, and connections that begin, drip, stay or break."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread

from rp_dist.links import handshake
from rp_dist.links.frames import Link
from rp_dist.links.secret import Secret

HELLO = ["hello", 1, 2, "127.0.0.1", 4000, "a stranger"]
HOSTILE_JSON = [
    b"[" * 60_000, b'{"a":' * 10_000, b"9" * 50_000, b"[NaN, Infinity, -Infinity]",
    b'["hello", NaN, 2, "", 1, ""]', b'["hello", 1e999, 2, "", 1, ""]', b'["lost", 0, "x"]', b'["bye"]',
    b'["refused", "x"]', b'["roster", {}]',
    b'["hello", "", 1, 2, 40000]', b"\xff" * 999, b"", b"{}", json.dumps(HELLO).encode(),
]  # fmt: skip


def packets(count: int, seed: int = 0) -> list[bytes]:
    """So many hostile packets: what a connection begins with."""
    draw = random.Random(seed)
    kinds: list[Callable[[], bytes]] = [
        lambda: draw.randbytes(draw.randrange(1, 5000)),
        lambda: draw.choice(
            [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00" + draw.randbytes(512), b"\0" * 4096]
        ),
        # The frames of the first version: a length and JSON.
        lambda: struct.pack("!I", len(body := draw.choice(HOSTILE_JSON))) + body,
        lambda: struct.pack("!I", draw.choice([1 << 31, (1 << 32) - 1, 60_000])) + draw.randbytes(100),
        # The right first bytes, and then anything.
        lambda: handshake.request(draw.randbytes(32)) + draw.randbytes(draw.randrange(0, 3000)),
        lambda: handshake.request(draw.randbytes(32)) + struct.pack("!I", draw.randrange(1 << 32)),
        lambda: handshake.request(draw.randbytes(32)) + _framed(draw.choice(HOSTILE_JSON), draw),
        lambda: b"rp-dist" + bytes([draw.choice([0, 2, 255])]) + draw.randbytes(100),
        lambda: handshake.request(draw.randbytes(32))[: draw.randrange(1, 40)],
    ]
    return [kinds[number % len(kinds)]() for number in range(count)]


def _framed(body: bytes, draw: random.Random) -> bytes:
    return struct.pack("!I", len(body)) + body + draw.randbytes(16)


def connect(place: tuple[str, int]) -> socket.socket | None:
    """A connection; None if nobody takes it at once."""
    try:
        return socket.create_connection(place, timeout=2)
    except OSError:
        return None


def attack(place: tuple[str, int], data: bytes, way: int) -> socket.socket | None:
    """Send a packet, and then close, break, half close, or keep the connection, which is returned."""
    if (sock := connect(place)) is None:
        return None
    with contextlib.suppress(OSError):
        sock.sendall(data)
        if way % 4 == 0:
            sock.close()
        elif way % 4 == 1:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        elif way % 4 == 2:
            sock.shutdown(socket.SHUT_WR)
            return sock
        else:
            return sock
    return None


def greet_with(place: tuple[str, int], run: str, secret: Secret, messages: list[bytes]) -> str:
    """Introduce a stranger as far as its secret lets it; what the other side does with it."""
    if (sock := connect(place)) is None:
        return "nobody"
    with sock, contextlib.suppress(OSError):
        own = handshake.nonce()
        sock.sendall(handshake.request(own))
        found = sock.recv(handshake.ANSWER_BYTES, socket.MSG_WAITALL)
        keys = handshake.keys(secret, run, own, handshake.nonce_in(found), accepts=False)
        link = Link(sock, keys)
        for message in messages:
            link.send_body(message)
        sock.settimeout(20)
        while sock.recv(4096):
            pass
        return "closed"
    return "closed"


@contextlib.contextmanager
def dripping(place: tuple[str, int], count: int) -> Iterator[None]:
    """So many connections that send the right first bytes one by one, and begin again when they are closed."""
    ended = Event()

    def drip() -> None:
        while not ended.is_set():
            if (sock := connect(place)) is None:
                ended.wait(0.1)
                continue
            with sock, contextlib.suppress(OSError):
                for byte in handshake.request(os.urandom(32)):
                    sock.send(bytes([byte]))
                    if select.select([sock], [], [], 0.2)[0] or ended.is_set():
                        break

    threads = [Thread(target=drip, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def ports(pid: int) -> list[tuple[str, int]]:
    """The addresses at which a process listens, over TCP. Linux alone."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(_address(fields[1]))
    return found


def _address(text: str) -> tuple[str, int]:
    digits, port = text.split(":")
    words = bytes.fromhex(digits)
    data = b"".join(words[begin : begin + 4][::-1] for begin in range(0, len(words), 4))
    return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data), int(port, 16)


def files(pid: int) -> int:
    """How many files a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))
