"""The CUDA backend: CuPy's streams, events, copies and pinning, shared with torch.

This is the only file that imports CuPy.
"""

# CuPy has no type information; no other file needs these settings.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingImports=false, reportUnknownParameterType=false

from __future__ import annotations

import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import cupy
import torch

from rp_transfer.api import Abilities, Capture, Event, GraphPool, HostUse, MemoryUse, Stream
from rp_transfer.checks import check_cast, check_copy
from rp_transfer.cuda.graphs import CudaGraph, CudaGraphPool, capture
from rp_transfer.cuda.pinned_pool import HostMemory
from rp_transfer.cuda.segments import leave_no_holes
from rp_transfer.errors import BackendUnavailable, Closed, PinningRefused
from rp_transfer.memory.blocks import Layout
from rp_transfer.memory.pages import MOST_PINNED_BYTES, Pinned
from rp_transfer.memory.regions import Regions

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device
_ANY_DIRECTION = 4  # cudaMemcpyDefault: the driver infers the direction from the addresses
_STREAMS = ("compute", "weights_in", "activations_in", "results_out", "gradients_out")
_Result = TypeVar("_Result")
_ABILITIES = Abilities(
    computes_on_host=False,
    repeats_exactly=False,
    rounds_fp32=True,
    pools_host_memory=True,
    captures_graphs=True,
)
# By name: CUDA's streams of devices that are gone, for the next ones. None is ever destroyed, since torch's
# allocator keeps free memory by stream, and synchronizes with that stream to unmap an expandable segment.
_IDLE_STREAMS: defaultdict[str, deque[Any]] = defaultdict(deque)


class CudaEvent:
    """A point in a CUDA stream."""

    __slots__ = ("native", "timed")

    def __init__(self, native: Any, *, timed: bool) -> None:
        self.native = native
        self.timed = timed

    def query(self) -> bool:
        """Return whether the work before the event has finished."""
        return bool(self.native.done)

    def synchronize(self) -> None:
        """Block until the work before the event has finished, without holding the GIL."""
        self.native.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        """Return the seconds from `earlier` to this event, measured by the device."""
        if not (isinstance(earlier, CudaEvent) and self.timed and earlier.timed):
            raise ValueError("both events must be recorded with timed=True")
        return float(cupy.cuda.get_elapsed_time(earlier.native, self.native)) / 1000


class CudaStream:
    """One stream of the current GPU, shared by CuPy and torch.

    Threads that use it have called `CudaDevice.attach_thread`.
    """

    def __init__(self, name: str, torch_device: torch.device, pinned: Pinned) -> None:
        self._name = name
        self._pinned = pinned
        self.native = _lend(self)
        self.torch_stream = torch.cuda.ExternalStream(self.native.ptr, device=torch_device)

    @property
    def name(self) -> str:
        """The device and the stream, such as ``cuda:0/weights_in``."""
        return self._name

    def wait(self, event: Event) -> None:
        """Order later work after `event`, of this or another CUDA device."""
        if not isinstance(event, CudaEvent):
            raise TypeError(f"{self._name} must wait for a CUDA event, but got {event!r} instead")
        self.native.wait_event(event.native)

    def record(self, *, timed: bool = False) -> CudaEvent:
        """Record an event after everything enqueued so far."""
        native = cupy.cuda.Event(block=True, disable_timing=not timed)
        native.record(self.native)
        return CudaEvent(native, timed=timed)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue an asynchronous copy of raw bytes."""
        check_copy(destination, source)
        self.copy_part(destination, source, range(source.numel()))

    def copy_part(self, destination: torch.Tensor, source: torch.Tensor, part: range) -> None:
        """Enqueue an asynchronous copy of some elements, by address: views would be operations of torch."""
        offset, nbytes = (count * source.element_size() for count in (part.start, len(part)))
        into, out_of = destination.data_ptr() + offset, source.data_ptr() + offset
        for start, size in self._pinned.parts(nbytes, into, out_of) if nbytes else ():
            cupy.cuda.runtime.memcpyAsync(into + start, out_of + start, size, _ANY_DIRECTION, self.native.ptr)

    def cast(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue torch's conversion."""
        check_cast(destination, source)
        if destination.shape != source.shape:
            destination, source = destination.view(-1), source.view(-1)
        with torch.no_grad(), torch.cuda.stream(self.torch_stream):
            destination.copy_(source)

    def touch(
        self, *, read: Iterable[torch.Tensor] = (), write: Iterable[torch.Tensor] = (), what: str = ""
    ) -> None:
        """Do nothing: only the virtual devices check the order of uses."""


