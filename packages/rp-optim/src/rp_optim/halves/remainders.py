"""Where the remainders of masters in halves are: in memory, or on disk, which a step takes block by block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

from rp_optim.disk.blocks import Blocks
from rp_optim.errors import TornState
from rp_optim.places.on_disk import Disk

_Item = TypeVar("_Item")

# Remainders in a block begin at multiples of this, so that vectors of them do not cross cache lines.
_CACHE_LINE = 64


class Remainder(Protocol):
    """One master's remainder: int16, of the master's shape. `nbytes`: of host memory, its own."""

    @property
    def shape(self) -> torch.Size:
        """The master's shape."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        ...

    def reach(self, *, changes: bool = True, renews: bool = False) -> AbstractContextManager[torch.Tensor]:
        """Have its values in memory until the context ends, to be read and, with `changes`, written.

        `renews`: all of them are about to be written, so that what was lost is of no concern.
        """
        ...


@dataclass(frozen=True, slots=True)
class RemainderInMemory:
    """A remainder that is a tensor."""

    values: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """See `Remainder`."""
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """See `Remainder`."""
        return self.values.nbytes

    def reach(self, *, changes: bool = True, renews: bool = False) -> AbstractContextManager[torch.Tensor]:
        """See `Remainder`."""
        del changes, renews
        return nullcontext(self.values)


@dataclass(slots=True, eq=False)
class RemainderOnDisk:
    """A remainder on disk, see `Remainders`: in a block of its room, at an offset of bytes.

    It is zero until it `is_written`. `is_lost`: what it was is gone, and it must be written before it is read.
    """

    store: Remainders
    shape: torch.Size
    room: _Room | None = None
    block: int = 0
    offset: int = 0
    is_written: bool = False
    is_lost: bool = False

    @property
    def nbytes(self) -> int:
        """See `Remainder`."""
        return 0

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk."""
        return self.shape.numel() * torch.int16.itemsize

    @contextmanager
    def reach(self, *, changes: bool = True, renews: bool = False) -> Generator[torch.Tensor]:
        """See `Remainder`."""
        with self.store.reach([self], changes=changes, renews=renews) as (values,):
            yield values

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return it in the memory of its block."""
        there = memory[self.offset : self.offset + self.disk_bytes].view(torch.int16).view(self.shape)
        return there if self.is_written else there.zero_()


@dataclass(slots=True, eq=False)
class _Room:
    """The blocks of those remainders that were added until one of them was needed."""

    members: list[RemainderOnDisk]
    sizes: Sequence[int]
    blocks: Blocks

    def is_lost(self) -> bool:
        """Return whether some are lost."""
        return any(one.is_lost for one in self.members)


