"""Somebody between two machines changes what they send: both end with named errors, and nothing false is heard."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections.abc import Callable
from threading import Event, Thread

import pytest
from processes import Ranks, ranks
from rp_dist.links import handshake
from rp_dist.links.frames import CODE_BYTES

PROGRAM = """
from rp_dist.opening.opening import Opening
if rank == 1:
    import socket
    def reach(_, card, seconds):
        tell(card.port)
        return socket.create_connection(("127.0.0.1", int(os.environ["BETWEEN"])))
    Opening._reach = reach
machines = Machines.open(connections=1, timeout_s=5)
tell("open")
number = 0
try:
    while True:
        number += 1
        assert machines.exchange([rank, number]) == [[0, number], [1, number]]
except MachineLost as error:
    tell([error.rank, str(error)])
"""
Attack = Callable[["Between", bytes], list[bytes]]


class Between:
    """A program through which all goes that rank 1 and rank 0 send each other; `armed`: it may change things."""

    def __init__(self, attack: Attack, *, from_first: bool) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.armed = Event()
        self.recorded: list[bytes] = []
        self.kept: list[bytes] = []
        self._attack, self._from_first = attack, from_first

    def start(self, target: int) -> None:
        """Take the connection of rank 1, and go on to rank 0."""
        self.of_second, _ = self.listener.accept()
        self.of_first = socket.create_connection(("127.0.0.1", target))
        for ends in ((self.of_second, self.of_first, False), (self.of_first, self.of_second, True)):
            Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, from_first: bool) -> None:
        with contextlib.suppress(OSError, struct.error):
            target.sendall(_exactly(source, handshake.ANSWER_BYTES if from_first else handshake.REQUEST_BYTES))
            while True:
                head = _exactly(source, 4)
                frame = head + _exactly(source, (struct.unpack("!I", head)[0] & ~(1 << 31)) + CODE_BYTES)
                frames = [frame]
                if from_first == self._from_first:
                    self.recorded.append(frame)
                    if self.armed.is_set():
                        frames = self._attack(self, frame)
                for each in frames:
                    target.sendall(each)
        self.close()

    def close(self) -> None:
        """Break both connections."""
        for sock in (self.of_first, self.of_second):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (piece := sock.recv(count - len(data))):
            raise ConnectionResetError
        data += piece
    return data


def _changed(_: Between, frame: bytes) -> list[bytes]:
    place = random.SystemRandom().randrange(4, len(frame))
    return [frame[:place] + bytes([frame[place] ^ 1 << place % 8]) + frame[place + 1 :]]


def _swapped(between: Between, frame: bytes) -> list[bytes]:
    between.kept.append(frame)
    return between.kept[::-1] if len(between.kept) > 1 else []


def _left_out(between: Between, frame: bytes) -> list[bytes]:
    between.kept.append(frame)
    return [] if len(between.kept) == 1 else [frame]


def _sent_back(between: Between, frame: bytes) -> list[bytes]:
    (between.of_first if between._from_first else between.of_second).sendall(frame)
    return [frame]


ATTACKS: dict[str, Attack] = {
    "changed": _changed,
    "repeated": lambda _, frame: [frame, frame],
    "an earlier one": lambda between, frame: [frame, between.recorded[-3]],
    "the first one": lambda between, frame: [frame, between.recorded[0]],
    "left out": _left_out,
    "swapped": _swapped,
    "sent back": _sent_back,
    "made up": lambda _, frame: [frame, struct.pack("!I", 30) + bytes(46)],
    "too long": lambda _, frame: [frame, struct.pack("!I", (1 << 31) - 1)],
}


def _opened(running: Ranks, between: Between) -> None:
    target = running.hear(1)
    assert isinstance(target, int)
    between.start(target)
    assert running.hear_all() == ["open", "open"]


@pytest.mark.parametrize("from_first", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "attack", [pytest.param(name, marks=() if name == "changed" else pytest.mark.slow) for name in ATTACKS]
)
def test_a_message_that_was_touched_on_its_way_ends_both_machines_with_named_errors(
    attack: str, from_first: bool
) -> None:
    between = Between(ATTACKS[attack], from_first=from_first)
    with between.listener, ranks(PROGRAM, 2, BETWEEN=str(between.port)) as running:
        _opened(running, between)

        between.armed.set()
        found = running.hear_all()

        assert any("its connection carried a" in words for _, words in found), found
        assert all(words.startswith(f"rank {rank} is lost: ") for rank, words in found), found


@pytest.mark.slow
def test_a_connection_that_is_cut_within_a_message_is_named() -> None:
    def cut(between: Between, frame: bytes) -> list[bytes]:
        between.of_second.sendall(frame[: len(frame) // 2])
        between.close()
        return []

    between = Between(cut, from_first=True)
    with between.listener, ranks(PROGRAM, 2, BETWEEN=str(between.port)) as running:
        _opened(running, between)

        between.armed.set()
        found = running.hear_all()

        assert all("its process ended, or its connection was reset" in words for _, words in found), found
