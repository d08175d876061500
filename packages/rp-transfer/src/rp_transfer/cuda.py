"""CUDA devices: CuPy's streams, events, pinned memory and copies, shared with torch without copying.

The only file that imports CuPy.
"""

# CuPy has no type information, so its objects are unknown to the checker here and nowhere else.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingImports=false, reportUnknownParameterType=false

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import cupy
import torch

from rp_transfer.api import Event, MemoryUse, Stream
from rp_transfer.errors import BackendUnavailable, Closed
from rp_transfer.host import HostMemory, Slab

_PORTABLE = 1  # cudaHostAllocPortable, cudaHostRegisterPortable: pinned for every device
_ANY_DIRECTION = 4  # cudaMemcpyDefault: the addresses tell
_STREAMS = ("compute", "weights_in", "activations_in", "results_out")


class CudaEvent:
    """A point in a CUDA stream."""

    __slots__ = ("native",)

    def __init__(self, native: Any) -> None:
        self.native = native

    def query(self) -> bool:
        """Whether the work before it has finished."""
        return bool(self.native.done)

    def synchronize(self) -> None:
        """Block until it has, without holding Python's lock."""
        self.native.synchronize()


class CudaStream:
    """One CUDA stream, seen by CuPy and by torch. The thread of its device puts work on it."""

    def __init__(self, name: str, native: Any, torch_device: torch.device) -> None:
        self._name = name
        self.native = native
        self.torch_stream = torch.cuda.ExternalStream(native.ptr, device=torch_device)

    @property
    def name(self) -> str:
        """Such as ``cuda:0/weights_in``."""
        return self._name

    def wait(self, event: Event) -> None:
        """Order later work after `event`, of this device or another one."""
        if not isinstance(event, CudaEvent):
            raise TypeError(f"{self._name} must wait for a CUDA event, but got {event!r} instead")
        self.native.wait_event(event.native)

    def record(self) -> CudaEvent:
        """An event after everything put here so far."""
        native = cupy.cuda.Event(block=True, disable_timing=True)
        native.record(self.native)
        return CudaEvent(native)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue an asynchronous move of raw bytes."""
        nbytes = source.numel() * source.element_size()
        if destination.dtype != source.dtype or destination.numel() != source.numel():
            raise ValueError(
                f"a copy moves bytes between tensors of one dtype and size, but the destination is "
                f"{destination.dtype} {tuple(destination.shape)} "
                f"and the source {source.dtype} {tuple(source.shape)}"
            )
        if not (destination.is_contiguous() and source.is_contiguous()):
            raise ValueError("both tensors of a copy must be contiguous; call .contiguous() first")
        if nbytes:
            cupy.cuda.runtime.memcpyAsync(
                destination.data_ptr(), source.data_ptr(), nbytes, _ANY_DIRECTION, self.native.ptr
            )

    def touch(
        self, *, read: Iterable[torch.Tensor] = (), write: Iterable[torch.Tensor] = (), what: str = ""
    ) -> None:
        """Nothing to check: the virtual devices do."""


class CudaDevice:
    """One GPU and its four streams."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._name = f"cuda:{index}"
        self._torch_device = torch.device("cuda", index)
        # CuPy makes a stream on the current device only.
        with cupy.cuda.Device(index), torch.cuda.device(index):
            streams = [
                CudaStream(f"{self._name}/{name}", cupy.cuda.Stream(non_blocking=True), self._torch_device)
                for name in _STREAMS
            ]
        self.compute, self.weights_in, self.activations_in, self.results_out = streams
        self._torch_streams = {stream.native.ptr: stream.torch_stream for stream in streams}

    @property
    def name(self) -> str:
        """Such as ``cuda:1``."""
        return self._name

    @property
    def torch_device(self) -> torch.device:
        """The same device for torch."""
        return self._torch_device

    def attach_thread(self) -> None:
        """Make it the calling thread's device, for torch and for CuPy."""
        torch.cuda.set_device(self._index)
        cupy.cuda.Device(self._index).use()
        # Torch's backward thread of this device gets its context here; a matrix product first would make it warn.
        (torch.ones((), device=self._torch_device, requires_grad=True) * 1).backward()

    def computing(self) -> AbstractContextManager[None]:
        """Torch operations go to the compute stream."""
        return torch.cuda.stream(self.compute.torch_stream)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, stream: Stream) -> torch.Tensor:
        """Memory of torch's allocator that belongs to `stream`."""
        if not isinstance(stream, CudaStream):
            raise TypeError(f"memory of {self._name} must belong to one of its streams, but got {stream!r}")
        with torch.cuda.stream(stream.torch_stream):
            return torch.empty(tuple(shape), dtype=dtype, device=self._torch_device)

    def generator(self) -> torch.Generator:
        """The device's default generator."""
        return torch.cuda.default_generators[self._index]

    def memory(self) -> MemoryUse:
        """What torch's allocator has handed out, and what the card has."""
        total = torch.cuda.get_device_properties(self._index).total_memory
        used = torch.cuda.memory_allocated(self._index)
        return MemoryUse(self._name, used, torch.cuda.max_memory_allocated(self._index), total)

    def reset_peak_memory(self) -> None:
        """Forget the peak seen so far."""
        torch.cuda.reset_peak_memory_stats(self._index)

    def synchronize(self) -> None:
        """Block until the four streams are empty."""
        for stream in (self.weights_in, self.activations_in, self.results_out, self.compute):
            stream.native.synchronize()


