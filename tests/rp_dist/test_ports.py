"""gloo's connections are proven before they are used, and its ports let nothing more in; no others are touched."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterator

import pytest
from processes import ranks
from rp_dist.opening.groups import shut_ports

IMPOSTOR = """
from rp_dist.links.secret import Secret
if rank == 1:
    true_code = Secret.code
    Secret.code = lambda self, *parts: true_code(self, *parts)[::-1 if parts[0].startswith(b"gloo") else 1]
try:
    Machines.open(connections=1, timeout_s=20)
except MachineLost as error:
    tell([error.rank, str(error)])
"""


def test_who_cannot_prove_itself_over_gloo_takes_part_in_no_training() -> None:
    with ranks(IMPOSTOR, 2) as running:
        found = running.hear_all()

        assert all("somebody else has taken its place in a connection of gloo" in words for _, words in found), (
            found
        )


@pytest.fixture
def listeners() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two sockets that listen on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        yield one, other


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux drops what arrives")
def test_a_port_that_was_shut_lets_nothing_in_and_keeps_its_connections(
    listeners: tuple[socket.socket, socket.socket],
) -> None:
    shut, other = listeners
    before = socket.create_connection(shut.getsockname())
    accepted, _ = shut.accept()
    told = b"gloo's words" + struct.pack("=H", socket.AF_INET) + struct.pack("!H", shut.getsockname()[1])

    assert shut_ports(told + socket.inet_aton("127.0.0.1") + bytes(100)) == 1

    with pytest.raises(TimeoutError):
        socket.create_connection(shut.getsockname(), timeout=0.2)
    before.sendall(b"still here")
    assert accepted.recv(100) == b"still here"
    socket.create_connection(other.getsockname(), timeout=20).close()
    for sock in (before, accepted):
        sock.close()