@dataclass(slots=True, eq=False)
class Remainders:
    """The remainders of a model's masters on a `Disk`, in blocks of what was added one after the other.

    Files are opened, and their space is reserved, when the first remainder is needed: by then all of a model's
    have been added. Later ones, such as those of adapters that come later, get files of their own. One thread at
    a time reaches them, and others wait.

    >>> rest = Remainders(Disk("/tmp")).add(torch.Size([3]))
    >>> with rest.reach() as values:
    ...     _ = values.add_(7)
    >>> with rest.reach(changes=False) as values:
    ...     values
    tensor([7, 7, 7], dtype=torch.int16)

    What reaches them raises the errors of the disk, and `TornState` after one until all were written anew. Raises
    `DiskError` for directories in which no files can be opened.
    """

    disk: Disk
    _rooms: list[_Room] = field(default_factory=list[_Room])
    _new: list[RemainderOnDisk] = field(default_factory=list[RemainderOnDisk])
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        # The first step may be long after, and on another thread.
        self._blocks(())

    def add(self, shape: torch.Size) -> RemainderOnDisk:
        """Return a new remainder of zeros."""
        made = RemainderOnDisk(self, shape)
        self._new.append(made)
        return made

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory that they take together."""
        rooms = sum(room.blocks.memory_bytes for room in self._rooms)
        return rooms + self.disk.memory_for([one.disk_bytes for one in self._new])

    def begin_step(self) -> None:
        """Make room before a step changes anything. Raises what has failed since the last one."""
        with self._turn:
            self._settle()
            for room in self._rooms:
                room.blocks.begin_step()
                if room.is_lost():
                    raise _lost()

    @contextmanager
    def reach(
        self, members: Sequence[RemainderOnDisk], *, changes: bool = True, renews: bool = False
    ) -> Generator[list[torch.Tensor]]:
        """Have the values of remainders of one block in memory until the context ends: see `Remainder.reach`."""
        with self._turn:
            self._settle()
            room = _room_of(members[0])
            if renews:
                self._renew(room, members)
            if any(one.is_lost for one in members):
                raise _lost()
            memory = room.blocks.take(members[0].block)
            try:
                yield [one.view(memory) for one in members]
            finally:
                for one in members:
                    one.is_written |= changes
                room.blocks.give_back(changed=changes)

    def _settle(self) -> None:
        if self._new:
            self._rooms.append(self._roomy(self._new))
            self._new = []

    def _roomy(self, members: list[RemainderOnDisk]) -> _Room:
        sizes = _laid_out(members, self.disk.block_bytes)
        room = _Room(members, sizes, self._blocks(sizes))
        for one in members:
            one.room = room
        return room

    def _blocks(self, sizes: Sequence[int]) -> Blocks:
        return Blocks(self.disk.volume(), sizes, self.disk.memory_for(sizes))

    def _renew(self, room: _Room, members: Sequence[RemainderOnDisk]) -> None:
        """Begin new files if those that there are cannot be used; what they had is lost, but for `members`."""
        if room.blocks.is_torn:
            for one in room.members:
                one.is_lost, one.is_written = True, False
            # The space of the old files is free before the new ones need it.
            room.blocks = self._blocks(())
            room.blocks.note_torn("no new files could be made for it")
            room.blocks = self._blocks(room.sizes)
        for one in members:
            one.is_lost = False


def begin_step(rests: Iterable[Remainder | None]) -> None:
    """Make all remainders on disk ready for a step: see `Remainders.begin_step`."""
    stores = {id(rest.store): rest.store for rest in rests if isinstance(rest, RemainderOnDisk)}
    for store in stores.values():
        store.begin_step()


def by_block(items: Iterable[_Item], rest_of: Callable[[_Item], Remainder | None]) -> Iterable[Sequence[_Item]]:
    """Divide what is updated at once: remainders on disk of one block go together, all others, too."""
    parts: dict[tuple[int, int], list[_Item]] = {}
    for item in items:
        rest = rest_of(item)
        key = (id(rest.room), rest.block) if isinstance(rest, RemainderOnDisk) else (0, 0)
        parts.setdefault(key, []).append(item)
    return parts.values()


def reached(rests: Sequence[Remainder | None]) -> AbstractContextManager[Sequence[torch.Tensor | None]]:
    """Have the remainders of a part of `by_block` that are on disk in memory for the context; None for others."""
    on_disk = [rest for rest in rests if isinstance(rest, RemainderOnDisk)]
    return on_disk[0].store.reach(on_disk) if on_disk else nullcontext([None] * len(rests))


def _room_of(member: RemainderOnDisk) -> _Room:
    assert member.room is not None
    return member.room


def _lost() -> TornState:
    return TornState(
        "remainders of masters on disk were lost when the disk failed, and not all of them have been set since; "
        "load a state or a checkpoint of the whole model"
    )


def _laid_out(members: Sequence[RemainderOnDisk], block_bytes: int) -> list[int]:
    """Set the blocks and offsets of remainders, and return the sizes of blocks."""
    sizes = [0]
    for one in members:
        if sizes[-1] and sizes[-1] + one.disk_bytes > block_bytes:
            sizes.append(0)
        one.block, one.offset = len(sizes) - 1, -(-sizes[-1] // _CACHE_LINE) * _CACHE_LINE
        sizes[-1] = one.offset + one.disk_bytes
    return sizes
