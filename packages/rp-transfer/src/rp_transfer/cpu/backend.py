"""The CPU backend: virtual devices that run copies as late as possible, and check the order of all memory uses.

A copy is queued. The thread that waits for an event runs exactly the copies that the event needs. Until a copy
has run, its destination holds poison (NaN or the smallest integer). Every use of memory is checked against the
streams' vector clocks. So a forgotten wait, in either direction, makes a plain unit test fail. No threads are
started here.
"""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeVar

import torch

from rp_transfer.api import Abilities, Capture, GraphPool, HostUse, MemoryUse, Stream
from rp_transfer.cpu.counted import Counting, uncounted
from rp_transfer.cpu.graphs import CpuGraph, CpuGraphPool, capture
from rp_transfer.cpu.queued import poison
from rp_transfer.cpu.race_detector import Allocation, check
from rp_transfer.cpu.streams import CpuStream, StreamGroup
from rp_transfer.errors import PinningRefused, Unordered
from rp_transfer.memory.blocks import Layout
from rp_transfer.memory.pages import Pinned
from rp_transfer.memory.regions import Regions

_STREAMS = ("compute", "weights_in", "activations_in", "results_out", "gradients_out")
_ALIGNMENT = 64
_Result = TypeVar("_Result")
_ABILITIES = Abilities(
    computes_on_host=True, repeats_exactly=True, rounds_fp32=False, pools_host_memory=False, captures_graphs=True
)


