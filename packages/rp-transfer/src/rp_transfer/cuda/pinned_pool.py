"""Allocation of pinned host memory: long-lived blocks of exact size, and a pool of short-lived buffers."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from rp_transfer.api import HostUse
from rp_transfer.memory.blocks import ALIGNMENT, Layout
from rp_transfer.memory.guard import Guard
from rp_transfer.memory.pages import Pinned, Slab

# In bytes. Smaller allocations share slabs, since whole pages for each would waste memory.
_SMALL_BYTES = 1 << 16
_SHARED_BYTES = 1 << 20
# In bytes. A model's blocks are allocated together; blocks smaller than this share one slab of their exact size.
_SMALL_BLOCK_BYTES = 1 << 22

# An address, and the slab that holds it.
Piece = tuple[int, Slab]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _size_class(nbytes: int) -> int:
    """Round up by at most an eighth, so that batches of about the same size share buffers."""
    step = 1 << max(nbytes.bit_length() - 4, 0)
    return -(-nbytes // step) * step


class HostMemory:
    """An allocator of pinned host memory with a pool of short-lived buffers.

    A buffer returns to the pool when its last tensor is freed, so callers keep it alive until their copies have
    finished. The pool keeps at most as many idle bytes as were ever in use at once. Beyond that it releases the
    least recently used sizes.
    """

    def __init__(self, pinned: Pinned, total_bytes: int) -> None:
        self._pinned = pinned
        self._total = total_bytes
        self._free: OrderedDict[int, list[Piece]] = OrderedDict()
        self._shared: Slab | None = None
        self._shared_used = 0
        self._idle = 0
        self._in_use = 0
        self._most_in_use = 0
        self._guard = Guard()
        self._freed: deque[Piece] = deque()
        self._used = 0
        self._peak = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, short_lived: bool) -> torch.Tensor:
        """Allocate a tensor; a `short_lived` one may reuse a pooled buffer of about its size."""
        self._catch_up()
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        room = _size_class(nbytes) if short_lived else nbytes
        piece = self._take(room, short_lived)
        return self._tensor(piece, room, dtype, short_lived)[: math.prod(shape)].view(tuple(shape))

    def blocks(self, layouts: Sequence[Layout]) -> Iterator[torch.Tensor]:
        """Allocate a block, (numel,), for each layout when the iterator reaches it; small ones share a slab."""
        self._catch_up()
        small = [_aligned(layout.nbytes) for layout in layouts if layout.nbytes < _SMALL_BLOCK_BYTES]
        slab = Slab(sum(small), self._pinned) if sum(small) else None
        offset = 0
        for layout in layouts:
            if slab is None or layout.nbytes == 0 or layout.nbytes >= _SMALL_BLOCK_BYTES:
                yield self.empty((layout.numel,), layout.dtype, short_lived=False)
                continue
            self._count(layout.nbytes)
            yield self._tensor((slab.address + offset, slab), layout.nbytes, layout.dtype, False)
            offset += _aligned(layout.nbytes)

    def use(self) -> HostUse:
        """Return the bytes allocated, including idle pooled buffers, and the bytes pinned."""
        self._catch_up()
        return HostUse(self._used, self._peak, self._pinned.nbytes, self._total)

    def clear(self) -> None:
        """Release the idle buffers of the pool."""
        self._catch_up()
        with self._guard:
            self._shrink(0)
            self._shared = None
        self._freed.clear()

    def _tensor(self, piece: Piece, nbytes: int, dtype: torch.dtype, short_lived: bool) -> torch.Tensor:
        buffer = (ctypes.c_ubyte * nbytes).from_address(piece[0])
        on_free = self._return if short_lived else self._drop
        weakref.finalize(buffer, on_free, nbytes, piece).atexit = False
        return torch.frombuffer(buffer, dtype=dtype)

    def _take(self, nbytes: int, short_lived: bool) -> Piece:
        piece = self._reuse(nbytes) if short_lived else None
        if piece is not None:
            return piece
        piece = self._carve(nbytes)
        with self._guard:
            self._count(nbytes)
            self._count_in_use(nbytes if short_lived else 0)
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
            self._count_in_use(nbytes)
            return pieces.pop()

    def _count(self, nbytes: int) -> None:
        with self._guard:
            self._used += nbytes
            self._peak = max(self._peak, self._used)

    def _count_in_use(self, nbytes: int) -> None:
        self._in_use += nbytes
        self._most_in_use = max(self._most_in_use, self._in_use)

    def _catch_up(self) -> None:
        self._guard.catch_up()
        # Dropped outside the lock, since unpinning is slow.
        self._freed.clear()

    def _return(self, nbytes: int, piece: Piece) -> None:
        self._guard.afterwards(partial(self._reclaim, nbytes, piece))

    def _reclaim(self, nbytes: int, piece: Piece) -> None:
        self._in_use -= nbytes
        self._idle += nbytes
        self._free.setdefault(nbytes, []).append(piece)
        self._shrink(self._most_in_use)

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
