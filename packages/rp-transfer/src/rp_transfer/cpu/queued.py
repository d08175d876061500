"""Work queued on a virtual stream: copies, conversions and timestamps, and the poison in their destinations."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rp_transfer.errors import Unordered


def _poison_pattern(dtype: torch.dtype) -> bytes:
    # All ones is NaN in every floating format. Raw bytes may be viewed as floats, so uint8 gets the same pattern.
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
class AddressRange:
    """The address range of a contiguous tensor. Like real hardware, it does not keep the storage alive."""

    address: int
    nbytes: int
    dtype: torch.dtype
    storage: StorageWeakRef

    @classmethod
    def of(cls, tensor: torch.Tensor) -> AddressRange:
        """Return the address range of a contiguous tensor."""
        return cls(tensor.data_ptr(), tensor.nbytes, tensor.dtype, StorageWeakRef(tensor.untyped_storage()))

    def overlaps(self, other: AddressRange) -> bool:
        """Return whether both places share a byte."""
        return self.address < other.address + other.nbytes and other.address < self.address + self.nbytes

    def values(self) -> torch.Tensor:
        """Return a tensor, (numel,), over the same memory; valid only while that memory is allocated."""
        buffer = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        return torch.frombuffer(buffer, dtype=self.dtype)

    def poison(self) -> None:
        """Poison the memory, unless it was freed."""
        if not self.storage.expired():
            poison(self.address, self.nbytes, self.dtype)


@dataclass(slots=True, eq=False)
class QueuedMove:
    """A queued copy of bytes, or a conversion if the dtypes differ.

    The destination is poisoned only once no earlier queued move uses its bytes. `overwrites` counts the earlier
    moves that still do; `overwritten_by` lists the later moves whose poison waits for this one.
    """

    destination: AddressRange
    source: AddressRange
    what: str
    stream: str
    overwrites: int = 0
    overwritten_by: list[QueuedMove] = field(default_factory=list["QueuedMove"])

    def __str__(self) -> str:
        return f"{self.what} of {self.source.nbytes} bytes on {self.stream}"

    def uses(self, place: AddressRange) -> bool:
        """Return whether this move reads or writes a byte of `place`."""
        return self.destination.overlaps(place) or self.source.overlaps(place)

    def poison_after(self, earlier: Sequence[QueuedMove]) -> None:
        """Poison the destination once the `earlier` moves have run."""
        self.overwrites = len(earlier)
        for move in earlier:
            move.overwritten_by.append(self)
        if not earlier:
            self.destination.poison()

    def run(self) -> None:
        """Copy the bytes, or convert the values.

        Raises `Unordered` if the source or destination was freed.
        """
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
    """A queued timestamp: stores when the work before it finished."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def run(self) -> None:
        """Store the current time in seconds."""
        self.seconds = time.perf_counter()
