"""`DiskSource`: a stretch of a file as what uploads read."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from rp_optim.disk.volume import Transfer
from rp_transfer import Layout, Reading, is_written

from rp_state.frozen.mapping import Stretch
from rp_state.frozen.places import FilePlaces


@dataclass(frozen=True, slots=True)
class DiskSource:
    """A stretch of a file, read at any bytes of it. `kept`: tensors that keep it mapped."""

    stretch: Stretch
    kept: tuple[torch.Tensor, ...]

    @property
    def alignment(self) -> int:
        """See `rp_transfer.ByteSource`."""
        return self.stretch.file.alignment

    def begin(self, start: int, stop: int, memory: memoryview) -> Reading:
        """Read the whole pages of the file around ``[start, stop)``.

        Pages of a checkpoint that somebody has written in memory, which only this process sees, are taken there.
        """
        stretch, alignment = self.stretch, self.alignment
        if stretch.is_private and is_written(stretch.address + start, stop - start):
            return _copied(stretch.address + start, stop - start, memory)
        first = (stretch.offset + start) // alignment * alignment
        needed = stretch.offset + stop - first
        whole = -(-needed // alignment) * alignment
        return _StretchReading(stretch.file.read(first, memory[:whole], needed), stretch.offset + start - first)


@dataclass(frozen=True, slots=True)
class _StretchReading:
    """A read under way. `lead`: how many bytes come before those that were asked for."""

    transfer: Transfer
    lead: int

    def wait(self) -> int:
        """Wait for it; return where the bytes begin. Raises `DiskError`, and `DiskStalled` after a while."""
        self.transfer.wait()
        return self.lead


def _copied(address: int, nbytes: int, memory: memoryview) -> Reading:
    target = (ctypes.c_ubyte * nbytes).from_buffer(memory)
    ctypes.memmove(target, address, nbytes)
    return _StretchReading(Transfer(), 0)


@dataclass(frozen=True, slots=True)
class DiskPart:
    """A range of elements of a block, and where it is read; gaps between tensors come along."""

    start: int
    stop: int
    source: DiskSource


def parts_of(layout: Layout, tensors: tuple[torch.Tensor, ...], places: FilePlaces) -> tuple[DiskPart, ...]:
    """Return the parts of a block whose tensors all lie in files: as few as their order there allows."""
    size = layout.dtype.itemsize
    joined: list[tuple[int, Stretch]] = []
    for span, tensor in zip(layout.extents, tensors, strict=True):
        stretches, at = places.of(tensor), span.offset * size
        assert stretches is not None
        for stretch in stretches:
            if joined and _follows(*joined[-1], at, stretch):
                first, before = joined.pop()
                stretch = before.within(0, at + stretch.nbytes - first)
                at = first
            joined.append((at, stretch))
            at += stretch.nbytes
    kept = tuple(tensor.detach() for tensor in tensors)
    return tuple(
        DiskPart(at // size, (at + stretch.nbytes) // size, DiskSource(stretch, kept)) for at, stretch in joined
    )


def _follows(first: int, before: Stretch, at: int, stretch: Stretch) -> bool:
    distance = at - first
    return (
        stretch.file is before.file
        and stretch.is_private == before.is_private
        and stretch.offset - before.offset == stretch.address - before.address == distance
    )
