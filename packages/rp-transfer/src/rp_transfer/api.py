"""The seam between the engine and a kind of device: what a backend must provide.

A backend owns devices; a device owns five streams. Streams run their work in order, and independently of each
other unless one waits for an event of another. `rp_transfer.testing` checks that a backend keeps these promises.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from rp_transfer.memory.blocks import Layout


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of one device, in bytes.

    >>> MemoryUse(name="cpu:0", used_bytes=3, peak_bytes=5, total_bytes=8).used_bytes
    3
    """

    name: str
    used_bytes: int
    peak_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class HostUse:
    """Host memory that a backend gave, and all that it pinned, in bytes.

    `used_bytes` were given (idle buffers for later calls included), at most `peak_bytes` at once; `pinned_bytes`
    of the machine's `total_bytes` are locked for the devices, registered storages included, in whole pages.

    >>> HostUse(used_bytes=100, peak_bytes=200, pinned_bytes=4096, total_bytes=1 << 20).pinned_bytes
    4096
    """

    used_bytes: int
    peak_bytes: int
    pinned_bytes: int
    total_bytes: int


@runtime_checkable
class Event(Protocol):
    """A point in a stream's work. Any thread may ask for it."""

    def query(self) -> bool:
        """Whether the work before the event has finished. Never blocks."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until the work before the event has finished."""
        ...

    def seconds_since(self, earlier: Event) -> float:
        """Time from `earlier` to this event, on the device's clock; both recorded as timed, and over.

        Raises `ValueError` where one of them was not timed.
        """
        ...


class Stream(Protocol):
    """A queue of work on one device, run in order. Any thread may put work on it; each call is whole."""

    @property
    def name(self) -> str:
        """Such as ``cpu:0/weights_in``."""
        ...

    def wait(self, event: Event) -> None:
        """Work put on this stream from now on starts after `event`. Does not block the calling thread."""
        ...

    def record(self, *, timed: bool = False) -> Event:
        """An event after all the work put on this stream so far; a `timed` one knows when that was over."""
        ...

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a move of raw bytes: same dtype and element count, both contiguous.

        The move is invisible to autograd and to torch's modes. It does not keep the tensors alive: whoever
        queues it retains both until an event recorded after it has finished.
        """
        ...

    def cast(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a conversion to the destination's dtype, between tensors of this device, as `copy` otherwise."""
        ...

    def touch(
        self, *, read: Iterable[torch.Tensor] = (), write: Iterable[torch.Tensor] = (), what: str = ""
    ) -> None:
        """Declare that work now put on this stream by other means (torch operations) uses these tensors.

        Backends that check order raise `Unordered` here; others do nothing.
        """
        ...


class Device(Protocol):
    """One accelerator, or one virtual one."""

    @property
    def name(self) -> str:
        """Such as ``cuda:1`` or ``cpu:0``."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of this device live for torch."""
        ...

    @property
    def compute(self) -> Stream:
        """The stream that torch operations run on inside `computing`."""
        ...

    @property
    def weights_in(self) -> Stream:
        """The stream for weights from the host."""
        ...

    @property
    def activations_in(self) -> Stream:
        """The stream for activations and gradients of activations from the host."""
        ...

    @property
    def results_out(self) -> Stream:
        """The stream for activations and other results to the host."""
        ...

    @property
    def gradients_out(self) -> Stream:
        """The stream for gradients of weights to the host."""
        ...

    def attach_thread(self) -> None:
        """Make this device current for the calling thread. A worker thread calls it once, before any work."""
        ...

    def computing(self) -> AbstractContextManager[None]:
        """Within it, torch operations of the calling thread run on `compute`."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, stream: Stream) -> torch.Tensor:
        """Device memory that `stream` owns: it is free for other use of `stream` as soon as the tensor is gone.

        So other streams' uses must be waited for by `stream`, or be known to have finished, before that.
        """
        ...

    def generator(self) -> torch.Generator:
        """The default random generator of operations on this device."""
        ...

    def memory(self) -> MemoryUse:
        """Used, peak and total bytes of this device."""
        ...

    def reset_peak_memory(self) -> None:
        """Forget the peak seen so far."""
        ...

    def synchronize(self) -> None:
        """Block until everything put on the five streams has finished."""
        ...


class Backend(Protocol):
    """Devices of one kind, and host memory that they copy from and to at full speed."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices, in the order in which they were asked for."""
        ...

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype, *, short_lived: bool = False) -> torch.Tensor:
        """Host memory for asynchronous copies, to the byte; plain memory where none can be pinned.

        `short_lived` memory may come from a pool of buffers of the same size and goes back to it.
        """
        ...

    def host_blocks(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        """One block of host memory, (numel,), for each layout; small ones share pages."""
        ...

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether devices copy from and to this host tensor at full speed, without the calling thread."""
        ...

    def host_touch(
        self, *, read: Iterable[torch.Tensor] = (), write: Iterable[torch.Tensor] = (), what: str = ""
    ) -> None:
        """Declare that the calling thread itself now uses these host tensors; checked like `Stream.touch`."""
        ...

    def register(self, tensors: Iterable[torch.Tensor]) -> object:
        """Pin the storages that these tensors have already, for as long as the returned object lives.

        That object keeps the storages. What cannot be pinned stays as it is; `is_pinned` tells.
        """
        ...

    def host_memory(self) -> HostUse:
        """Host memory taken through this backend, and all there is."""
        ...

    def close(self) -> None:
        """Give everything back. Work not waited for is dropped. May be called twice."""
        ...
