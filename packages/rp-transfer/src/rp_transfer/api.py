"""The protocols that a device backend implements: `Backend`, `Device`, `Stream`, `Event` and `Graph`.

A backend owns devices; a device owns five streams. Each stream runs its work in order, and independently of other
streams unless it waits for an event of theirs. A graph is captured work of `compute`, launched again by one call.
`rp_transfer.testing` checks that a backend keeps these promises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch

from rp_transfer.memory.blocks import Layout

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of one device, in bytes.

    `is_complete`: whether what torch operations allocate is counted.

    >>> MemoryUse(name="cpu:0", used_bytes=3, peak_bytes=5, total_bytes=8).used_bytes
    3
    """

    name: str
    used_bytes: int
    peak_bytes: int
    total_bytes: int
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class HostUse:
    """Host memory allocated and pinned by a backend, in bytes.

    `used_bytes`: allocated now, including idle pooled buffers; `peak_bytes`: their maximum. `pinned_bytes`: pinned
    now, in whole pages, including registered storages. `total_bytes`: the machine's memory.

    >>> HostUse(used_bytes=100, peak_bytes=200, pinned_bytes=4096, total_bytes=1 << 20).pinned_bytes
    4096
    """

    used_bytes: int
    peak_bytes: int
    pinned_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Abilities:
    """What devices of one kind do in their own way. Code asks this instead of which kind they are.

    `computes_on_host`: computing takes the host's cores, and the time of the thread that launches. Then launching
    cannot be measured apart, and what is searched for beside a call slows it. `repeats_exactly`: an operation on
    the same values gives the same bits. `rounds_fp32`: products of fp32 numbers round them first (TF32) if torch
    allows it. `pools_host_memory`: short-lived memory from `Backend.host_empty` comes from a pool that grows.
    `captures_graphs`: `Device.capture` is there.

    >>> from rp_transfer import CpuBackend
    >>> CpuBackend().abilities.repeats_exactly
    True
    """

    computes_on_host: bool
    repeats_exactly: bool
    rounds_fp32: bool
    pools_host_memory: bool
    captures_graphs: bool


@runtime_checkable
class Event(Protocol):
    """A point in a stream's work. Any thread may query it or wait for it."""

    def query(self) -> bool:
        """Return whether the work before the event has finished. Never blocks."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until the work before the event has finished."""
        ...

    def seconds_since(self, earlier: Event) -> float:
        """Return the seconds from `earlier` to this event on the device's clock. Both must be timed and finished.

        Raises `ValueError` if one of them was not recorded with ``timed=True``.
        """
        ...


class Stream(Protocol):
    """A queue of work on one device, run in order. Any thread may enqueue; each call is atomic."""

    @property
    def name(self) -> str:
        """The device and the stream, such as ``cpu:0/weights_in``."""
        ...

    def wait(self, event: Event) -> None:
        """Make all later work of this stream start after `event`. Does not block the calling thread."""
        ...

    def record(self, *, timed: bool = False) -> Event:
        """Record an event after all work enqueued so far; a `timed` one also stores when that work finished."""
        ...

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy of raw bytes: same dtype and element count, both contiguous.

        The copy is invisible to autograd and to torch's modes. It does not keep the tensors alive: the caller
        retains both until an event recorded after the copy has finished.
        """
        ...

    def copy_part(self, destination: torch.Tensor, source: torch.Tensor, part: range) -> None:
        """Enqueue the copy of a part of two flat tensors that `copy` would accept: the same elements of both.

        For copies in many parts, which are then checked once, by the caller: nothing is checked here, and a part
        that is no range of step 1 inside of both overruns memory. Virtual devices raise `ValueError` for it.
        """
        ...

    def cast(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a conversion to the destination's dtype. Both tensors are on this device; else as `copy`."""
        ...

    def touch(
        self, *, read: Iterable[torch.Tensor] = (), write: Iterable[torch.Tensor] = (), what: str = ""
    ) -> None:
        """Declare that torch operations now enqueued on this stream use these tensors.

        Backends that check order raise `Unordered` here; others do nothing.
        """
        ...


class Capture(Protocol):
    """What a body is given while it is captured."""

    def drawing(self, place: int) -> AbstractContextManager[object]:
        """Return a context in which operations may draw random numbers, in replays from the seed of this place.

        A place may be entered again, and goes on where it was. Raises `ValueError` for one that was not asked for.
        """
        ...


class Graph(Protocol):
    """Captured work of a device's compute stream. Used by the device's thread."""

    def replay(self, seeds: Sequence[int] = ()) -> None:
        """Enqueue the work on `compute`, with what its memory then holds. `seeds`: one for each place to draw at.

        With the device's generator seeded so before each place, its operations would give the same bits. No
        version counter moves, no hook runs, and the device's generator stays as it is. What the body returned
        holds new values afterwards; those of graphs that were captured later into the same pool are lost.
        The first replay raises `NotCapturable` if the body draws elsewhere; what it enqueued is then useless.
        """
        ...

    def close(self) -> None:
        """Free the graph. Its memory is free once none of its tensors is left. May be called twice."""
        ...


