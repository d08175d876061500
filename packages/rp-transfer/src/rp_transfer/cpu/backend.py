"""Virtual devices on the CPU whose copies run only when somebody waits for them.

A copy is queued, and the thread that waits for an event runs exactly the copies that event needs. Until then
the destination holds poison, and every use of memory is checked against the streams' clocks: so a wait that was
forgotten, in either direction, makes a plain unit test fail. Nothing here has a thread of its own.
"""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from rp_transfer.api import Event, HostUse, MemoryUse, Stream
from rp_transfer.checks import check_cast, check_copy
from rp_transfer.cpu.queued import Mark, Move, Place, poison
from rp_transfer.cpu.race_detector import Allocation, Birth, Clock, Ledger, check, join
from rp_transfer.errors import Closed, PinningRefused, Unordered
from rp_transfer.memory.blocks import Layout
from rp_transfer.memory.guard import Guard
from rp_transfer.memory.pages import Pinned
from rp_transfer.memory.regions import Regions

_STREAMS = ("compute", "weights_in", "activations_in", "results_out", "gradients_out")
_ALIGNMENT = 64


class CpuEvent:
    """A point in a stream: how many operations it had, and what it knew of the others."""

    __slots__ = ("_backend", "clock", "mark", "position", "stream")

    def __init__(self, stream: CpuStream, position: int, clock: tuple[int, ...], mark: Mark | None) -> None:
        self.stream = stream
        self.position = position
        self.clock = clock
        self.mark = mark
        self._backend = stream.backend

    def query(self) -> bool:
        """True once somebody has waited for this work; a query alone runs nothing."""
        if self.stream.executed < self.position:
            return False
        self._backend.lock.catch_up()
        # A copy counts as executed while it runs, under the lock.
        with self._backend.lock:
            join(self._backend.host_clock, self.clock)
            return True

    def synchronize(self) -> None:
        """Run the copies this event needs, in the calling thread."""
        self._backend.lock.catch_up()
        with self._backend.lock:
            self._backend.raise_violation()
            self._backend.pull(self)
            join(self._backend.host_clock, self.clock)

    def seconds_since(self, earlier: Event) -> float:
        """By the process's clock."""
        if not isinstance(earlier, CpuEvent) or self.mark is None or earlier.mark is None:
            raise ValueError("both events must be recorded with timed=True")
        return self.mark.seconds - earlier.mark.seconds

    def __repr__(self) -> str:
        return f"CpuEvent({self.stream.name} #{self.position})"


