"""A race detector for memory: records every use by a stream, and checks that conflicting uses are ordered.

Order is tracked by vector clocks (Mattern, "Virtual Time and Global States of Distributed Systems", 1989): each
stream counts its own operations, and stores up to which operation it has waited for each other stream.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rp_transfer.errors import Unordered

Clock = list[int]


def join(clock: Clock, other: Sequence[int]) -> None:
    """Raise each entry of `clock` to at least that of `other`, so that what precedes `other` precedes `clock`."""
    for stream, tick in enumerate(other):
        if tick > clock[stream]:
            clock[stream] = tick


@dataclass(frozen=True, slots=True)
class Use:
    """One use of the addresses ``[start, end)``: the `tick`-th operation of `stream`."""

    start: int
    end: int
    stream: int
    tick: int
    write: bool
    what: str

    def __str__(self) -> str:
        return f"{self.what} ({'write' if self.write else 'read'})"


@dataclass(frozen=True, slots=True)
class AllocationPoint:
    """The clock of the owning `stream` when it allocated memory.

    An allocator may reuse memory that this stream freed at any earlier point, so other streams must wait for it.
    """

    clock: tuple[int, ...]
    stream: str


@dataclass(slots=True)
class Allocation:
    """An allocated address range, and the uses that later ones may conflict with.

    `storage`: for memory that torch allocated, its storage. `point`: for memory that a stream owns.
    """

    start: int
    end: int
    storage: StorageWeakRef | None = None
    point: AllocationPoint | None = None
    uses: list[Use] = field(default_factory=list[Use])

    def is_freed(self) -> bool:
        """Return whether torch has freed this memory; False for memory that the ledger's user closes."""
        return self.storage is not None and self.storage.expired() is True

    def conflicts(self, use: Use) -> list[Use]:
        """Return the overlapping earlier uses that must precede `use`: all for a write, only writes for a read."""
        return [
            old for old in self.uses if (use.write or old.write) and old.start < use.end and use.start < old.end
        ]

    def add(self, use: Use) -> None:
        """Record `use`, and drop earlier uses it covers: a use ordered after it is ordered after those too."""
        self.uses = [old for old in self.uses if not self._covers(use, old)]
        self.uses.append(use)

    @staticmethod
    def _covers(new: Use, old: Use) -> bool:
        inside = new.start <= old.start and old.end <= new.end
        return inside and (new.write or (new.stream == old.stream and not old.write))


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address range ``[start, end)`` of a tensor's elements."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


class Ledger:
    """The record of all memory that streams have used. Callers hold the backend's lock."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._at: dict[int, Allocation] = {}

    def __len__(self) -> int:
        return len(self._starts)

    def num_uses(self) -> int:
        """Return the number of recorded uses."""
        return sum(len(allocation.uses) for allocation in self._at.values())

    def open(self, start: int, nbytes: int, point: AllocationPoint | None = None) -> Allocation:
        """Record newly allocated memory. The caller closes it when the memory is freed."""
        allocation = Allocation(start, start + nbytes, point=point)
        self._insert(allocation)
        return allocation

    def close(self, allocation: Allocation) -> None:
        """Remove memory that was freed."""
        if self._at.get(allocation.start) is allocation:
            self._remove(allocation.start)

    def use(self, tensor: torch.Tensor, clock: Clock, use_of: tuple[int, int], write: bool, what: str) -> None:
        """Check that a use is ordered after all uses it conflicts with, and record it.

        `use_of`: the stream's index and the use's number in it. Raises `Unordered`, which names both uses.
        """
        start, end = span_of(tensor)
        if start == end:
            return
        use = Use(start, end, *use_of, write, what)
        allocation = self._find(tensor, start)
        check_allocated(allocation, clock, str(use))
        check(allocation.conflicts(use), clock, str(use))
        allocation.add(use)

    def check_host(self, tensor: torch.Tensor, clock: Clock, write: bool, what: str) -> None:
        """Check that the host may use the tensor now. Not recorded: the use ends before the host's next call."""
        start, end = span_of(tensor)
        if start == end:
            return
        use = Use(start, end, -1, 0, write, what)
        check(self._find(tensor, start).conflicts(use), clock, f"{use} on the host")

    def _find(self, tensor: torch.Tensor, start: int) -> Allocation:
        index = bisect_right(self._starts, start) - 1
        if index >= 0:
            allocation = self._at[self._starts[index]]
            if start < allocation.end and not allocation.is_freed():
                return allocation
        return self._adopt(tensor)

    def _adopt(self, tensor: torch.Tensor) -> Allocation:
        # Memory that torch allocated is recorded from its first use until its storage has expired.
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        allocation = Allocation(start, start + storage.nbytes(), storage=StorageWeakRef(storage))
        self._insert(allocation)
        return allocation

    def _insert(self, allocation: Allocation) -> None:
        self._drop_overlapping(allocation)
        if len(self._starts) % 256 == 255:
            self._drop_freed()
        self._at[allocation.start] = allocation
        insort(self._starts, allocation.start)

    def _drop_overlapping(self, allocation: Allocation) -> None:
        index = max(bisect_right(self._starts, allocation.start) - 1, 0)
        while index < len(self._starts) and self._starts[index] < allocation.end:
            old = self._at[self._starts[index]]
            if old.end > allocation.start:
                self._remove(old.start)
            else:
                index += 1

    def _drop_freed(self) -> None:
        for start in [start for start, allocation in self._at.items() if allocation.is_freed()]:
            self._remove(start)

    def _remove(self, start: int) -> None:
        del self._at[start]
        self._starts.remove(start)


def check(earlier: Sequence[Use], clock: Clock, what: str) -> None:
    """Raise `Unordered` if one of the `earlier` uses does not precede `clock`."""
    for use in earlier:
        if clock[use.stream] < use.tick:
            raise Unordered(
                f"{what} is not ordered after {use}: nothing waited for an event recorded after that; "
                "wait for one, on the stream or the host, before using this memory"
            )


def check_allocated(allocation: Allocation, clock: Clock, what: str) -> None:
    """Raise `Unordered` unless `clock` comes after the owning stream's work before the allocation.

    That work may still use the memory: the allocator may have reused what this stream freed.
    """
    point = allocation.point
    if point is None or all(have >= need for have, need in zip(clock, point.clock, strict=True)):
        return
    raise Unordered(
        f"{what} is not ordered after the allocation of {allocation.end - allocation.start} bytes "
        f"on {point.stream}: the allocator may have reused memory that earlier work of that stream still uses; "
        f"use the memory on {point.stream} first, or wait for an event recorded there after the allocation"
    )