class CudaDevice:
    """One GPU and its five streams. `pinned`: the host memory that they copy from and to."""

    def __init__(self, index: int, pinned: Pinned) -> None:
        self._index = index
        self._name = f"cuda:{index}"
        self._torch_device = torch.device("cuda", index)
        # CuPy creates streams on the current device only.
        with cupy.cuda.Device(index), torch.cuda.device(index):
            streams = [CudaStream(f"{self._name}/{name}", self._torch_device, pinned) for name in _STREAMS]
        self.compute, self.weights_in, self.activations_in, self.results_out, self.gradients_out = streams
        self._streams = streams
        # Held while a graph is captured: to wait for a stream that is being captured breaks the capture.
        self._captured = threading.RLock()

    @property
    def name(self) -> str:
        """The kind and the index, such as ``cuda:1``."""
        return self._name

    @property
    def torch_device(self) -> torch.device:
        """The torch device."""
        return self._torch_device

    def attach_thread(self) -> None:
        """Make this the calling thread's current device, for torch and for CuPy."""
        torch.cuda.set_device(self._index)
        cupy.cuda.Device(self._index).use()
        # Create the CUDA context of torch's autograd thread for this device. Without it, torch warns if the first
        # backward pass is that of a matrix product.
        (torch.ones((), device=self._torch_device, requires_grad=True) * 1).backward()

    def computing(self) -> AbstractContextManager[None]:
        """Run torch operations on the compute stream."""
        return torch.cuda.stream(self.compute.torch_stream)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, stream: Stream) -> torch.Tensor:
        """Allocate from torch's caching allocator, for `stream`."""
        if not isinstance(stream, CudaStream):
            raise TypeError(f"memory of {self._name} must belong to one of its streams, but got {stream!r}")
        with torch.cuda.stream(stream.torch_stream):
            return torch.empty(tuple(shape), dtype=dtype, device=self._torch_device)

    def generator(self) -> torch.Generator:
        """Return the device's default random generator."""
        return torch.cuda.default_generators[self._index]

    def memory(self) -> MemoryUse:
        """Return the bytes allocated by torch's allocator. The total is what this process may use of the GPU."""
        share = torch.cuda.get_per_process_memory_fraction(self._index)
        total = int(torch.cuda.get_device_properties(self._index).total_memory * share)
        # Not `memory_allocated` and `max_memory_allocated`, which each flatten and sort all that torch counts.
        allocated = torch.cuda.memory_stats_as_nested_dict(self._index)["allocated_bytes"]["all"]
        return MemoryUse(self._name, allocated["current"], allocated["peak"], total)

    def obtainable_bytes(self) -> int:
        """Return the bytes that torch's allocator holds or could get, at most the process's share."""
        free, _ = torch.cuda.mem_get_info(self._index)
        return min(free + torch.cuda.memory_reserved(self._index), self.memory().total_bytes)

    def reset_peak_memory(self) -> None:
        """Set the peak to the bytes in use."""
        torch.cuda.reset_peak_memory_stats(self._index)

    def synchronize(self) -> None:
        """Block until all work on the five streams has finished."""
        with self._captured:
            for stream in self._streams:
                stream.native.synchronize()

    def release_unused(self) -> None:
        """Empty the caches of torch's and CuPy's allocators, since cuBLAS and cuDNN allocate outside both.

        From then on torch uses expandable segments, unless the user's settings decide otherwise.
        """
        torch.cuda.empty_cache()
        leave_no_holes()
        cupy.get_default_memory_pool().free_all_blocks()

    def graph_pool(self) -> CudaGraphPool:
        """Return a new pool of torch's allocator."""
        return CudaGraphPool()

    def capture(
        self, body: Callable[[Capture], _Result], *, pool: GraphPool, num_draws: int = 0
    ) -> tuple[_Result, CudaGraph]:
        """Capture a CUDA graph; see `rp_transfer.cuda.graphs`."""
        if not isinstance(pool, CudaGraphPool):
            raise TypeError(f"graphs of {self._name} need a pool of its own, but got {pool!r}")
        if torch.cuda.current_stream(self._torch_device) != self.compute.torch_stream:
            raise ValueError(f"graphs of {self._name} are captured inside computing()")
        with self._captured:
            return capture(pool, body, self.generator(), num_draws)


