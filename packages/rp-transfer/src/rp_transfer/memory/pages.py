"""Pinning host memory: slabs of whole pages, and the record of pinned address ranges."""

from __future__ import annotations

import ctypes
import mmap
import warnings
import weakref
from bisect import bisect_left, bisect_right, insort
from functools import partial
from typing import Protocol

import torch

from rp_transfer.errors import PinningRefused, PinningWarning
from rp_transfer.memory.guard import Guard

PAGE_BYTES = mmap.PAGESIZE


class Pins(Protocol):
    """Pins and unpins address ranges; each backend provides one."""

    def pin(self, address: int, nbytes: int) -> None:
        """Pin the bytes. Raises `PinningRefused` where the system does not allow it."""
        ...

    def unpin(self, address: int) -> None:
        """Unpin the range that was pinned at this address."""
        ...


def whole_pages(address: int, nbytes: int) -> int:
    """Size in bytes of the pages that ``[address, address + nbytes)`` touches.

    >>> whole_pages(PAGE_BYTES - 1, 2) == 2 * PAGE_BYTES
    True
    """
    return (-(-(address + nbytes) // PAGE_BYTES) - address // PAGE_BYTES) * PAGE_BYTES


def give_back_freed() -> None:
    """Return the pages of freed tensors to the system; glibc keeps those of up to 32 MiB in its heap for later.

    >>> give_back_freed()
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


class Pinned:
    """The pinned address ranges of one backend. Warns once if pinning is refused.

    Finalizers remove ranges at any time, so a `Guard` protects the record.
    """

    def __init__(self, pins: Pins) -> None:
        self._pins = pins
        self._guard = Guard()
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}
        self._warned = False
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """The size of all ranges in bytes, in whole pages."""
        self._guard.catch_up()
        return self._nbytes

    def hold(self, owner: object, address: int, nbytes: int) -> bool:
        """Pin the bytes until `owner` is garbage-collected; returns False if pinning was refused."""
        try:
            self._pins.pin(address, nbytes)
        except PinningRefused as refusal:
            self._warn(refusal)
            return False
        self._guard.catch_up()
        with self._guard:
            insort(self._starts, address)
            self._ends[address] = address + nbytes
            self._nbytes += whole_pages(address, nbytes)
        weakref.finalize(owner, self._release, address, nbytes).atexit = False
        return True

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether a single pinned range holds all these bytes: a copy must not cross from one range to another."""
        self._guard.catch_up()
        with self._guard:
            index = bisect_right(self._starts, address) - 1
            return nbytes == 0 or (index >= 0 and address + nbytes <= self._ends.get(self._starts[index], 0))

    def _release(self, address: int, nbytes: int) -> None:
        self._guard.afterwards(partial(self._forget, address, nbytes))
        self._pins.unpin(address)

    def _forget(self, address: int, nbytes: int) -> None:
        del self._ends[address]
        del self._starts[bisect_left(self._starts, address)]
        self._nbytes -= whole_pages(address, nbytes)

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
