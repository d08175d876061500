"""A pool of short-lived host buffers by exact size, for memory that is slow to take, such as pinned memory."""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from rp_transfer.api import MemoryUse

# A slab is whatever the backend allocates: an address, and an object that frees it when it goes.
Slab = tuple[int, object]


class HostMemory:
    """Host memory to the byte, from `allocate(nbytes)`; buffers of training calls are reused.

    A buffer goes back to the pool when the last tensor on it is gone, so whoever queues a copy on it retains it
    until the copy has finished.
    """

    def __init__(self, allocate: Callable[[int], Slab], total_bytes: int) -> None:
        self._allocate = allocate
        self._total = total_bytes
        self._free: defaultdict[int, list[Slab]] = defaultdict(list)
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
            for nbytes, slabs in list(self._free.items()):
                self._used -= nbytes * len(slabs)
            self._free.clear()

    def _take(self, nbytes: int, short_lived: bool) -> Slab:
        with self._lock:
            if short_lived and self._free[nbytes]:
                return self._free[nbytes].pop()
        slab = self._allocate(nbytes)
        with self._lock:
            self._used += nbytes
            self._peak = max(self._peak, self._used)
        return slab

    def _give_back(self, nbytes: int, slab: Slab) -> None:
        with self._lock:
            self._free[nbytes].append(slab)

    def _drop(self, nbytes: int, slab: Slab) -> None:
        del slab
        with self._lock:
            self._used -= nbytes
