"""A pool of short-lived host buffers by exact size, for memory that is slow to take, such as pinned memory."""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from rp_transfer.api import MemoryUse

# A slab is whatever the backend allocates: an address, and an object that frees it when it goes.
Slab = tuple[int, object]


class HostMemory:
    """Host memory to the byte, from `allocate(nbytes)`; buffers of training calls are reused.

    A buffer goes back to the pool when the last tensor on it is gone, so whoever queues a copy on it retains it
    until the copy has finished. The pool holds no more idle bytes than were ever lent at once: sizes that are not
    asked for any more go, the longest unused first.
    """

    def __init__(self, allocate: Callable[[int], Slab], total_bytes: int) -> None:
        self._allocate = allocate
        self._total = total_bytes
        self._free: OrderedDict[int, list[Slab]] = OrderedDict()
        self._idle = 0
        self._lent = 0
        self._most_lent = 0
        self._lock = threading.RLock()
        self._used = 0
        self._peak = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, short_lived: bool) -> torch.Tensor:
        """A tensor on memory of its own."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        slab = self._take(nbytes, short_lived)
        buffer = (ctypes.c_ubyte * nbytes).from_address(slab[0])
        give_back = self._give_back if short_lived else self._drop
        weakref.finalize(buffer, give_back, nbytes, slab).atexit = False
        return torch.frombuffer(buffer, dtype=dtype).view(tuple(shape))

    def memory(self) -> MemoryUse:
        """Bytes taken, pooled buffers included."""
        return MemoryUse("host", self._used, self._peak, self._total)

    def clear(self) -> None:
        """Free the buffers that nobody uses."""
        with self._lock:
            freed = self._shrink(0)
        freed.clear()

    def _take(self, nbytes: int, short_lived: bool) -> Slab:
        slab = self._reuse(nbytes) if short_lived else None
        if slab is not None:
            return slab
        slab = self._allocate(nbytes)
        with self._lock:
            self._used += nbytes
            self._peak = max(self._peak, self._used)
            self._lend(nbytes if short_lived else 0)
        return slab

    def _reuse(self, nbytes: int) -> Slab | None:
        with self._lock:
            if not (slabs := self._free.get(nbytes)):
                return None
            self._free.move_to_end(nbytes)
            self._idle -= nbytes
            self._lend(nbytes)
            return slabs.pop()

    def _lend(self, nbytes: int) -> None:
        self._lent += nbytes
        self._most_lent = max(self._most_lent, self._lent)

    def _give_back(self, nbytes: int, slab: Slab) -> None:
        with self._lock:
            self._lent -= nbytes
            self._idle += nbytes
            self._free.setdefault(nbytes, []).append(slab)
            freed = self._shrink(self._most_lent)
        # Freeing pinned memory takes its time: not under the lock.
        freed.clear()

    def _shrink(self, most: int) -> list[Slab]:
        freed: list[Slab] = []
        while self._idle > most:
            nbytes, slabs = next(iter(self._free.items()))
            if slabs:
                freed.append(slabs.pop())
                self._idle -= nbytes
                self._used -= nbytes
            else:
                del self._free[nbytes]
        return freed

    def _drop(self, nbytes: int, slab: Slab) -> None:
        del slab
        with self._lock:
            self._used -= nbytes
