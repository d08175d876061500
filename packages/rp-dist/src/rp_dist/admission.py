"""Which machines are admitted: one for each rank of this run, by how it introduces itself."""

from __future__ import annotations

import os
import socket
from typing import Any

from rp_dist.messages import Hello

_OR_TWO_JOBS = "; if these are two jobs, give each a MASTER_PORT of its own"


class Admission:
    """The machines that have said hello to machine `rank` of `size`."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._hellos: dict[int, Hello] = {}
        self._addresses: dict[int, tuple[str, int]] = {}

    def hello(self, address: str, port: int) -> list[Any]:
        """Return the message in which this machine introduces itself, as listening there."""
        return ["hello", self.rank, self.size, address, port, _process()]

    def admit(self, hello: Hello, address: str) -> None:
        """Note a machine that has said hello from this address."""
        self._hellos[hello.rank] = hello
        self._addresses[hello.rank] = (hello.address or address, hello.port)

    def places(self) -> dict[int, tuple[str, int]]:
        """Return the addresses and ports at which the admitted machines listen."""
        return dict(self._addresses)

    def refusal(self, hello: Hello) -> str | None:
        """Return why a machine cannot take part; None if it can."""
        rank, size = hello.rank, hello.size
        if size != self.size:
            return (
                f"rank {rank} was started as one of {size} machines, but rank {self.rank} as one of {self.size}; "
                f"all need the same WORLD_SIZE (torchrun's --nnodes times --nproc-per-node){_OR_TWO_JOBS}"
            )
        if not 0 <= rank < size:
            return outside(rank, size, hello.process)
        first = _process() if rank == self.rank else self._hellos[rank].process if rank in self._hellos else None
        if first is not None:
            return (
                f"rank {rank} was started twice, as {first} and as {hello.process}; each machine needs a rank of "
                f"its own (torchrun's --node-rank){_OR_TWO_JOBS}"
            )
        return None


def _process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"[:200]


def outside(rank: int, size: int, process: str) -> str:
    """Return the words for a rank that does not exist."""
    return (
        f"a machine ({process}) was started as rank {rank}, but {size} machines (WORLD_SIZE) have the ranks 0 to "
        f"{size - 1}; give it one of these (torchrun's --node-rank)"
    )