class CpuDevice:
    """A virtual device: five streams, and host memory that counts as the device's.

    `limit_bytes`: the device's memory. None: no limit, and only the memory from `empty` is counted.
    """

    def __init__(self, backend: CpuBackend, index: int, limit_bytes: int | None = None) -> None:
        self._backend = backend
        self._limit_bytes = limit_bytes
        self._name = f"cpu:{index}"
        self._used = 0
        self._peak = 0
        streams = [
            CpuStream(backend.streams, f"{self._name}/{name}", index * len(_STREAMS) + offset, name == "compute")
            for offset, name in enumerate(_STREAMS)
        ]
        self.compute, self.weights_in, self.activations_in, self.results_out, self.gradients_out = streams
        self.copying = streams[1:]

    @property
    def name(self) -> str:
        """The kind and the index, such as ``cpu:0``."""
        return self._name

    @property
    def torch_device(self) -> torch.device:
        """Always torch's one CPU device."""
        return torch.device("cpu")

    def attach_thread(self) -> None:
        """Limit the calling thread to one intra-op thread, so that devices do not compete for all cores."""
        torch.set_num_threads(1)

    def computing(self) -> AbstractContextManager[object]:
        """Return a context that counts torch's allocations if the device has a limit."""
        return nullcontext() if self._limit_bytes is None else Counting(self._count_new, self._count_freed)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, stream: Stream) -> torch.Tensor:
        """Allocate poisoned memory that counts as this device's.

        Raises `torch.OutOfMemoryError` beyond the device's limit.
        """
        if not isinstance(stream, CpuStream):
            raise TypeError(f"memory of {self._name} must belong to one of its streams, but got {stream!r}")
        nbytes = math.prod(shape) * dtype.itemsize
        self._count_new(nbytes)
        try:
            return self._backend.allocate(shape, dtype, owner=stream, device=self)
        except BaseException:
            self.count(-nbytes)
            raise

    def _count_new(self, nbytes: int) -> None:
        self._backend.streams.lock.catch_up()
        with self._backend.streams.lock:
            if self._limit_bytes is not None and self._used + nbytes > self._limit_bytes:
                raise torch.OutOfMemoryError(
                    f"{self._name} is out of memory: {nbytes} bytes were requested, and {self._used} of "
                    f"{self._limit_bytes} are in use"
                )
            self.count(nbytes)

    def _count_freed(self, nbytes: int) -> None:
        # Called by finalizers, which take no lock.
        self._backend.streams.lock.afterwards(partial(self.count, -nbytes))

    def count(self, nbytes: int) -> None:
        """Add `nbytes`, which may be negative, to the bytes in use."""
        with self._backend.streams.lock:
            self._used += nbytes
            self._peak = max(self._peak, self._used)

    def generator(self) -> torch.Generator:
        """Return torch's CPU generator, which all virtual devices share."""
        return torch.default_generator

    def memory(self) -> MemoryUse:
        """Return the bytes allocated with `empty`, and by torch operations if the device has a limit."""
        self._backend.streams.lock.catch_up()
        if self._limit_bytes is not None:
            return MemoryUse(self._name, self._used, self._peak, self._limit_bytes)
        share = _physical_bytes() // len(self._backend.devices)
        return MemoryUse(self._name, self._used, self._peak, share, is_complete=False)

    def obtainable_bytes(self) -> int:
        """Return all of the device's memory."""
        return self.memory().total_bytes

    def reset_peak_memory(self) -> None:
        """Set the peak to the bytes in use."""
        self._backend.streams.lock.catch_up()
        self._peak = self._used

    def synchronize(self) -> None:
        """Run all queued copies."""
        for stream in (*self.copying, self.compute):
            stream.record().synchronize()

    def release_unused(self) -> None:
        """Do nothing: freed memory is free at once."""

    def graph_pool(self) -> CpuGraphPool:
        """Return a new pool."""
        return CpuGraphPool()

    def capture(
        self, body: Callable[[Capture], _Result], *, pool: GraphPool, num_draws: int = 0
    ) -> tuple[_Result, CpuGraph]:
        """Run the body to see its operations, and undo it; see `rp_transfer.cpu.graphs`."""
        if not isinstance(pool, CpuGraphPool):
            raise TypeError(f"graphs of {self._name} need a pool of its own, but got {pool!r}")
        return capture(self.compute, pool, body, num_draws)


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class _SimulatedPins:
    """Counts the bytes that real devices would pin, and refuses to pin beyond a limit."""

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
        pin_limit_bytes: limit on pinned memory, as on a machine that limits locked memory; beyond it host memory
            counts as unpinned.
        memory_bytes: memory of each device; beyond it `torch.OutOfMemoryError` is raised. Allocations of torch
            operations inside `computing` count too, except those of compiled code. None: no limit.

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

    def __init__(
        self,
        count: int = 1,
        *,
        strict: bool = True,
        pin_limit_bytes: int | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        if count < 1:
            raise ValueError(f"a CPU backend must have at least one device, but {count} were requested")
        self.streams = StreamGroup(strict, count * len(_STREAMS))
        self._host_used = 0
        self._host_peak = 0
        self._pinned = Pinned(_SimulatedPins(pin_limit_bytes))
        self._regions = Regions(self._pinned)
        self._devices = tuple(CpuDevice(self, index, memory_bytes) for index in range(count))

    @property
    def devices(self) -> tuple[CpuDevice, ...]:
        """The virtual devices."""
        return self._devices

    @property
    def abilities(self) -> Abilities:
        """The host computes, with its own precision."""
        return _ABILITIES

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype, *, short_lived: bool = False) -> torch.Tensor:
        """Allocate plain memory that counts as pinned, up to `pin_limit_bytes`."""
        del short_lived
        tensor = self.allocate(shape, dtype, owner=None, device=None)
        self._count_host(tensor.nbytes)
        return tensor

    def host_blocks(self, layouts: Sequence[Layout]) -> Iterator[torch.Tensor]:
        """Allocate each block separately, so that each is checked separately."""
        return (self.host_empty((layout.numel,), layout.dtype) for layout in layouts)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor's memory counts as pinned."""
        return self._pinned.covers(tensor.data_ptr(), tensor.nbytes)

    def register(self, tensors: Iterable[torch.Tensor]) -> object:
        """Count the tensors' storages as pinned while the returned object lives."""
        return self._regions.register(tensors)

    def host_touch(
        self, *, read: Iterable[torch.Tensor] = (), write: Iterable[torch.Tensor] = (), what: str = ""
    ) -> None:
        """Raise `Unordered` if a conflicting use on a stream may not have finished."""
        if not self.streams.strict:
            return
        self.streams.lock.catch_up()
        with self.streams.lock:
            self.streams.raise_violation()
            for tensors, writes in ((read, False), (write, True)):
                for tensor in tensors:
                    self.streams.ledger.check_host(tensor, self.streams.host_clock, writes, what or "use")

    def host_memory(self) -> HostUse:
        """Return the bytes allocated with `host_empty`, and the bytes that count as pinned."""
        self.streams.lock.catch_up()
        return HostUse(self._host_used, self._host_peak, self._pinned.nbytes, _physical_bytes())

    def close(self) -> None:
        """Drop the copies that nothing has waited for, and refuse further work."""
        self.streams.lock.catch_up()
        with self.streams.lock:
            self.streams.close()

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, *, owner: CpuStream | None, device: CpuDevice | None
    ) -> torch.Tensor:
        """Allocate memory that is checked when its last tensor is freed: no unordered use may remain.

        `owner`: the stream that owns device memory; both it and `device` are None for host memory.
        """
        with uncounted():
            return self._allocate(shape, dtype, owner, device)

    def _allocate(
        self, shape: Sequence[int], dtype: torch.dtype, owner: CpuStream | None, device: CpuDevice | None
    ) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        memory = torch.empty(nbytes + _ALIGNMENT, dtype=torch.uint8, device="cpu")
        address = -(-memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        buffer = (ctypes.c_ubyte * nbytes).from_address(address)
        self._track(buffer, memory, address, nbytes, owner, device)
        if device is None:
            self._pinned.hold(buffer, address, nbytes)
        if self.streams.strict:
            poison(address, nbytes, dtype)
        return torch.frombuffer(buffer, dtype=dtype).view(tuple(shape))

    def _track(
        self,
        buffer: ctypes.Array[ctypes.c_ubyte],
        memory: torch.Tensor,
        address: int,
        nbytes: int,
        owner: CpuStream | None,
        device: CpuDevice | None,
    ) -> None:
        self.streams.lock.catch_up()
        with self.streams.lock:
            self.streams.raise_violation()
            allocation = self._record_allocation(address, nbytes, owner)
        # The last tensor on the buffer keeps it alive, so the finalizer runs exactly when the memory is freed.
        weakref.finalize(buffer, self._finalize, memory, allocation, owner, device).atexit = False

    def _record_allocation(self, address: int, nbytes: int, owner: CpuStream | None) -> Allocation:
        if not self.streams.strict:
            return Allocation(address, address + nbytes)
        return self.streams.ledger.open(address, nbytes, None if owner is None else owner.allocation_point())

    def _finalize(
        self, memory: torch.Tensor, allocation: Allocation, owner: CpuStream | None, device: CpuDevice | None
    ) -> None:
        if self.streams.strict and not self.streams.closed:
            poison(allocation.start, allocation.end - allocation.start, torch.uint8)
        # Keep the memory until the free is recorded, so that torch cannot reuse it before. A closed backend may
        # never record it, so it keeps nothing.
        held = None if self.streams.closed else memory
        self.streams.lock.afterwards(partial(self._record_free, held, allocation, owner, device))

    def _record_free(
        self,
        memory: torch.Tensor | None,
        allocation: Allocation,
        owner: CpuStream | None,
        device: CpuDevice | None,
    ) -> None:
        nbytes = allocation.end - allocation.start
        self.streams.ledger.close(allocation)
        if device is not None:
            device.count(-nbytes)
        else:
            self._count_host(-nbytes)
        if self.streams.strict and not self.streams.closed:
            self._check_free(allocation, owner)
        del memory

    def _check_free(self, allocation: Allocation, owner: CpuStream | None) -> None:
        try:
            if owner is not None:
                owner.covers(allocation)
            else:
                check(
                    allocation.uses,
                    self.streams.host_clock,
                    f"freeing {allocation.end - allocation.start} host bytes",
                )
        except Unordered as violation:
            # A finalizer cannot raise to its caller, so the next call of this backend raises it.
            self.streams.note_violation(violation)

    def _count_host(self, nbytes: int) -> None:
        with self.streams.lock:
            self._host_used += nbytes
            self._host_peak = max(self._host_peak, self._host_used)