class CpuStream:
    """Copies in order, run when pulled; `eager` streams run in the thread that puts work on them."""

    def __init__(self, backend: CpuBackend, name: str, index: int, eager: bool) -> None:
        self.backend = backend
        self.executed = 0
        self.queue: deque[Move | Mark | CpuEvent] = deque()
        self.eager = eager
        self._name = name
        self._index = index
        self._issued = 0
        self._clock: Clock = backend.new_clock()

    @property
    def name(self) -> str:
        """Such as ``cpu:0/weights_in``."""
        return self._name

    def wait(self, event: Event) -> None:
        """Order later work after `event`; a compute stream pulls its copies at once."""
        if not isinstance(event, CpuEvent) or event.stream.backend is not self.backend:
            raise TypeError(f"{self._name} must wait for an event of its own backend, but got {event!r} instead")
        self.backend.lock.catch_up()
        with self.backend.lock:
            join(self._clock, event.clock)
            if self.eager:
                self.backend.pull(event)
            elif event.stream.executed < event.position:
                self._put(event)

    def record(self, *, timed: bool = False) -> CpuEvent:
        """An event after everything put here so far."""
        self.backend.lock.catch_up()
        with self.backend.lock:
            self._learn()
            mark = Mark() if timed else None
            if mark is not None:
                self._do(mark)
            # What an eager stream did is over, but nobody knows before they have waited for it.
            self._issued += self.eager
            return CpuEvent(self, self._issued, tuple(self._clock), mark)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a move of raw bytes and poison the destination until it runs."""
        check_copy(destination, source)
        self._move(destination, source, "copy")

    def cast(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a conversion and poison the destination until it runs."""
        check_cast(destination, source)
        self._move(destination, source, "conversion")

    def _move(self, destination: torch.Tensor, source: torch.Tensor, what: str) -> None:
        if source.numel():
            self.backend.lock.catch_up()
            with self.backend.lock:
                self._do(self._prepare(destination, source, what))

    def _do(self, work: Move | Mark) -> None:
        if self.eager:
            work.run()
        else:
            self._put(work)

    def _put(self, work: Move | Mark | CpuEvent) -> None:
        self.queue.append(work)
        self._issued += 1

    def _prepare(self, destination: torch.Tensor, source: torch.Tensor, what: str) -> Move:
        move = Move(Place.of(destination), Place.of(source), what, self._name)
        self._learn()
        if self.backend.strict:
            self._use(read=(source,), write=(destination,), what=str(move))
            if not self.eager:
                move.poison_after([old for old in self.backend.queued() if old.uses(move.destination)])
        return move

    def touch(
        self, *, read: Iterable[torch.Tensor] = (), write: Iterable[torch.Tensor] = (), what: str = ""
    ) -> None:
        """Check and remember a use by torch operations of the calling thread."""
        if not self.backend.strict:
            return
        self.backend.lock.catch_up()
        with self.backend.lock:
            self._use(read=read, write=write, what=f"{what or 'use'} on {self._name}")

    def birth(self) -> Birth:
        """Memory that this stream now takes may be what it gave back: its work so far may still use it."""
        join(self._clock, self.backend.host_clock)
        return Birth(tuple(self._clock), self._name)

    def covers(self, allocation: Allocation) -> None:
        """Raise `Unordered` unless all uses of the memory are in this stream's past, or the host's."""
        join(self._clock, self.backend.host_clock)
        check(allocation.uses, self._clock, f"freeing {allocation.end - allocation.start} bytes of {self._name}")

    def _use(self, *, read: Iterable[torch.Tensor], write: Iterable[torch.Tensor], what: str) -> None:
        self._learn()
        self._clock[self._index] += 1
        use_of = (self._index, self._clock[self._index])
        for tensors, writes in ((read, False), (write, True)):
            for tensor in tensors:
                self.backend.ledger.use(tensor, self._clock, use_of, writes, what)

    def _learn(self) -> None:
        self.backend.raise_violation()
        join(self._clock, self.backend.host_clock)


