"""Streams and events of virtual devices. A queued copy runs when a caller waits for an event after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch

from rp_transfer.api import Event
from rp_transfer.checks import check_cast, check_copy, check_part
from rp_transfer.cpu.queued import AddressRange, Mark, QueuedMove
from rp_transfer.cpu.race_detector import Allocation, AllocationPoint, Clock, Ledger, check, join
from rp_transfer.errors import Closed, Unordered
from rp_transfer.memory.guard import Guard


class CpuEvent:
    """A point in a stream: the number of operations before it, and the stream's vector clock."""

    __slots__ = ("_group", "clock", "mark", "position", "stream")

    def __init__(self, stream: CpuStream, position: int, clock: tuple[int, ...], mark: Mark | None) -> None:
        self.stream = stream
        self.position = position
        self.clock = clock
        self.mark = mark
        self._group = stream.group

    def query(self) -> bool:
        """Return whether the work before the event has run. A query runs nothing: some caller must wait for it."""
        if self.stream.executed < self.position:
            return False
        self._group.lock.catch_up()
        # A copy counts as executed as soon as it starts; it runs under the lock, so taking the lock waits for it.
        with self._group.lock:
            join(self._group.host_clock, self.clock)
            return True

    def synchronize(self) -> None:
        """Run the copies that this event needs, in the calling thread."""
        self._group.lock.catch_up()
        with self._group.lock:
            self._group.raise_violation()
            self._group.pull(self)
            join(self._group.host_clock, self.clock)

    def seconds_since(self, earlier: Event) -> float:
        """Return the seconds from `earlier` to this event by the process's clock."""
        if not isinstance(earlier, CpuEvent) or self.mark is None or earlier.mark is None:
            raise ValueError("both events must be recorded with timed=True")
        return self.mark.seconds - earlier.mark.seconds

    def __repr__(self) -> str:
        return f"CpuEvent({self.stream.name} #{self.position})"


class CpuStream:
    """A stream whose copies run in order when an event after them is waited for.

    An `eager` stream (compute) runs work at once, in the calling thread.
    """

    def __init__(self, group: StreamGroup, name: str, index: int, eager: bool) -> None:
        self.group = group
        self.executed = 0
        self.queue: deque[QueuedMove | Mark | CpuEvent] = deque()
        self.eager = eager
        self._name = name
        self._index = index
        self._issued = 0
        self._clock: Clock = group.new_clock()
        if not eager:
            group.add(self)

    @property
    def name(self) -> str:
        """The device and the stream, such as ``cpu:0/weights_in``."""
        return self._name

    def wait(self, event: Event) -> None:
        """Order later work after `event`. An eager stream runs the copies that `event` needs at once."""
        if not isinstance(event, CpuEvent) or event.stream.group is not self.group:
            raise TypeError(f"{self._name} must wait for an event of its own backend, but got {event!r} instead")
        self.group.lock.catch_up()
        with self.group.lock:
            join(self._clock, event.clock)
            if self.eager:
                self.group.pull(event)
            elif event.stream.executed < event.position:
                self._put(event)

    def record(self, *, timed: bool = False) -> CpuEvent:
        """Record an event after everything enqueued so far."""
        self.group.lock.catch_up()
        with self.group.lock:
            self._join_host()
            mark = Mark() if timed else None
            if mark is not None:
                self._do(mark)
            # An eager stream's work has run already, but `query` must stay False until a caller waits for it.
            self._issued += self.eager
            return CpuEvent(self, self._issued, tuple(self._clock), mark)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of raw bytes, and poison the destination until it runs."""
        check_copy(destination, source)
        self._move(destination, source, "copy")

    def copy_part(self, destination: torch.Tensor, source: torch.Tensor, part: range) -> None:
        """Queue a copy of some elements, and poison them in the destination until it runs."""
        check_part(destination, source, part)
        self._move(destination[part.start : part.stop], source[part.start : part.stop], "copy")

    def cast(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a conversion, and poison the destination until it runs."""
        check_cast(destination, source)
        self._move(destination, source, "conversion")

    def _move(self, destination: torch.Tensor, source: torch.Tensor, what: str) -> None:
        if source.numel():
            self.group.lock.catch_up()
            with self.group.lock:
                self._do(self._prepare(destination, source, what))

    def _do(self, work: QueuedMove | Mark) -> None:
        if self.eager:
            work.run()
        else:
            self._put(work)

    def _put(self, work: QueuedMove | Mark | CpuEvent) -> None:
        self.queue.append(work)
        self._issued += 1

    def _prepare(self, destination: torch.Tensor, source: torch.Tensor, what: str) -> QueuedMove:
        move = QueuedMove(AddressRange.of(destination), AddressRange.of(source), what, self._name)
        self._join_host()
        if self.group.strict:
            self._use(read=(source,), write=(destination,), what=str(move))
            if not self.eager:
                move.poison_after([old for old in self.group.queued() if old.uses(move.destination)])
        return move

    def touch(
        self, *, read: Iterable[torch.Tensor] = (), write: Iterable[torch.Tensor] = (), what: str = ""
    ) -> None:
        """Check and record a use by torch operations of the calling thread."""
        if not self.group.strict:
            return
        self.group.lock.catch_up()
        with self.group.lock:
            self._use(read=read, write=write, what=f"{what or 'use'} on {self._name}")

    def allocation_point(self) -> AllocationPoint:
        """Return the stream's current clock: its earlier work may still use the memory that it now allocates."""
        join(self._clock, self.group.host_clock)
        return AllocationPoint(tuple(self._clock), self._name)

    def covers(self, allocation: Allocation) -> None:
        """Raise `Unordered` unless this stream or the host has waited for all uses of the memory."""
        join(self._clock, self.group.host_clock)
        check(allocation.uses, self._clock, f"freeing {allocation.end - allocation.start} bytes of {self._name}")

    def _use(self, *, read: Iterable[torch.Tensor], write: Iterable[torch.Tensor], what: str) -> None:
        self._join_host()
        self._clock[self._index] += 1
        use_of = (self._index, self._clock[self._index])
        for tensors, writes in ((read, False), (write, True)):
            for tensor in tensors:
                self.group.ledger.use(tensor, self._clock, use_of, writes, what)

    def _join_host(self) -> None:
        self.group.raise_violation()
        join(self._clock, self.group.host_clock)


