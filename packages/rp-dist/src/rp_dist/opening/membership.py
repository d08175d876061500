"""`Membership`: which of the machines this process is, and where it finds the first one."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import torch.distributed as dist

from rp_dist.errors import InvalidTransfer


@dataclass(frozen=True, slots=True)
class Membership:
    """This machine's rank, the number of machines, and the address of rank 0."""

    rank: int
    size: int
    host: str
    port: int

    @classmethod
    def found(cls) -> Membership:
        """Read the default process group if there is one, otherwise torchrun's environment variables."""
        host = os.environ.get("MASTER_ADDR", socket.gethostname())
        if dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), host, 0)
        rank, size, port = map(_number_in, ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        if size < 1 or not 0 < port < 1 << 16:
            raise InvalidTransfer(
                f"WORLD_SIZE must be 1 or more and MASTER_PORT 1 to 65535, but they are {size} and {port} instead"
            )
        return cls(rank, size, host, port)

    @property
    def is_inside(self) -> bool:
        """Whether there is such a rank."""
        return 0 <= self.rank < self.size


def _number_in(name: str) -> int:
    """Return the number in a variable of torchrun's. Raises `InvalidTransfer` if it has none."""
    found = os.environ.get(name)
    try:
        return int(found or "")
    except ValueError:
        raise InvalidTransfer(
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set, as torchrun does, or a default process "
            f"group must be initialized, but {name} is {'not set' if found is None else repr(found)}"
        ) from None
