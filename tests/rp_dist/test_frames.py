"""Messages over a socket arrive whole and in order, or not at all: only who has the link's keys can send one."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_dist.links import handshake
from rp_dist.links.frames import CODE_BYTES, FRAME_BYTES, HELLO_BYTES, Forged, Link
from rp_dist.links.handshake import Keys
from rp_dist.links.secret import Secret

MESSAGES = [None, 1, "é", [1.5, {"a": []}], {"b": "x" * 1000}, "y" * (2 * FRAME_BYTES + 1)]
SECRET = Secret(b"a secret of tests", is_own=True)
HERE, THERE = (
    handshake.keys(SECRET, "ab" * 16, b"c" * 32, b"a" * 32, accepts=accepts) for accepts in (True, False)
)


class Sink:
    """A socket that keeps what is sent, for frames that a test sends on itself."""

    def __init__(self) -> None:
        self.data = b""

    def send(self, data: bytes | bytearray) -> int:
        """Keep it."""
        self.data += bytes(data)
        return len(data)

    def setblocking(self, _: bool) -> None:
        """Nothing blocks."""

    def setsockopt(self, *_: int) -> None:
        """There is nothing to set."""


def frames(*messages: object, keys: Keys = THERE) -> list[bytes]:
    """The bytes of each message, as one link sends them one after the other."""
    sink, found = Sink(), []
    link = Link(sink, keys, rank=0)  # pyright: ignore[reportArgumentType]
    for message in messages:
        link.send(message)
        found.append(sink.data)
        sink.data = b""
    return found


def reader(rank: int | None = 1) -> Link:
    """The other end of these frames, which takes bytes as if they had been received."""
    return Link(Sink(), HERE, rank)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    """A link, and the link at its other end."""
    ours, theirs = socket.socketpair()
    links = Link(ours, HERE, 0), Link(theirs, THERE, 1)
    yield links
    for link in links:
        link.close()


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1000, 5000])
def test_messages_arrive_whole_and_in_order_however_the_stream_is_cut(size: int) -> None:
    stream, here = b"".join(frames(*MESSAGES)), reader()

    found = []
    for begin in range(0, len(stream), size):
        found += here.take(stream[begin : begin + size])

    assert found == MESSAGES


def test_a_long_message_on_a_slow_link_shows_signs_of_life_before_it_is_whole() -> None:
    (data,), here = frames("x" * (3 * FRAME_BYTES)), reader()
    here.heard_s = 0.0

    assert list(here.take(data[: 2 * FRAME_BYTES])) == []

    assert here.heard_s > 0.0


def test_bytes_that_are_no_whole_frame_are_no_sign_of_life() -> None:
    (data,), here = frames("x" * 1000), reader()
    here.heard_s = 0.0

    assert list(here.take(data[:-1])) == []

    assert here.heard_s == 0.0


def test_signs_of_life_are_no_messages_but_are_heard(ends: tuple[Link, Link]) -> None:
    here, there = ends
    here.heard_s = 0.0

    there.beat()
    there.send("between")
    there.beat()

    assert list(here.read()) == ["between"]
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
        list(here.read())


@pytest.mark.parametrize(("rank", "length"), [(0, FRAME_BYTES + 1), (None, HELLO_BYTES + 1), (0, (1 << 31) - 1)])
def test_a_frame_that_is_too_long_is_refused_before_it_has_come(rank: int | None, length: int) -> None:
    with pytest.raises(Forged, match=f"a frame of {length} bytes"):
        list(reader(rank).take(struct.pack("!I", length)))


def test_what_came_before_a_forged_frame_is_heard() -> None:
    found = reader().take(frames("good")[0] + bytes(4 + CODE_BYTES))

    assert next(found) == "good"
    with pytest.raises(Forged, match="code is wrong"):
        next(found)


ONE, TWO, THREE = frames("one", "two", "three")
OTHER_LINK = handshake.keys(SECRET, "ab" * 16, b"d" * 32, b"a" * 32, accepts=False)
OTHER_RUN = handshake.keys(SECRET, "cd" * 16, b"c" * 32, b"a" * 32, accepts=False)
OTHER_SECRET = handshake.keys(
    Secret(b"another secret!!", is_own=True), "ab" * 16, b"c" * 32, b"a" * 32, accepts=False
)
ATTACKS = {
    "repeated": ONE + ONE,
    "left out": ONE + THREE,
    "in another order": TWO + ONE,
    "sent back": frames("one", keys=HERE)[0],
    "of another link": frames("one", keys=OTHER_LINK)[0],
    "of another run": frames("one", keys=OTHER_RUN)[0],
    "made with another secret": frames("one", keys=OTHER_SECRET)[0],
    "said to go on": struct.pack("!I", struct.unpack_from("!I", ONE)[0] | 1 << 31) + ONE[4:],
    "without a code": ONE[:-CODE_BYTES] + bytes(CODE_BYTES),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_frame_that_is_not_the_next_one_of_this_link_is_refused(attack: str) -> None:
    with pytest.raises(Forged):
        list(reader().take(ATTACKS[attack]))


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_no_change_of_any_bytes_gives_another_message(data: st.DataObject) -> None:
    stream = bytearray(ONE + TWO + THREE)
    for _ in range(data.draw(st.integers(1, 3))):
        begin = data.draw(st.integers(0, len(stream)))
        end = data.draw(st.integers(begin, min(len(stream), begin + 30)))
        stream[begin:end] = data.draw(st.binary(max_size=30))

    found: list[object] = []
    with contextlib.suppress(Forged):
        found.extend(reader().take(stream))

    assert found == ["one", "two", "three"][: len(found)]
