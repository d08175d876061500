"""Machines as processes of this one: a program on several ranks over loopback, each telling what it found."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence

from programs import Program

IMPORTS = "import gc, torch, rp_dist\ntorch.set_num_threads(1)\ngc.freeze()\n"
# Programs may `tell` a value at any time; the test reads it with `Ranks.hear`.
PRELUDE = """
import faulthandler, json, os, signal, sys, time
import torch, rp_dist
from rp_dist import Machines, MachineLost

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

# A program that hangs says where.
faulthandler.dump_traceback_later(40, exit=True)

def tell(value):
    os.write(1, (json.dumps(value) + "\\n").encode())

"""
LIMIT_S = 60.0


def free_port() -> int:
    """A port that nothing listens on.

    Below those that systems give to connections, one of which could have it before the program listens.
    """
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Ranks:
    """Programs under way, one of each rank; what they tell comes through pipes.

    `environment`: what all have, beside their ranks.
    """

    def __init__(self, programs: Sequence[Program], pipes: Sequence[int], environment: Mapping[str, str]) -> None:
        self.programs = programs
        self.environment = environment
        self._pipes = pipes
        self._unread = [b"" for _ in pipes]

    def hear(self, rank: int, limit_s: float = LIMIT_S) -> object:
        """The next value that a rank tells."""
        end = time.monotonic() + limit_s
        while b"\n" not in self._unread[rank]:
            ready, _, _ = select.select([self._pipes[rank]], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"rank {rank} told nothing in {limit_s} s"
            data = os.read(self._pipes[rank], 1 << 16)
            assert data, f"rank {rank} ended: {self.programs[rank].end()}"
            self._unread[rank] += data
        line, _, self._unread[rank] = self._unread[rank].partition(b"\n")
        return json.loads(line)

    def hear_all(self) -> list[object]:
        """The next value of each rank."""
        return [self.hear(rank) for rank in range(len(self.programs))]

    def send(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank's process."""
        os.kill(self.programs[rank].pid, number)

    def ended(self) -> list[tuple[int, str]]:
        """Exit statuses, and what was written to the terminal."""
        return [(status, complaints) for status, _, complaints in (program.end() for program in self.programs)]


@contextlib.contextmanager
def ranks(
    code: str, size: int, port: int | None = None, imports: str = IMPORTS, **environment: str
) -> Iterator[Ranks]:
    """The program on all ranks; leaving the context kills what still runs. `imports`: what was imported before."""
    port = port or free_port()
    with contextlib.ExitStack() as stack:
        programs, pipes = [], []
        shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **environment}
        for rank in range(size):
            reader, writer = os.pipe()
            stack.callback(os.close, reader)
            program = Program(PRELUDE + code, imports=imports, stdout=writer, RANK=str(rank), **shared)
            os.close(writer)
            programs.append(stack.enter_context(program))
            pipes.append(reader)
        yield Ranks(programs, pipes, shared)


def told(code: str, size: int, **environment: str) -> list[object]:
    """What each rank tells, of a program in which all end well and in silence."""
    with ranks(code, size, **environment) as running:
        values = running.hear_all()
        assert running.ended() == [(0, "")] * size
        return values
