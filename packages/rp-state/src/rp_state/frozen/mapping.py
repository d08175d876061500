"""`Mapping`: ranges of files as one range of addresses, which the system reads when somebody looks at it."""

from __future__ import annotations

import ctypes
import mmap
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
from rp_optim import DiskError

from rp_state.frozen.files import FrozenFile

_FAILED = ctypes.c_void_p(-1).value
# Linux's numbers, which Python's mmap does not have.
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0x0, 0x10, 0x4000


@dataclass(frozen=True, slots=True)
class Stretch:
    """`nbytes` of a file from `offset` on, and `address`, at which they are mapped.

    `is_private`: pages that somebody has written there are this process's own, and not in the file.
    """

    file: FrozenFile
    offset: int
    nbytes: int
    address: int = 0
    is_private: bool = False

    def within(self, start: int, nbytes: int) -> Stretch:
        """Return a part of it."""
        return Stretch(self.file, self.offset + start, nbytes, self.address + start, self.is_private)


class Mapping:
    """Stretches of files, of whole pages, mapped one after another; reads and writes go to the files.

    It lasts as long as a tensor on it. Of what is read there, nothing needs to stay in memory: the system drops it
    when it wants to. A disk that fails there ends the process (SIGBUS), as in any mapped file.

    Raises `DiskError` where the system refuses.
    """

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self.nbytes = sum(each.nbytes for each in stretches)
        anywhere = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self.address = _mapped(None, self.nbytes, _PROT_NONE, anywhere, -1, 0, "address space")
        finalize(self, _unmap, self.address, self.nbytes).atexit = False
        placed: list[Stretch] = []
        at = self.address
        for each in stretches:
            how = mmap.MAP_SHARED | _MAP_FIXED
            descriptor, what = each.file.descriptor, each.file.directory
            _mapped(at, each.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, how, descriptor, each.offset, what)
            placed.append(Stretch(each.file, each.offset, each.nbytes, at))
            at += each.nbytes
        self.stretches = tuple(placed)
        _MAPPINGS[self.address] = self

    def tensor(self, nbytes: int) -> torch.Tensor:
        """Return its first bytes: (nbytes,) uint8."""
        buffer: Any = (ctypes.c_ubyte * nbytes).from_address(self.address)
        # The tensor keeps the buffer, and the buffer this.
        buffer.mapping = self
        return torch.frombuffer(buffer, dtype=torch.uint8)


_MAPPINGS: WeakValueDictionary[int, Mapping] = WeakValueDictionary()


def all_stretches() -> list[Stretch]:
    """Return the stretches of all mappings that there are, in the order of their addresses."""
    mappings = list(_MAPPINGS.values())
    return sorted((each for one in mappings for each in one.stretches), key=lambda each: each.address)


def stretches_at(ordered: Sequence[Stretch], address: int, nbytes: int) -> list[Stretch] | None:
    """Return the stretches that `nbytes` from `address` on are mapped from; None if some are not."""
    found: list[Stretch] = []
    index = bisect_right(ordered, address, key=lambda each: each.address) - 1
    while nbytes:
        if not 0 <= index < len(ordered):
            return None
        start = address - ordered[index].address
        count = min(ordered[index].nbytes - start, nbytes)
        if start < 0 or count <= 0:
            return None
        found.append(ordered[index].within(start, count))
        address, nbytes, index = address + count, nbytes - count, index + 1
    return found


def _mapped(
    address: int | None, nbytes: int, protection: int, flags: int, descriptor: int, offset: int, what: str
) -> int:
    system: Any = ctypes.CDLL(None, use_errno=True).mmap
    system.restype = ctypes.c_void_p
    system.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    made: int | None = system(address, nbytes, protection, flags, descriptor, offset)
    if made is None or made == _FAILED:
        raise DiskError(f"frozen weights in {what} cannot be mapped: {os.strerror(ctypes.get_errno())}")
    return made


def _unmap(address: int, nbytes: int) -> None:
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
