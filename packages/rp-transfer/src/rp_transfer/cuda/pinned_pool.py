"""Host memory to the byte: blocks that live long, and a pool of buffers that are used again and again."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from functools import partial

import torch

from rp_transfer.api import HostUse
from rp_transfer.memory.blocks import ALIGNMENT, Layout
from rp_transfer.memory.guard import Guard
from rp_transfer.memory.pages import Pinned, Slab

# Smaller memory shares slabs: whole pages for each would waste too many of them.
_SMALL_BYTES = 1 << 16
_SHARED_BYTES = 1 << 20
# Of a model's blocks, which are known together and so can share one slab of exactly their size.
_SMALL_BLOCK_BYTES = 1 << 22

# An address, and the slab that it lies in.
Piece = tuple[int, Slab]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _size_class(nbytes: int) -> int:
    """Rounded up by an eighth at the most, so that batches of about the same size use the same buffers."""
    step = 1 << max(nbytes.bit_length() - 4, 0)
    return -(-nbytes // step) * step


class HostMemory:
    """Host memory from pinned slabs; buffers of training calls are reused.

    A buffer goes back to the pool when the last tensor on it is gone, so whoever queues a copy on it retains it
    until the copy has finished. The pool holds no more idle bytes than were ever lent at once: sizes that are not
    asked for any more go, the longest unused first.
    """

    def __init__(self, pinned: Pinned, total_bytes: int) -> None:
        self._pinned = pinned
        self._total = total_bytes
        self._free: OrderedDict[int, list[Piece]] = OrderedDict()
        self._shared: Slab | None = None
        self._shared_used = 0
        self._idle = 0
        self._lent = 0
        self._most_lent = 0
        self._guard = Guard()
        self._freed: deque[Piece] = deque()
        self._used = 0
        self._peak = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, short_lived: bool) -> torch.Tensor:
        """A tensor on memory of its own."""
        self._catch_up()
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        room = _size_class(nbytes) if short_lived else nbytes
        piece = self._take(room, short_lived)
        return self._tensor(piece, room, dtype, short_lived)[: math.prod(shape)].view(tuple(shape))

    def blocks(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        """(numel,) for each layout; the small ones lie together in one slab of exactly their size."""
        self._catch_up()
        small = [_aligned(layout.nbytes) for layout in layouts if layout.nbytes < _SMALL_BLOCK_BYTES]
        slab = Slab(sum(small), self._pinned) if sum(small) else None
        found: list[torch.Tensor] = []
        offset = 0
        for layout in layouts:
            if slab is None or layout.nbytes == 0 or layout.nbytes >= _SMALL_BLOCK_BYTES:
                found.append(self.empty((layout.numel,), layout.dtype, short_lived=False))
                continue
            self._count(layout.nbytes)
            found.append(self._tensor((slab.address + offset, slab), layout.nbytes, layout.dtype, False))
            offset += _aligned(layout.nbytes)
        return found

    def use(self) -> HostUse:
        """Bytes taken, pooled buffers included, and bytes pinned."""
        self._catch_up()
        return HostUse(self._used, self._peak, self._pinned.nbytes, self._total)

    def clear(self) -> None:
        """Free the buffers that nobody uses."""
        self._catch_up()
        with self._guard:
            self._shrink(0)
            self._shared = None
        self._freed.clear()

    def _tensor(self, piece: Piece, nbytes: int, dtype: torch.dtype, short_lived: bool) -> torch.Tensor:
        buffer = (ctypes.c_ubyte * nbytes).from_address(piece[0])
        give_back = self._give_back if short_lived else self._drop
        weakref.finalize(buffer, give_back, nbytes, piece).atexit = False
        return torch.frombuffer(buffer, dtype=dtype)

    def _take(self, nbytes: int, short_lived: bool) -> Piece:
        piece = self._reuse(nbytes) if short_lived else None
        if piece is not None:
            return piece
        piece = self._carve(nbytes)
        with self._guard:
            self._count(nbytes)
            self._lend(nbytes if short_lived else 0)
        return piece

    def _carve(self, nbytes: int) -> Piece:
        if nbytes >= _SMALL_BYTES:
            slab = Slab(nbytes, self._pinned)
            return slab.address, slab
        with self._guard:
            if self._shared is None or self._shared_used + nbytes > _SHARED_BYTES:
                self._shared, self._shared_used = Slab(_SHARED_BYTES, self._pinned), 0
            address = self._shared.address + self._shared_used
            self._shared_used += _aligned(nbytes)
            return address, self._shared

    def _reuse(self, nbytes: int) -> Piece | None:
        with self._guard:
            if not (pieces := self._free.get(nbytes)):
                return None
            self._free.move_to_end(nbytes)
            self._idle -= nbytes
            self._lend(nbytes)
            return pieces.pop()

    def _count(self, nbytes: int) -> None:
        with self._guard:
            self._used += nbytes
            self._peak = max(self._peak, self._used)

    def _lend(self, nbytes: int) -> None:
        self._lent += nbytes
        self._most_lent = max(self._most_lent, self._lent)

    def _catch_up(self) -> None:
        self._guard.catch_up()
        # Unpinning takes its time: not under the lock.
        self._freed.clear()

    def _give_back(self, nbytes: int, piece: Piece) -> None:
        self._guard.afterwards(partial(self._take_back, nbytes, piece))

    def _take_back(self, nbytes: int, piece: Piece) -> None:
        self._lent -= nbytes
        self._idle += nbytes
        self._free.setdefault(nbytes, []).append(piece)
        self._shrink(self._most_lent)

    def _shrink(self, most: int) -> None:
        while self._idle > most:
            nbytes, pieces = next(iter(self._free.items()))
            if pieces:
                self._freed.append(pieces.pop())
                self._idle -= nbytes
                self._used -= nbytes
            else:
                del self._free[nbytes]

    def _drop(self, nbytes: int, piece: Piece) -> None:
        del piece
        self._guard.afterwards(partial(self._count, -nbytes))