class StreamGroup:
    """The state that all streams of one backend share: lock, ledger, the host's clock, and the queued copies."""

    def __init__(self, strict: bool, count: int) -> None:
        self.strict = strict
        self.lock = Guard()
        self.ledger = Ledger()
        self.closed = False
        self._count = count
        self._copying: list[CpuStream] = []
        self.host_clock: Clock = self.new_clock()
        self._violation: Unordered | None = None

    def new_clock(self) -> Clock:
        """Return a vector clock of zeros; empty if order is not checked."""
        return [0] * self._count if self.strict else []

    def add(self, stream: CpuStream) -> None:
        """Add a stream whose copies are queued."""
        self._copying.append(stream)

    def raise_violation(self) -> None:
        """Raise `Closed` if the backend was closed, and once a violation that `note_violation` stored."""
        if self.closed:
            raise Closed("the CPU backend was closed; open another one")
        violation, self._violation = self._violation, None
        if violation is not None:
            raise violation

    def queued(self) -> Iterator[QueuedMove]:
        """Yield the copies of all streams that have not run yet."""
        for stream in self._copying:
            yield from (work for work in stream.queue if isinstance(work, QueuedMove))

    def pull(self, event: CpuEvent) -> None:
        """Run exactly the copies that `event` needs, on all streams."""
        goals = [(event.stream, event.position)]
        while goals:
            stream, position = goals[-1]
            if stream.executed >= position:
                goals.pop()
            elif stream.eager:
                stream.executed = position
            else:
                self._step(stream, goals)

    @staticmethod
    def _step(stream: CpuStream, goals: list[tuple[CpuStream, int]]) -> None:
        if not stream.queue:
            raise Closed("the CPU backend was closed before this work ran; wait for its events before closing it")
        head = stream.queue[0]
        if isinstance(head, CpuEvent) and head.stream.executed < head.position:
            goals.append((head.stream, head.position))
            return
        stream.queue.popleft()
        stream.executed += 1
        if not isinstance(head, CpuEvent):
            head.run()

    def note_violation(self, violation: Unordered) -> None:
        """Store the first violation of a finalizer, which cannot raise it; the next call raises it."""
        self._violation = self._violation or violation

    def close(self) -> None:
        """Drop the queued copies, and refuse further work."""
        self.closed = True
        for stream in self._copying:
            stream.queue.clear()
