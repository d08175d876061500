"""A bounded piece of host memory, aligned for O_DIRECT, from which blocks of any size are taken."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch


def empty_memory(nbytes: int) -> mmap.mmap:
    """Return new memory of at least one byte, aligned to pages.

    It is not pinned: devices never copy from it, and the kernel pins its pages for each direct transfer itself.
    """
    made = mmap.mmap(-1, max(nbytes, 1))
    # Large pages: a transfer then pins few of them.
    with suppress(OSError):
        made.madvise(mmap.MADV_HUGEPAGE)
    return made


class Arena:
    """Memory of `nbytes` from which ranges are taken, first fit.

    >>> arena = Arena(8192)
    >>> first, second = arena.take(4096), arena.take(4096)
    >>> arena.give_back(first)
    >>> first, second, arena.take(8192), arena.take(4096)
    (0, 4096, None, 0)
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = empty_memory(nbytes)
        self._whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        # Ranges that are taken, as offset and end, in ascending order.
        self._taken: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        """Return the offset of a free range; None if there is none that large."""
        start = 0
        for offset in sorted(self._taken):
            if offset - start >= nbytes:
                break
            start = self._taken[offset]
        if self.nbytes - start < nbytes:
            return None
        self._taken[start] = start + nbytes
        return start

    def give_back(self, offset: int) -> None:
        """Let others take this range."""
        del self._taken[offset]

    def bytes_at(self, offset: int, nbytes: int) -> memoryview:
        """Return a range for the system's calls."""
        return memoryview(self._memory)[offset : offset + nbytes]

    def tensor_at(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return a range as a tensor: (nbytes,) uint8."""
        return self._whole[offset : offset + nbytes]
