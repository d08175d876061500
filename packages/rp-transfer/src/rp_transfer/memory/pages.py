"""Pinning host memory: slabs of whole pages, and the record of pinned address ranges."""

from __future__ import annotations

import ctypes
import mmap
import warnings
import weakref
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch

from rp_transfer.errors import PinningRefused, PinningWarning
from rp_transfer.memory.guard import Guard

PAGE_BYTES = mmap.PAGESIZE
# In bytes: the most that is pinned in one call. CUDA refuses to register 512 GiB and more at once.
MOST_PINNED_BYTES = 64 << 30

# The address and size of a range of bytes.
Range = tuple[int, int]


class Pins(Protocol):
    """Pins and unpins address ranges; each backend provides one."""

    def pin(self, address: int, nbytes: int) -> None:
        """Pin the bytes. Raises `PinningRefused` where the system does not allow it."""
        ...

    def unpin(self, address: int) -> None:
        """Unpin the range that was pinned at this address."""
        ...


def whole_pages(address: int, nbytes: int) -> int:
    """Return the size in bytes of the pages that ``[address, address + nbytes)`` touches.

    >>> whole_pages(PAGE_BYTES - 1, 2) == 2 * PAGE_BYTES
    True
    """
    return (-(-(address + nbytes) // PAGE_BYTES) - address // PAGE_BYTES) * PAGE_BYTES


def give_back_freed() -> None:
    """Return the pages of freed tensors to the system. Otherwise glibc keeps those of tensors up to 32 MiB.

    >>> give_back_freed()
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


class Pinned:
    """The pinned address ranges of one backend. Warns once if pinning is refused.

    Ranges of more than `most_bytes` are pinned in pieces of that size. A driver refuses copies that cross from one
    piece to the next, so callers divide their copies with `parts`.

    Finalizers remove ranges at any time, so a `Guard` protects the record.
    """

    def __init__(self, pins: Pins, most_bytes: int = MOST_PINNED_BYTES) -> None:
        if most_bytes < PAGE_BYTES or most_bytes % PAGE_BYTES:
            raise ValueError(f"most_bytes must be whole pages of {PAGE_BYTES} bytes, but is {most_bytes}")
        self._pins = pins
        self._most_bytes = most_bytes
        self._guard = Guard()
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}
        # The addresses inside ranges at which a piece ends and the next one begins.
        self._cuts: list[int] = []
        self._warned = False
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """The size of all ranges in bytes, in whole pages."""
        self._guard.catch_up()
        return self._nbytes

    def hold(self, owner: object, address: int, nbytes: int) -> bool:
        """Pin the bytes until `owner` is garbage-collected; return False if pinning was refused."""
        pieces = _pieces(address, nbytes, self._most_bytes)
        try:
            self._pin(pieces)
        except PinningRefused as refusal:
            self._warn(refusal)
            return False
        self._guard.catch_up()
        with self._guard:
            insort(self._starts, address)
            self._ends[address] = address + nbytes
            self._nbytes += whole_pages(address, nbytes)
            for start, _ in pieces[1:]:
                insort(self._cuts, start)
        weakref.finalize(owner, self._release, pieces).atexit = False
        return True

    def covers(self, address: int, nbytes: int) -> bool:
        """Return whether one pinned range holds all these bytes; a copy must not cross from one to another."""
        self._guard.catch_up()
        with self._guard:
            index = bisect_right(self._starts, address) - 1
            return nbytes == 0 or (index >= 0 and address + nbytes <= self._ends.get(self._starts[index], 0))

    def parts(self, nbytes: int, *addresses: int) -> Sequence[Range]:
        """Cut a copy between these addresses, pinned or not, so that no part crosses from one piece to the next.

        Returns each part's offset and size. The memory must stay pinned meanwhile.
        """
        # Nearly always there is no cut. Cuts in memory that is in use do not move, so this needs no lock.
        if not self._cuts:
            return ((0, nbytes),)
        with self._guard:
            inside = {cut - start for start in addresses for cut in self._cuts if start < cut < start + nbytes}
        return [(start, stop - start) for start, stop in pairwise(sorted({0, nbytes} | inside))]

    def _pin(self, pieces: Sequence[Range]) -> None:
        for index, piece in enumerate(pieces):
            try:
                self._pins.pin(*piece)
            except BaseException:
                for start, _ in pieces[:index]:
                    self._pins.unpin(start)
                raise

    def _release(self, pieces: Sequence[Range]) -> None:
        self._guard.afterwards(partial(self._forget, pieces))
        for start, _ in pieces:
            self._pins.unpin(start)

    def _forget(self, pieces: Sequence[Range]) -> None:
        address = pieces[0][0]
        self._nbytes -= whole_pages(address, self._ends.pop(address) - address)
        del self._starts[bisect_left(self._starts, address)]
        for start, _ in pieces[1:]:
            del self._cuts[bisect_left(self._cuts, start)]

    def _warn(self, refusal: PinningRefused) -> None:
        with self._guard:
            warned, self._warned = self._warned, True
        if not warned:
            warnings.warn(
                f"host memory could not be pinned ({refusal}); it is used unpinned, and copies go through a small "
                "pinned ring, which is slower. Raise the limit on locked memory (ulimit -l; on WSL, the memory of "
                "the virtual machine), or set pin_model='off'",
                PinningWarning,
                stacklevel=2,
            )


def _pieces(address: int, nbytes: int, most_bytes: int) -> list[Range]:
    """Cut a range at page boundaries into pieces of at most `most_bytes`, so that no page is part of two."""
    first = address // PAGE_BYTES * PAGE_BYTES
    cuts = range(first + most_bytes, address + nbytes, most_bytes)
    return [(start, stop - start) for start, stop in pairwise([address, *cuts, address + nbytes])]


class Slab:
    """Whole pages of host memory: mapped, zeroed by torch's threads, then pinned.

    This is ten times as fast as the driver's own allocation, which clears page after page on one thread. The pages
    are shared with forked processes, as the driver's are: private pages would be copied for each of them.
    """

    def __init__(self, nbytes: int, pinned: Pinned) -> None:
        self._memory = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._memory))
        self.nbytes = nbytes
        torch.frombuffer(self._memory, dtype=torch.uint8).zero_()
        # Unpinned before it is unmapped: the finalizer of `self` runs before its attributes are dropped.
        self.is_pinned = pinned.hold(self, self.address, nbytes)
