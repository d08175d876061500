"""Find hazards: pairs of conflicting steps that no wait of a program orders.

This is independent of the CPU backend's vector clocks: it computes for each step the set of steps that have
finished before it in every run (its past). A set is an integer whose bit i stands for step i.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rp_transfer.testing.programs import (
    Allocate,
    Compute,
    Copy,
    Free,
    MemoryRange,
    Program,
    Read,
    Record,
    Step,
    StreamName,
    Wait,
    Write,
    without,
)


@dataclass(frozen=True, slots=True)
class Hazard:
    """Step `later` must run after step `earlier`, but no wait ensures it."""

    later: int
    earlier: int


@dataclass(frozen=True, slots=True)
class _Use:
    index: int
    piece: MemoryRange
    write: bool
    copy: bool


@dataclass(slots=True)
class Order:
    """The order of the steps added so far.

    `lanes`, `host`: the steps that precede the next step there. `forced`: copies that must have run by now, and
    all steps of the host and the compute streams. `events`: the steps before each event.
    """

    lanes: dict[StreamName, int] = field(default_factory=dict[StreamName, int])
    host: int = 0
    forced: int = 0
    events: dict[str, int] = field(default_factory=dict[str, int])
    _size: int = 0
    _takes: dict[str, Allocate] = field(default_factory=dict[str, Allocate])
    _before_take: dict[str, int] = field(default_factory=dict[str, int])
    _uses: dict[str, list[_Use]] = field(default_factory=dict[str, list[_Use]])

    def past(self, lane: StreamName | None) -> int:
        """Return the steps that precede the next step on `lane` (None: on the host)."""
        return self.host | (0 if lane is None else self.lanes.get(lane, 0))

    def missing(self, step: Step, *, patient: bool = False) -> int:
        """Return the steps that must precede `step`, the next one, but that no wait orders before it.

        Memory may be freed once the copies that use it have run. They have if the host has waited for them or,
        unless `patient`, if a later step that has run needed them.
        """
        if isinstance(step, Free):
            return self._missing_to_free(step.name, patient)
        past = self.past(_lane(step))
        return _mask(_pieces(step), self) & ~past

    def needs(self, piece: MemoryRange, write: bool) -> int:
        """Return the steps that a use of the piece must come after."""
        earlier = [use for use in self._uses.get(piece.name, []) if write or use.write]
        # The allocator may reuse memory that the owning stream freed, so that stream's earlier work comes first.
        before = self._before_take.get(piece.name, 0)
        return before | _bits(use.index for use in earlier if use.piece.overlaps(piece))

    def _missing_to_free(self, name: str, patient: bool) -> int:
        uses = self._uses.get(name, [])
        known = self.past(self._takes[name].owner)
        over = self.host if patient else self.forced
        return _bits(use.index for use in uses) & ~known | _bits(use.index for use in uses if use.copy) & ~over

    def add(self, step: Step) -> None:
        """Add `step` after those added before."""
        bit = 1 << self._size
        match step:
            case Allocate():
                self._takes[step.name] = step
                self._before_take[step.name] = 0 if step.owner is None else self.past(step.owner)
            case Free():
                self._uses.pop(step.name, None)
            case Write() | Read():
                self.host |= bit
            case Record():
                self.events[step.event] = self.past(step.lane)
            case Wait():
                self._wait(step)
            case Copy() | Compute():
                self.lanes[step.lane] = self.past(step.lane) | bit
        for piece, write in _pieces(step):
            self._uses.setdefault(piece.name, []).append(_Use(self._size, piece, write, isinstance(step, Copy)))
        if _is_eager(step):
            self.forced |= bit
        self._size += 1

    def _wait(self, step: Wait) -> None:
        known = self.events[step.event]
        if step.lane is None:
            self.host |= known
        else:
            self.lanes[step.lane] = self.past(step.lane) | known
        # Copies that the host or a compute stream waits for run at once; a copy stream's wait alone runs nothing.
        if step.lane is None or step.lane.stream == "compute":
            self.forced |= known


def _is_eager(step: Step) -> bool:
    lane = _lane(step)
    return lane is None or lane.stream == "compute"


def _lane(step: Step) -> StreamName | None:
    return step.lane if isinstance(step, Copy | Compute | Record | Wait) else None


def _pieces(step: Step) -> list[tuple[MemoryRange, bool]]:
    match step:
        case Write():
            return [(step.piece, True)]
        case Read():
            return [(step.piece, False)]
        case Copy():
            return [(step.source, False), (step.destination, True)]
        case Compute():
            return [*((source, False) for source in step.sources), (step.destination, True)]
        case _:
            return []


def _mask(pieces: Iterable[tuple[MemoryRange, bool]], order: Order) -> int:
    mask = 0
    for piece, write in pieces:
        mask |= order.needs(piece, write)
    return mask


def _bits(indices: Iterable[int]) -> int:
    return sum(1 << index for index in set(indices))


def steps_in(mask: int) -> list[int]:
    """Return the indices of the steps in a set, in order.

    >>> steps_in(0b1010)
    [1, 3]
    """
    return [index for index in range(mask.bit_length()) if mask >> index & 1]


def hazards(program: Program) -> list[Hazard]:
    """Return all pairs of conflicting uses of memory that no wait orders; none in a correct program."""
    order = Order()
    unordered: list[Hazard] = []
    for index, step in enumerate(program.steps):
        unordered += [Hazard(index, earlier) for earlier in steps_in(order.missing(step))]
        order.add(step)
    return unordered


def needed_waits(program: Program) -> list[int]:
    """Return the indices of the waits that no other step implies: without any one the program has a hazard."""
    waits = [index for index, step in enumerate(program.steps) if isinstance(step, Wait)]
    return [index for index in waits if hazards(without(program, index))]
