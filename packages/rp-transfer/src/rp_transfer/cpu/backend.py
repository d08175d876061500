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
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from rp_transfer.api import HostUse, MemoryUse, Stream
from rp_transfer.cpu.queued import poison
from rp_transfer.cpu.race_detector import Allocation, check
from rp_transfer.cpu.streams import CpuStream, StreamGroup
from rp_transfer.errors import PinningRefused, Unordered
from rp_transfer.memory.blocks import Layout
from rp_transfer.memory.pages import Pinned
from rp_transfer.memory.regions import Regions

_STREAMS = ("compute", "weights_in", "activations_in", "results_out", "gradients_out")
_ALIGNMENT = 64


class CpuDevice:
    """A virtual device: host memory that only copies on its streams may fill."""

    def __init__(self, backend: CpuBackend, index: int) -> None:
        self._backend = backend
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
        with self._backend.streams.lock:
            self._used += nbytes
            self._peak = max(self._peak, self._used)

    def generator(self) -> torch.Generator:
        """The process's own generator: virtual devices have no other."""
        return torch.default_generator

    def memory(self) -> MemoryUse:
        """Bytes taken with `empty`; what torch operations take is the host's."""
        self._backend.streams.lock.catch_up()
        share = _physical_bytes() // len(self._backend.devices)
        return MemoryUse(self._name, self._used, self._peak, share)

    def reset_peak_memory(self) -> None:
        """Forget the peak seen so far."""
        self._backend.streams.lock.catch_up()
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
        self.streams = StreamGroup(strict, count * len(_STREAMS))
        self._host_used = 0
        self._host_peak = 0
        self._pinned = Pinned(_PretendedPins(pin_limit_bytes))
        self._regions = Regions(self._pinned)
        self._devices = tuple(CpuDevice(self, index) for index in range(count))

    @property
    def devices(self) -> tuple[CpuDevice, ...]:
        """The virtual devices."""
        return self._devices

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
        if not self.streams.strict:
            return
        self.streams.lock.catch_up()
        with self.streams.lock:
            self.streams.raise_violation()
            for tensors, writes in ((read, False), (write, True)):
                for tensor in tensors:
                    self.streams.ledger.check_host(tensor, self.streams.host_clock, writes, what or "use")

    def host_memory(self) -> HostUse:
        """Bytes taken with `host_empty`, and bytes that would be pinned."""
        self.streams.lock.catch_up()
        return HostUse(self._host_used, self._host_peak, self._pinned.nbytes, _physical_bytes())

    def close(self) -> None:
        """Drop what nobody waited for."""
        self.streams.lock.catch_up()
        with self.streams.lock:
            self.streams.close()

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
        if self.streams.strict:
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
        self.streams.lock.catch_up()
        with self.streams.lock:
            self.streams.raise_violation()
            allocation = self._note(address, nbytes, owner)
        # The buffer dies with the last tensor on it, whoever holds that, so this runs exactly at the free.
        weakref.finalize(buffer, self._end, memory, allocation, owner, device).atexit = False

    def _note(self, address: int, nbytes: int, owner: CpuStream | None) -> Allocation:
        if not self.streams.strict:
            return Allocation(address, address + nbytes)
        return self.streams.ledger.open(address, nbytes, None if owner is None else owner.birth())

    def _end(
        self, memory: torch.Tensor, allocation: Allocation, owner: CpuStream | None, device: CpuDevice | None
    ) -> None:
        if self.streams.strict and not self.streams.closed:
            poison(allocation.start, allocation.end - allocation.start, torch.uint8)
        # It is not used again before that is written down; of a closed backend nobody looks any more.
        held = None if self.streams.closed else memory
        self.streams.lock.afterwards(partial(self._freed, held, allocation, owner, device))

    def _freed(
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
            # A finalizer cannot raise to anyone: the next call of this backend does.
            self.streams.note_violation(violation)

    def _count_host(self, nbytes: int) -> None:
        with self.streams.lock:
            self._host_used += nbytes
            self._host_peak = max(self._host_peak, self._host_used)