class GraphPool(Protocol):
    """Device memory of graphs that never run at once. It holds what their bodies allocate."""

    @property
    def nbytes(self) -> int:
        """The bytes that the pool holds now."""
        ...


class Device(Protocol):
    """One accelerator, real or virtual."""

    @property
    def name(self) -> str:
        """The kind and the index, such as ``cuda:1`` or ``cpu:0``."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """The torch device of this device's tensors."""
        ...

    @property
    def compute(self) -> Stream:
        """The stream of torch operations inside `computing`."""
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
        """Make this device current for the calling thread. A worker thread calls this once, before any work."""
        ...

    def computing(self) -> AbstractContextManager[object]:
        """Return a context in which torch operations of the calling thread run on `compute`."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, stream: Stream) -> torch.Tensor:
        """Allocate device memory owned by `stream`, which may reuse the memory once the tensor is freed.

        Before the tensor is freed, uses on other streams must have finished, or `stream` must wait for them.
        """
        ...

    def generator(self) -> torch.Generator:
        """Return the default random generator of torch operations on this device."""
        ...

    def memory(self) -> MemoryUse:
        """Return the used, peak and total bytes of this device."""
        ...

    def obtainable_bytes(self) -> int:
        """Return how many bytes this process could use at once now, which excludes memory that others use."""
        ...

    def reset_peak_memory(self) -> None:
        """Set the peak to the bytes in use."""
        ...

    def synchronize(self) -> None:
        """Block until all work on the five streams has finished."""
        ...

    def release_unused(self) -> None:
        """Return cached, unused memory to the device, so that other allocators can have it.

        A backend may also switch to an allocation strategy that fragments later allocations less.
        """
        ...

    def graph_pool(self) -> GraphPool:
        """Return a new pool for graphs of this device."""
        ...

    def capture(
        self, body: Callable[[Capture], _Result], *, pool: GraphPool, num_draws: int = 0
    ) -> tuple[_Result, Graph]:
        """Capture the torch operations of a body, called inside `computing()`; return its result and the graph.

        Nothing of it has run then: what the body wrote is as before, and what it returned has no values. Memory
        from before that it uses must be there, with other contents, in each replay: parameters, inputs, sums. Its
        graph of autograd is Python's alone, so backward belongs into the body, or into one captured later.
        A body has run before, as it is: libraries open what they need in first calls, which no capture allows.
        `num_draws`: how many places it draws at, see `Capture.drawing`. Meanwhile other threads may use all of the
        device but `compute`.

        Raises `NotCapturable` with a reason if the body reads values of the device on the host, waits for the
        device, draws elsewhere, or raises an error of its own, which is its cause; `torch.OutOfMemoryError` if
        memory runs out. The device is then as before.

        >>> from rp_transfer import CpuBackend
        >>> device = CpuBackend(1).devices[0]
        >>> x = torch.tensor([1.0, 2.0])
        >>> with device.computing():
        ...     double, graph = device.capture(lambda capture: x * 2, pool=device.graph_pool())
        ...     _ = x.fill_(21.0)
        ...     graph.replay()
        >>> double
        tensor([42., 42.])
        """
        ...


class Backend(Protocol):
    """Devices of one kind, and pinned host memory for copies from and to them."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices, in the requested order."""
        ...

    @property
    def abilities(self) -> Abilities:
        """What the devices do in their own way."""
        ...

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype, *, short_lived: bool = False) -> torch.Tensor:
        """Allocate pinned host memory of exactly this size; unpinned memory where pinning is refused.

        `short_lived` memory may come from a pool of buffers, and returns to it when freed.
        """
        ...

    def host_blocks(self, layouts: Sequence[Layout]) -> Iterator[torch.Tensor]:
        """Allocate a block of host memory, (numel,), for each layout, when the iterator reaches it.

        So a model can move into its blocks one by one, without being in memory twice. Small blocks share pages.
        """
        ...

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether copies from and to this host tensor are asynchronous and at full speed."""
        ...

    def host_touch(
        self, *, read: Iterable[torch.Tensor] = (), write: Iterable[torch.Tensor] = (), what: str = ""
    ) -> None:
        """Declare that the calling thread now uses these host tensors; checked like `Stream.touch`."""
        ...

    def register(self, tensors: Iterable[torch.Tensor]) -> object:
        """Pin the tensors' existing storages in place for as long as the returned object lives.

        That object keeps the storages alive. Where pinning is refused they stay unpinned; `is_pinned` tells.
        """
        ...

    def host_memory(self) -> HostUse:
        """Return the bytes of host memory allocated and pinned through this backend, and the machine's total."""
        ...

    def close(self) -> None:
        """Release streams and pooled memory. Work that nothing waited for may be dropped. May be called twice."""
        ...
