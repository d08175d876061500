"""`Wire`: sends and receives pieces of blocks over several gloo process groups.

It uses only point-to-point calls. A machine that fails breaks only the connections to itself.
`abort` breaks all, so that no thread keeps waiting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from rp_dist.control import GRACE_S, LEFT, Control
from rp_dist.groups import GlooGroup

_TAG_BITS = 20
_SIZE_BITS = 9
TAGS_APART = 1 << _TAG_BITS
_NEVER_SENT = (1 << 31) - 1
REDUCE, GATHER, PASS = range(3)


def slot(kind: int, tag: int, nbytes: int) -> int:
    """Return gloo's tag for a transfer. Pieces of one slot, pair and connection arrive in the order of posting.

    Tags that differ by less than `TAGS_APART` have different slots. The size is part of the slot, since gloo
    terminates the process if a piece is longer than the memory posted for it.
    """
    size = crc32(str(nbytes).encode()) & ((1 << _SIZE_BITS) - 1)
    return (kind << _TAG_BITS | tag % TAGS_APART) << _SIZE_BITS | size


@dataclass(frozen=True, slots=True)
class Posted:
    """A piece that gloo sends or receives. It keeps the tensor alive until then."""

    work: dist.Work
    piece: Tensor
    peer: int
    is_sent: bool


class Wire:
    """The connections to all other machines. `patience_s`: how long a machine that is alive may delay a piece."""

    def __init__(self, groups: Sequence[GlooGroup], control: Control, patience_s: float) -> None:
        self.groups = list(groups)
        self.control = control
        self.patience_s = patience_s
        self.sent_bytes = 0
        self.received_bytes = 0
        self._counting = threading.Lock()
        self._is_aborted = False
        # For each waiting thread: the machine it waits for, and since when.
        self._waits: dict[int, tuple[int, float]] = {}

    def send(self, piece: Tensor, peer: int, slot: int, connection: int) -> Posted:
        """Start to send a piece, 1-D and contiguous; return before it is received."""
        return self._post(self._group(connection).send, piece, peer, slot, True)

    def receive(self, piece: Tensor, peer: int, slot: int, connection: int) -> Posted:
        """Start to receive a piece that the other machine sends on the same slot and connection."""
        return self._post(self._group(connection).recv, piece, peer, slot, False)

    def _group(self, connection: int) -> GlooGroup:
        self.control.raise_error()
        return self.groups[connection % len(self.groups)]

    def _post(
        self,
        call: Callable[[list[Tensor], int, int], dist.Work],
        piece: Tensor,
        peer: int,
        slot: int,
        is_sent: bool,
    ) -> Posted:
        data = piece.view(torch.uint8)
        with _named(self, peer):
            work = call([data], peer, slot)
        return Posted(work, data, peer, is_sent)

    def wait(self, posted: Posted) -> None:
        """Wait for a piece and count its bytes."""
        thread = threading.get_ident()
        self._waits[thread] = (posted.peer, time.monotonic())
        try:
            with _named(self, posted.peer):
                posted.work.wait(timedelta(seconds=self.patience_s))
        finally:
            del self._waits[thread]
        with self._counting:
            if posted.is_sent:
                self.sent_bytes += posted.piece.numel()
            else:
                self.received_bytes += posted.piece.numel()

    def waited_s(self, rank: int) -> float:
        """Return how many seconds a thread has waited for a piece of machine `rank`; 0 if none is waiting."""
        now = time.monotonic()
        return max((now - since for peer, since in list(self._waits.values()) if peer == rank), default=0.0)

    def raise_named(self, peer: int, error: BaseException) -> None:
        """Raise the error that names the machine that made a call fail, which may take a moment to be known."""
        with suppress(TimeoutError):
            self.control.wait(lambda: self.control.has_left(peer), GRACE_S)
        if self.control.has_left(peer):
            self.control.give_up(peer, LEFT)
        self.control.give_up(peer, f"a transfer with it failed: {str(error).splitlines()[0]}")
        self.control.raise_error()

    def abort(self) -> None:
        """Break all connections, so that every wait ends with an error. May be called twice."""
        with self._counting:
            if self._is_aborted:
                return
            self._is_aborted = True
        others = [rank for rank in range(self.control.size) if rank != self.control.rank]
        for group, peer in product(self.groups, others):
            _break(group, peer)

    def close(self) -> None:
        """Close the groups, as far as no thread is stuck in one."""
        self.groups = []


def _break(group: GlooGroup, peer: int) -> None:
    """Close all of a group's connections by a receive from `peer` that times out.

    This does nothing if the connection to `peer` is closed already, so callers try it with every machine. Closing
    on a timeout is documented, unlike gloo's calls to abort.
    """
    with suppress(RuntimeError, ValueError):
        work = group.recv([torch.empty(1)], peer, _NEVER_SENT)
        work.wait(timedelta(milliseconds=1))


class _named:  # noqa: N801 - reads as a function
    """Turns gloo's errors into errors that name the machine that caused them."""

    def __init__(self, wire: Wire, peer: int) -> None:
        self.wire, self.peer = wire, peer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            self.wire.raise_named(self.peer, error)