class _CudaPins:
    """Pins host memory by registering it with the CUDA driver.

    Torch's and CuPy's pools are not used, since both round sizes up, at worst to a power of two. One of the
    backend's devices is made current first: otherwise CUDA would create a context, which takes memory, on another
    device.
    """

    def __init__(self, device: int) -> None:
        self._device = device

    def pin(self, address: int, nbytes: int) -> None:
        try:
            with cupy.cuda.Device(self._device):
                cupy.cuda.runtime.hostRegister(address, nbytes, _PORTABLE)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise PinningRefused(f"{nbytes} bytes: {error}") from error

    def unpin(self, address: int) -> None:
        with cupy.cuda.Device(self._device):
            cupy.cuda.runtime.hostUnregister(address)


class CudaBackend:
    """The GPUs with the given indices. `most_pinned_bytes`: the most host memory to register in one call.

    Raises `BackendUnavailable` if CuPy cannot use the driver, if CuPy and torch are built for different major
    versions of CUDA, or if a GPU cannot be opened.
    """

    def __init__(self, indices: Sequence[int], *, most_pinned_bytes: int = MOST_PINNED_BYTES) -> None:
        _check_versions()
        self._pinned = Pinned(_CudaPins(indices[0]), most_pinned_bytes)
        self._devices = tuple(_open_device(index, self._pinned) for index in indices)
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._host = HostMemory(self._pinned, total)
        self._regions = Regions(self._pinned)
        self._closed = False

    @property
    def devices(self) -> tuple[CudaDevice, ...]:
        """The GPUs, in the requested order."""
        return self._devices

    @property
    def abilities(self) -> Abilities:
        """GPUs compute beside the host."""
        return _ABILITIES

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype, *, short_lived: bool = False) -> torch.Tensor:
        """Allocate pinned memory of exactly this size; see `HostMemory.empty`."""
        self._check_open()
        return self._host.empty(shape, dtype, short_lived=short_lived)

    def host_blocks(self, layouts: Sequence[Layout]) -> Iterator[torch.Tensor]:
        """Allocate a pinned block for each layout; see `HostMemory.blocks`."""
        self._check_open()
        return self._host.blocks(layouts)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the CUDA backend was closed; open another one")

    def host_touch(
        self, *, read: Iterable[torch.Tensor] = (), write: Iterable[torch.Tensor] = (), what: str = ""
    ) -> None:
        """Do nothing: only the virtual devices check the order of uses."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether one range pinned by this backend holds the whole tensor, or torch has pinned it."""
        nbytes = tensor.numel() * tensor.element_size()
        return self._pinned.covers(tensor.data_ptr(), nbytes) or tensor.is_pinned()

    def register(self, tensors: Iterable[torch.Tensor]) -> object:
        """Pin storages in place, except those that torch has pinned."""
        return self._regions.register(tensor for tensor in tensors if not self._is_pinned_by_torch(tensor))

    def _is_pinned_by_torch(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return tensor.is_pinned() and not self._pinned.covers(storage.data_ptr(), storage.nbytes())

    def host_memory(self) -> HostUse:
        """Return the bytes allocated, including idle pooled buffers, and the bytes pinned."""
        return self._host.use()

    def close(self) -> None:
        """Wait for the devices, and release the pooled host memory."""
        if not self._closed:
            self._closed = True
            for device in self._devices:
                device.synchronize()
            self._host.clear()


def _lend(user: CudaStream) -> Any:
    """Return a stream of the current GPU: one that a stream of this name had before, until `user` is garbage."""
    idle = _IDLE_STREAMS[user.name]
    try:
        native = idle.popleft()
    except IndexError:
        native = cupy.cuda.Stream(non_blocking=True)
    weakref.finalize(user, idle.append, native).atexit = False
    return native


def _open_device(index: int, pinned: Pinned) -> CudaDevice:
    try:
        return CudaDevice(index, pinned)
    except (cupy.cuda.runtime.CUDARuntimeError, torch.AcceleratorError) as error:
        raise BackendUnavailable(
            f"cuda:{index} cannot be opened: {error}; check with nvidia-smi that it has free memory and that no "
            "other process uses it exclusively"
        ) from error


def _check_versions() -> None:
    try:
        version = int(cupy.cuda.runtime.runtimeGetVersion())
    except Exception as error:
        raise BackendUnavailable(
            f"CuPy cannot use the CUDA driver: {error}; update the NVIDIA driver, or choose 'cpu' devices"
        ) from error
    wanted = int((torch.version.cuda or "0").split(".")[0])
    if version // 1000 != wanted:
        raise BackendUnavailable(
            f"torch is built for CUDA {wanted} but CuPy for CUDA {version // 1000}; "
            f"install the matching one: pip install 'rp-transfer[cuda{wanted}]'"
        )
