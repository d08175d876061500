"""The seam between the engine and a kind of device: what a backend must provide.

A backend owns devices; a device owns four streams. Streams run their work in order, and independently of each
other unless one waits for an event of another. `rp_transfer.testing` checks that a backend keeps these promises.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of one device, or of the host, in bytes.

    >>> MemoryUse(name="cpu:0", used_bytes=3, peak_bytes=5, total_bytes=8).used_bytes
    3
    """

    name: str
    used_bytes: int
    peak_bytes: int
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


class Stream(Protocol):
    """A queue of work on one device, run in order. One thread at a time puts work on it."""

    @property
    def name(self) -> str:
        """Such as ``cpu:0/weights_in``."""
        ...

    def wait(self, event: Event) -> None:
        """Work put on this stream from now on starts after `event`. Does not block the calling thread."""
        ...

    def record(self) -> Event:
        """An event after all the work put on this stream so far."""
        ...

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a move of raw bytes: same dtype and element count, both contiguous.

        The move is invisible to autograd and to torch's modes. It does not keep the tensors alive: whoever
        queues it retains both until an event recorded after it has finished.
        """
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
        """The stream for everything that goes to the host."""
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
        """Block until everything put on the four streams has finished."""
        ...


class Backend(Protocol):
    """Devices of one kind, and host memory that they copy from and to at full speed."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices, in the order in which they were asked for."""
        ...

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype, *, short_lived: bool = False) -> torch.Tensor:
        """Host memory for asynchronous copies, to the byte.

        `short_lived` memory may come from a pool of buffers of the same size and goes back to it.
        """
        ...

    def host_touch(
        self, *, read: Iterable[torch.Tensor] = (), write: Iterable[torch.Tensor] = (), what: str = ""
    ) -> None:
        """Declare that the calling thread itself now uses these host tensors; checked like `Stream.touch`."""
        ...

    def register(self, tensor: torch.Tensor) -> None:
        """Pin the host memory that `tensor` has already, for as long as its storage lives."""
        ...

    def host_memory(self) -> MemoryUse:
        """Host memory taken through `host_empty`, and all there is."""
        ...

    def close(self) -> None:
        """Give everything back. Work not waited for is dropped. May be called twice."""
        ...
