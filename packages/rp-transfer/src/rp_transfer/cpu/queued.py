"""Work that waits on a virtual stream until somebody needs it: moves, conversions, and marks of time."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rp_transfer.errors import Unordered


def _poison_pattern(dtype: torch.dtype) -> bytes:
    # All ones is NaN in every floating format; a byte may be part of anything, so it is treated as one.
    if dtype == torch.bool:
        return b"\0"
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.uint8:
        return b"\xff"
    return b"\0" * (dtype.itemsize - 1) + b"\x80" if dtype.is_signed else b"\0"


def poison(address: int, nbytes: int, dtype: torch.dtype) -> None:
    """Fill memory with NaN, or with the smallest integer of `dtype`."""
    pattern = _poison_pattern(dtype)
    if len(pattern) == 1:
        ctypes.memset(address, pattern[0], nbytes)
    else:
        ctypes.memmove(address, pattern * (nbytes // len(pattern)), nbytes)


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's memory, held weakly, as the hardware would."""

    address: int
    nbytes: int
    dtype: torch.dtype
    storage: StorageWeakRef

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        """Where a contiguous tensor lies."""
        nbytes = tensor.numel() * tensor.element_size()
        return cls(tensor.data_ptr(), nbytes, tensor.dtype, StorageWeakRef(tensor.untyped_storage()))

    def overlaps(self, other: Place) -> bool:
        """Whether they share a byte."""
        return self.address < other.address + other.nbytes and other.address < self.address + self.nbytes

    def values(self) -> torch.Tensor:
        """(numel,) over the same memory; only while it lives."""
        buffer = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        return torch.frombuffer(buffer, dtype=self.dtype)

    def poison(self) -> None:
        """Spoil it, if it still lives."""
        if not self.storage.expired():
            poison(self.address, self.nbytes, self.dtype)


@dataclass(slots=True, eq=False)
class Move:
    """A queued move of bytes, or a conversion where the dtypes differ.

    Poison may not reach moves that were queued before and still need the old bytes: `overwrites` counts them,
    and `overwritten_by` are the later moves that wait for this one with their poison.
    """

    destination: Place
    source: Place
    what: str
    stream: str
    overwrites: int = 0
    overwritten_by: list[Move] = field(default_factory=list["Move"])

    def __str__(self) -> str:
        return f"{self.what} of {self.source.nbytes} bytes on {self.stream}"

    def uses(self, place: Place) -> bool:
        """Whether it reads or writes there."""
        return self.destination.overlaps(place) or self.source.overlaps(place)

    def poison_after(self, earlier: Sequence[Move]) -> None:
        """Spoil the destination once these are done with it."""
        self.overwrites = len(earlier)
        for move in earlier:
            move.overwritten_by.append(self)
        if not earlier:
            self.destination.poison()

    def run(self) -> None:
        """Move the bytes, or convert the values."""
        for place, role in ((self.destination, "destination"), (self.source, "source")):
            if place.storage.expired():
                raise Unordered(
                    f"{self}: its {role} was freed before the copy ran; retain both tensors "
                    "until an event recorded after the copy has finished"
                )
        if self.destination.dtype == self.source.dtype:
            ctypes.memmove(self.destination.address, self.source.address, self.source.nbytes)
        else:
            with torch.inference_mode():
                self.destination.values().copy_(self.source.values())
        for later in self.overwritten_by:
            later.overwrites -= 1
            if later.overwrites == 0:
                later.destination.poison()


class Mark:
    """Takes the time when the work before it is over."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def run(self) -> None:
        """Take it."""
        self.seconds = time.perf_counter()
