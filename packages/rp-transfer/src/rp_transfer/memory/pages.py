"""Slabs: whole pages of host memory, pinned where that is allowed, and released when nothing uses them."""

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
    """How memory is locked in place for the devices."""

    def pin(self, address: int, nbytes: int) -> None:
        """Lock the bytes; raises `PinningRefused` where the system does not allow it."""
        ...

    def unpin(self, address: int) -> None:
        """Undo the `pin` at this address."""
        ...


def whole_pages(address: int, nbytes: int) -> int:
    """Bytes of the pages that ``[address, address + nbytes)`` touches.

    >>> whole_pages(PAGE_BYTES - 1, 2) == 2 * PAGE_BYTES
    True
    """
    return (-(-(address + nbytes) // PAGE_BYTES) - address // PAGE_BYTES) * PAGE_BYTES


class Pinned:
    """The ranges of memory that are pinned; says once that pinning was refused.

    Finalizers take ranges out at any moment.
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
        """The size of all ranges, in whole pages."""
        self._guard.catch_up()
        return self._nbytes

    def hold(self, owner: object, address: int, nbytes: int) -> bool:
        """Pin the bytes until `owner` is gone; returns whether that was allowed."""
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
        """Whether one pinned range holds all these bytes: a copy may not cross from one to another."""
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
                f"host memory could not be pinned ({refusal}); it is used as it is, and copies go through a small "
                "pinned ring, which is slower. Raise the limit on locked memory (ulimit -l; on WSL, the memory of "
                "the virtual machine), or ask for pin_model='off'",
                PinningWarning,
                stacklevel=2,
            )


class Slab:
    """Whole pages of its own: mapped, touched by torch's threads, then pinned.

    That is ten times as fast as the driver's own allocation, which clears page after page on one thread. The pages
    are shared with forked processes, as the driver's are: private ones would be copied for each of them.
    """

    def __init__(self, nbytes: int, pinned: Pinned) -> None:
        self._memory = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._memory))
        self.nbytes = nbytes
        torch.frombuffer(self._memory, dtype=torch.uint8).zero_()
        # The map outlives the pin: `self` is gone, and the finalizer has run, before its attributes are dropped.
        self.is_pinned = pinned.hold(self, self.address, nbytes)
