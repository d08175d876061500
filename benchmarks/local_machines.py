"""Several machines, each a process of this one, as torchrun would start them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import torch
import torch.multiprocessing as mp


def results_of(count: int, body: Callable[[int], bool], *, threads: int = 1) -> list[bool]:
    """Run `body(rank)` on so many machines, each with these threads; return what it returned on each."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_start, (count, port, body, threads, results), nprocs=count)
    return [results.get() for _ in range(count)]


def _start(
    rank: int, count: int, port: int, body: Callable[[int], bool], threads: int, results: mp.SimpleQueue
) -> None:
    place = {"RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(threads)
    results.put(body(rank))