class CpuDevice:
    """A virtual device: host memory that only copies on its streams may fill."""

    def __init__(self, backend: CpuBackend, index: int) -> None:
        self._backend = backend
        self._name = f"cpu:{index}"
        self._used = 0
        self._peak = 0
        streams = [
            CpuStream(backend, f"{self._name}/{name}", index * len(_STREAMS) + offset, name == "compute")
            for offset, name in enumerate(_STREAMS)
        ]
        self.compute, self.weights_in, self.activations_in, self.results_out, self.gradients_out = streams
        self.copying = streams[1:]

    @property
    def name(self) -> str:
        """Such as ``cpu:0``."""
        return self._name

    @property
    def torch_device(self) -> torch.device:
        """Always torch's one CPU device."""
        return torch.device("cpu")

    def attach_thread(self) -> None:
        """One virtual device computes on one core, so that several do not fight for all of them."""
        torch.set_num_threads(1)

    def computing(self) -> AbstractContextManager[None]:
        """Nothing to switch: torch runs in the calling thread."""
        return nullcontext()

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, stream: Stream) -> torch.Tensor:
        """Poisoned memory that counts as this device's."""
        if not isinstance(stream, CpuStream):
            raise TypeError(f"memory of {self._name} must belong to one of its streams, but got {stream!r}")
        tensor = self._backend.allocate(shape, dtype, owner=stream, device=self)
        self.count(tensor.numel() * tensor.element_size())
        return tensor

    def count(self, nbytes: int) -> None:
        """Add to (or take from) the bytes in use."""
        with self._backend.lock:
            self._used += nbytes
            self._peak = max(self._peak, self._used)

    def generator(self) -> torch.Generator:
        """The process's own generator: virtual devices have no other."""
        return torch.default_generator

    def memory(self) -> MemoryUse:
        """Bytes taken with `empty`; what torch operations take is the host's."""
        self._backend.lock.catch_up()
        share = _physical_bytes() // len(self._backend.devices)
        return MemoryUse(self._name, self._used, self._peak, share)

    def reset_peak_memory(self) -> None:
        """Forget the peak seen so far."""
        self._backend.lock.catch_up()
        self._peak = self._used

    def synchronize(self) -> None:
        """Run everything that was queued."""
        for stream in (*self.copying, self.compute):
            stream.record().synchronize()


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class _PretendedPins:
    """Counts what real devices would pin, up to a limit."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit = limit_bytes
        self._used = 0
        self._sizes: dict[int, int] = {}

    def pin(self, address: int, nbytes: int) -> None:
        if self._limit is not None and self._used + nbytes > self._limit:
            raise PinningRefused(f"{nbytes} bytes would go over the limit of {self._limit}")
        self._sizes[address] = nbytes
        self._used += nbytes

    def unpin(self, address: int) -> None:
        self._used -= self._sizes.pop(address)


class CpuBackend:
    """Any number of virtual devices in one process.

    Args:
        count: number of devices.
        strict: poison memory and check the order of every use; False for benchmarks.
        pin_limit_bytes: host memory beyond it counts as not pinned, as on a machine that limits locked memory.

    >>> backend = CpuBackend(1)
    >>> device = backend.devices[0]
    >>> source = torch.ones(2)
    >>> there = device.empty((2,), torch.float32, stream=device.weights_in)
    >>> device.weights_in.copy(there, source)
    >>> there
    tensor([nan, nan])
    >>> device.weights_in.record().synchronize()
    >>> there
    tensor([1., 1.])
    """

    def __init__(self, count: int = 1, *, strict: bool = True, pin_limit_bytes: int | None = None) -> None:
        if count < 1:
            raise ValueError(f"a CPU backend must have at least one device, but {count} were asked for")
        self.strict = strict
        self.lock = Guard()
        self.ledger = Ledger()
        self._num_streams = count * len(_STREAMS)
        self.host_clock: Clock = self.new_clock()
        self._violation: Unordered | None = None
        self._closed = False
        self._host_used = 0
        self._host_peak = 0
        self._pinned = Pinned(_PretendedPins(pin_limit_bytes))
        self._regions = Regions(self._pinned)
        self._devices = tuple(CpuDevice(self, index) for index in range(count))

    @property
    def devices(self) -> tuple[CpuDevice, ...]:
        """The virtual devices."""
        return self._devices

    def new_clock(self) -> Clock:
        """What somebody knows at first: nothing of any stream. Without checks nobody counts."""
        return [0] * self._num_streams if self.strict else []

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype, *, short_lived: bool = False) -> torch.Tensor:
        """Plain memory that counts as pinned: nothing here has to be."""
        del short_lived
        tensor = self.allocate(shape, dtype, owner=None, device=None)
        self._count_host(tensor.nbytes)
        return tensor

    def host_blocks(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        """Each by itself, so that each is checked by itself."""
        return [self.host_empty((layout.numel,), layout.dtype) for layout in layouts]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it would be pinned on a device."""
        return self._pinned.covers(tensor.data_ptr(), tensor.nbytes)

    def register(self, tensors: Iterable[torch.Tensor]) -> object:
        """Let the storages count as pinned."""
        return self._regions.register(tensors)

    def host_touch(
        self, *, read: Iterable[torch.Tensor] = (), write: Iterable[torch.Tensor] = (), what: str = ""
    ) -> None:
        """Raise `Unordered` if a stream may still use one of these tensors."""
        if not self.strict:
            return
        self.lock.catch_up()
        with self.lock:
            self.raise_violation()
            for tensors, writes in ((read, False), (write, True)):
                for tensor in tensors:
                    self.ledger.check_host(tensor, self.host_clock, writes, what or "use")

    def host_memory(self) -> HostUse:
        """Bytes taken with `host_empty`, and bytes that would be pinned."""
        self.lock.catch_up()
        return HostUse(self._host_used, self._host_peak, self._pinned.nbytes, _physical_bytes())

    def close(self) -> None:
        """Drop what nobody waited for."""
        self.lock.catch_up()
        with self.lock:
            self._closed = True
            for device in self._devices:
                for stream in device.copying:
                    stream.queue.clear()

    def raise_violation(self) -> None:
        """Raise what was found where nothing could be raised, and refuse work once closed."""
        if self._closed:
            raise Closed("the CPU backend was closed; open another one")
        violation, self._violation = self._violation, None
        if violation is not None:
            raise violation

    def queued(self) -> Iterator[Move]:
        """The copies that have not run yet, whichever streams they are on."""
        for device in self._devices:
            for stream in device.copying:
                yield from (work for work in stream.queue if isinstance(work, Move))

    def pull(self, event: CpuEvent) -> None:
        """Run exactly the copies that `event` needs, whichever streams they are on."""
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
            raise Closed("the CPU backend was closed before this work ran")
        head = stream.queue[0]
        if isinstance(head, CpuEvent) and head.stream.executed < head.position:
            goals.append((head.stream, head.position))
            return
        stream.queue.popleft()
        stream.executed += 1
        if not isinstance(head, CpuEvent):
            head.run()

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, *, owner: CpuStream | None, device: CpuDevice | None
    ) -> torch.Tensor:
        """Memory whose end is checked: nothing unordered may still use it when its last tensor goes."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        memory = torch.empty(nbytes + _ALIGNMENT, dtype=torch.uint8, device="cpu")
        address = -(-memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        buffer = (ctypes.c_ubyte * nbytes).from_address(address)
        self._open(buffer, memory, address, nbytes, owner, device)
        if device is None:
            self._pinned.hold(buffer, address, nbytes)
        if self.strict:
            poison(address, nbytes, dtype)
        return torch.frombuffer(buffer, dtype=dtype).view(tuple(shape))

    def _open(
        self,
        buffer: ctypes.Array[ctypes.c_ubyte],
        memory: torch.Tensor,
        address: int,
        nbytes: int,
        owner: CpuStream | None,
        device: CpuDevice | None,
    ) -> None:
        self.lock.catch_up()
        with self.lock:
            self.raise_violation()
            allocation = self._note(address, nbytes, owner)
        # The buffer dies with the last tensor on it, whoever holds that, so this runs exactly at the free.
        weakref.finalize(buffer, self._end, memory, allocation, owner, device).atexit = False

    def _note(self, address: int, nbytes: int, owner: CpuStream | None) -> Allocation:
        if not self.strict:
            return Allocation(address, address + nbytes)
        return self.ledger.open(address, nbytes, None if owner is None else owner.birth())

    def _end(
        self, memory: torch.Tensor, allocation: Allocation, owner: CpuStream | None, device: CpuDevice | None
    ) -> None:
        if self.strict and not self._closed:
            poison(allocation.start, allocation.end - allocation.start, torch.uint8)
        # It is not used again before that is written down; of a closed backend nobody looks any more.
        held = None if self._closed else memory
        self.lock.afterwards(partial(self._freed, held, allocation, owner, device))

    def _freed(
        self,
        memory: torch.Tensor | None,
        allocation: Allocation,
        owner: CpuStream | None,
        device: CpuDevice | None,
    ) -> None:
        nbytes = allocation.end - allocation.start
        self.ledger.close(allocation)
        if device is not None:
            device.count(-nbytes)
        else:
            self._count_host(-nbytes)
        if self.strict and not self._closed:
            self._check_free(allocation, owner)
        del memory

    def _check_free(self, allocation: Allocation, owner: CpuStream | None) -> None:
        try:
            if owner is not None:
                owner.covers(allocation)
            else:
                check(
                    allocation.uses,
                    self.host_clock,
                    f"freeing {allocation.end - allocation.start} host bytes",
                )
        except Unordered as violation:
            # A finalizer cannot raise to anyone: the next call of this backend does.
            self._violation = self._violation or violation

    def _count_host(self, nbytes: int) -> None:
        with self.lock:
            self._host_used += nbytes
            self._host_peak = max(self._host_peak, self._host_used)
