"""Measure the link between the machines: how many connections saturate it, and its rate then."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from rp_dist.blocks.wire import PASS, Wire, slot

PIECE_BYTES = 1 << 20
_FIRST_BYTES = 4 << 20
_MOST_BYTES = 256 << 20
# The least time of a measurement: long enough to be accurate, short enough for opening.
_LEAST_S = 0.05
_ROUNDS = 3
MOST_CONNECTIONS = 8
# Double the connections again only if the last doubling raised the rate by at least this factor.
_LEAST_GAIN = 1.15


def fill(wire: Wire, add_groups: Callable[[int], None]) -> float:
    """Double the number of connections until the link gets no faster; return its GB/s."""
    best = measure(wire)
    while len(wire.groups) < MOST_CONNECTIONS:
        add_groups(len(wire.groups))
        rate = measure(wire)
        if rate < best * _LEAST_GAIN:
            return max(best, rate)
        best = rate
    return best


def measure(wire: Wire) -> float:
    """Return the GB/s (1e9 bytes) of the slowest machine, while each sends to the next in a ring and receives."""
    nbytes = _FIRST_BYTES
    while (seconds := _slowest_s(wire, nbytes)) < _LEAST_S and nbytes < _MOST_BYTES:
        nbytes *= 4
    seconds = min(seconds, *(_slowest_s(wire, nbytes) for _ in range(_ROUNDS - 1)))
    return nbytes / seconds / 1e9


def _slowest_s(wire: Wire, nbytes: int) -> float:
    control = wire.control
    control.exchange(None, _CHANNEL)
    begin_s = time.perf_counter()
    _pass_round(wire, nbytes)
    return max(control.exchange(time.perf_counter() - begin_s, _CHANNEL))


def _pass_round(wire: Wire, nbytes: int) -> None:
    rank, size = wire.control.rank, wire.control.size
    tag = slot(PASS, -1, nbytes)
    outgoing, incoming = (torch.zeros(PIECE_BYTES, dtype=torch.uint8) for _ in range(2))
    pieces = range(nbytes // PIECE_BYTES)
    posted = [wire.receive(incoming, (rank - 1) % size, tag, index) for index in pieces]
    posted += [wire.send(outgoing, (rank + 1) % size, tag, index) for index in pieces]
    for each in posted:
        wire.wait(each)


_CHANNEL = -1