def _pinned(device: int, nbytes: int) -> Slab:
    # Neither pool: CuPy's and torch's both round a block up, to a power of two at worst. And from a device that is
    # ours: the calling thread's current one would get a context, and memory, for nothing else.
    with cupy.cuda.Device(device):
        memory = cupy.cuda.PinnedMemory(nbytes, _PORTABLE)
    return int(memory.ptr), memory


def _unregister(address: int) -> None:
    cupy.cuda.runtime.hostUnregister(address)


class CudaBackend:
    """GPUs by index.

    Raises `BackendUnavailable` where CuPy cannot use the driver or was built for another major version of CUDA.
    """

    def __init__(self, indices: Sequence[int]) -> None:
        _check_versions()
        self._devices = tuple(CudaDevice(index) for index in indices)
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._host = HostMemory(partial(_pinned, indices[0]), total)
        self._closed = False

    @property
    def devices(self) -> tuple[CudaDevice, ...]:
        """The GPUs."""
        return self._devices

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype, *, short_lived: bool = False) -> torch.Tensor:
        """Pinned memory to the byte."""
        if self._closed:
            raise Closed("the CUDA backend was closed; open another one")
        return self._host.empty(shape, dtype, short_lived=short_lived)

    def host_touch(
        self, *, read: Iterable[torch.Tensor] = (), write: Iterable[torch.Tensor] = (), what: str = ""
    ) -> None:
        """Nothing to check: the virtual devices do."""

    def register(self, tensor: torch.Tensor) -> None:
        """Pin the storage of `tensor` where it is, until it is freed."""
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or tensor.is_pinned():
            return
        cupy.cuda.runtime.hostRegister(storage.data_ptr(), storage.nbytes(), _PORTABLE)
        weakref.finalize(storage, _unregister, storage.data_ptr())

    def host_memory(self) -> MemoryUse:
        """Pinned bytes."""
        return self._host.memory()

    def close(self) -> None:
        """Wait for the devices and free the pooled host memory."""
        if not self._closed:
            self._closed = True
            for device in self._devices:
                device.synchronize()
            self._host.clear()


def _check_versions() -> None:
    try:
        version = int(cupy.cuda.runtime.runtimeGetVersion())
    except Exception as error:
        raise BackendUnavailable(f"CuPy cannot use the CUDA driver: {error}") from error
    wanted = int((torch.version.cuda or "0").split(".")[0])
    if version // 1000 != wanted:
        raise BackendUnavailable(
            f"torch is built for CUDA {wanted} but CuPy for CUDA {version // 1000}; "
            f"install the matching one: pip install 'rp-transfer[cuda{wanted}]'"
        )
