"""Messages over a socket arrive whole and in order, however the bytes of the stream are cut."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator

import pytest
from rp_dist.frames import MAX_BYTES, Link

MESSAGES = [None, 1, "é", [1.5, {"a": []}], {"b": "x" * 1000}]


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    """A link, and the link at its other end."""
    links = tuple(Link(sock, rank) for rank, sock in enumerate(socket.socketpair()))
    yield links[0], links[1]
    for link in links:
        link.close()


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1000, 5000])
def test_messages_arrive_whole_and_in_order_however_the_stream_is_cut(ends: tuple[Link, Link], size: int) -> None:
    stream = b"".join(struct.pack("!I", len(data)) + data for data in (json.dumps(m).encode() for m in MESSAGES))
    here, there = ends

    found = []
    for begin in range(0, len(stream), size):
        there.socket.send(stream[begin : begin + size])
        found += here.read()

    assert found == MESSAGES


def test_signs_of_life_are_no_messages_but_are_heard(ends: tuple[Link, Link]) -> None:
    here, there = ends
    here.heard_s = 0.0

    there.beat()
    there.send("between")
    there.beat()

    assert here.read() == ["between"]
    assert here.heard_s > 0.0


def test_what_a_socket_does_not_take_at_once_is_sent_later(ends: tuple[Link, Link]) -> None:
    here, there = ends
    large = "y" * (8 << 20)

    there.send(large)
    assert there.has_unsent()
    found: list[object] = []
    while not found:
        there.flush()
        found += here.read()

    assert found == [large]
    assert not there.has_unsent()


def test_a_connection_that_ended_is_an_error_of_the_reader_and_none_of_the_sender(ends: tuple[Link, Link]) -> None:
    here, there = ends

    there.close()
    here.send("nobody is there")

    with pytest.raises(OSError, match="closed"):
        here.read()


@pytest.mark.parametrize(("rank", "length"), [(0, MAX_BYTES + 1), (None, (1 << 16) + 1)])
def test_bytes_of_another_protocol_are_refused(ends: tuple[Link, Link], rank: int | None, length: int) -> None:
    here, there = ends
    here.rank = rank

    there.socket.send(struct.pack("!I", length))

    with pytest.raises(ConnectionResetError, match="does not follow this protocol"):
        here.read()
