"""Blocks of a volume in bounded memory: read ahead in the order of the step before, written behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from rp_optim.disk.memory import Arena
from rp_optim.disk.volume import Transfer, Volume
from rp_optim.errors import TornState

_IDLE = Transfer()
# Of memory, one part in so many may be changed blocks that are not written yet.
_WAITING = 4


@dataclass(slots=True)
class _ResidentBlock:
    """A block in memory. `transfer`: the last read or write of it, which may be under way."""

    offset: int
    transfer: Transfer = _IDLE
    writes: bool = False


class Blocks:
    """Blocks of fixed sizes on a volume, of which memory holds as many as fit.

    One block at a time is taken, and given back before the next. Those that the last round took next are read
    meanwhile. Those that were given back changed are written meanwhile, unless the same is taken next, as parts of
    a step often do, or they are small. A round ends when one of its blocks is taken again after others: a step
    takes all at once, or layer by layer. Where memory is short, the block that is needed last goes. One thread
    uses it at a time.

    Args:
        volume: where the blocks are. Space for all is reserved here.
        sizes: each block's bytes.
        memory_bytes: bytes of host memory, at least those of the largest block.

    Raises `DiskFull` if the volume has no space. After a failed transfer, all later ones raise `TornState`. In a
    forked child, which shares the memory but not the threads, methods raise `DiskError` before they change any.
    """

    def __init__(self, volume: Volume, sizes: Sequence[int], memory_bytes: int) -> None:
        self._volume = volume
        # An empty block has a place of its own, too.
        self._sizes = [volume.rounded(max(size, 1)) for size in sizes]
        self._addresses = list(accumulate(self._sizes, initial=0))
        volume.reserve(self._addresses[-1])
        self._arena = Arena(volume.rounded(max(memory_bytes, *self._sizes, 1)))
        self._resident: dict[int, _ResidentBlock] = {}
        # Blocks that have contents on the volume.
        self._written: set[int] = set()
        self._taken: int | None = None
        # Blocks that were given back changed and are to be written, the last at the end.
        self._changed: dict[int, None] = {}
        self._order = list(range(len(sizes)))
        self._places = list(self._order)
        self._at = -1
        self._seen: dict[int, None] = {}
        self._torn = ""
        # How many steps have begun.
        self.steps = 0
        # Bytes read and written so far.
        self.bytes_read = 0
        self.bytes_written = 0

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory."""
        return self._arena.nbytes

    @property
    def is_torn(self) -> bool:
        """Whether all use is refused."""
        return bool(self._torn)

    @property
    def volume_bytes(self) -> int:
        """Bytes on the volume."""
        return self._addresses[-1]

    def begin_step(self) -> None:
        """Begin to change blocks. Raises what has failed since, and `TornState` after an earlier failure."""
        self._settle()
        self.steps += 1

    def take(self, index: int) -> torch.Tensor:
        """Return a block's memory once it may be read and written: (bytes,) uint8, anything if it is new.

        Raises the error of any transfer that has failed, or `TornState`.
        """
        if self._taken is not None:
            # An exception such as Ctrl-C came between taking it and using it.
            self.note_torn("a step was interrupted")
        self._settle()
        self._write_changed(self._arena.nbytes // _WAITING, but=index)
        place = self._resident.get(index) or self._load(index)
        self._wait(place)
        self._taken = index
        self._note_order(index)
        self._read_ahead()
        return self._arena.tensor_at(place.offset, self._sizes[index])

    def give_back(self, *, changed: bool) -> None:
        """End the use of the block that was taken last."""
        assert self._taken is not None
        index, self._taken = self._taken, None
        if changed:
            self._changed.pop(index, None)
            self._changed[index] = None

    def _write_changed(self, nbytes: int, *, but: int | None = None) -> None:
        """Begin to write what was changed, the oldest first, until only so much is left, or the block `but`."""
        waiting = [index for index in self._changed if index != but]
        left = sum(map(self._sizes.__getitem__, waiting))
        for index in waiting:
            if left <= nbytes:
                return
            self._write(index)
            left -= self._sizes[index]

    def _write(self, index: int) -> None:
        del self._changed[index]
        self._written.add(index)
        place = self._resident[index]
        place.transfer = self._volume.write(self._addresses[index], self._memory_of(index, place))
        place.writes = True
        self.bytes_written += self._sizes[index]

    def drain(self) -> None:
        """Write what was changed, and wait for all transfers. Raises their errors."""
        self._refuse_torn()
        self._write_changed(0)
        for place in list(self._resident.values()):
            self._wait(place)

    def note_torn(self, why: str) -> None:
        """Refuse all use from now on. `why`: a clause that says what has happened."""
        self._torn = self._torn or why

    # Transfers

    def _refuse_torn(self) -> None:
        if self._torn:
            raise TornState(
                f"working state on disk cannot be used, since {self._torn}; load a state or a checkpoint, which "
                "begins new files"
            )

    def _wait(self, place: _ResidentBlock) -> None:
        try:
            place.transfer.wait()
        except BaseException as error:
            self.note_torn(f"it has parts of two steps: an earlier transfer failed ({error})")
            raise

    def _settle(self) -> None:
        """Raise the errors of writes that have ended."""
        self._volume.check_process()
        self._refuse_torn()
        for place in self._resident.values():
            if place.writes and place.transfer.done():
                self._wait(place)
                place.writes = False

    def _memory_of(self, index: int, place: _ResidentBlock) -> memoryview:
        return self._arena.bytes_at(place.offset, self._sizes[index])

    def _read(self, index: int, offset: int) -> _ResidentBlock:
        place = self._resident[index] = _ResidentBlock(offset)
        if index in self._written:
            place.transfer = self._volume.read(self._addresses[index], self._memory_of(index, place))
            self.bytes_read += self._sizes[index]
        return place

    def _load(self, index: int) -> _ResidentBlock:
        while (offset := self._room(self._sizes[index], -1)) is None:
            # The arena is as large as the largest block, so something is under way, or has just ended.
            self._write_changed(0)
            for place in [place for place in self._resident.values() if not place.transfer.done()][:1]:
                self._wait(place)
            self._settle()
        return self._read(index, offset)

    # Which blocks are in memory

    def _note_order(self, index: int) -> None:
        """Note that this block was taken; if that begins another round, expect it in the order of the last one."""
        if index in self._seen and index != self._order[self._at]:
            self._order = [*self._seen, *(one for one in self._order if one not in self._seen)]
            for place, one in enumerate(self._order):
                self._places[one] = place
            self._seen = {}
        self._seen.setdefault(index)
        self._at = self._places[index]

    def _upcoming(self) -> Iterator[int]:
        """Yield the other blocks in the order in which they are expected; at the end comes the next round."""
        for distance in range(1, len(self._order) + (self._at < 0)):
            yield self._order[(self._at + distance) % len(self._order)]

    def _distance(self, index: int) -> int:
        return (self._places[index] - self._at - 1) % len(self._order)

    def _read_ahead(self) -> None:
        for index in self._upcoming():
            if index in self._resident:
                continue
            if index not in self._written:
                return
            offset = self._room(self._sizes[index], self._distance(index))
            if offset is None:
                return
            self._read(index, offset)

    def _room(self, nbytes: int, nearest: int) -> int | None:
        """Return free memory. For it, drop blocks that are expected later than `nearest`, the last first."""
        offset = self._arena.take(nbytes)
        if offset is not None:
            return offset
        droppable = [
            index
            for index, place in self._resident.items()
            if index != self._taken
            and index not in self._changed
            and place.transfer.done()
            and self._distance(index) > nearest
        ]
        for index in sorted(droppable, key=self._distance, reverse=True):
            self._drop(index)
            if (offset := self._arena.take(nbytes)) is not None:
                return offset
        return None

    def _drop(self, index: int) -> None:
        place = self._resident[index]
        if place.writes:
            self._wait(place)
        self._arena.give_back(place.offset)
        del self._resident[index]
