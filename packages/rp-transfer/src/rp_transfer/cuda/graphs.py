"""Graphs of a GPU: CUDA graphs of what a body launches on one stream, replayed by one call without the GIL."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from rp_transfer.errors import Closed, NotCapturable, is_out_of_memory

_Result = TypeVar("_Result")


class CudaGraphPool:
    """Device memory that graphs share. See `rp_transfer.api.GraphPool`."""

    def __init__(self) -> None:
        self._anchors: list[tuple[Any, torch.cuda.CUDAGraph]] = []
        self.handle: Any = None

    def hold(self) -> None:
        """Have a pool, and keep it: torch fails where one is used again that has lost its last graph."""
        if self.handle is None:
            self.handle, anchor = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
            anchor.capture_begin(pool=self.handle, capture_error_mode="thread_local")
            torch.zeros(1, device="cuda")
            anchor.capture_end()
            self._anchors.append((self.handle, anchor))

    def give_up(self) -> None:
        """After a capture that broke: stop the allocator from serving it, and take another pool for the next one.

        To torch's allocator of pinned memory the broken capture goes on, so it refuses the same pool.
        """
        device = torch.cuda.current_device()
        torch._C._cuda_endAllocateToPool(device, self.handle)  # pyright: ignore
        torch._C._cuda_releasePool(device, self.handle)  # pyright: ignore
        self.handle = None

    @property
    def nbytes(self) -> int:
        """The bytes that the pool has taken from the GPU."""
        segments = [segment for handle, _ in self._anchors for segment in torch.cuda.memory_snapshot(handle)]
        return sum(segment["total_size"] for segment in segments)


class CudaGraph:
    """One CUDA graph, and a state of the device's generator for each place where it draws."""

    def __init__(
        self, native: torch.cuda.CUDAGraph, states: Sequence[torch.Generator], other: torch.Generator
    ) -> None:
        self._native: torch.cuda.CUDAGraph | None = native
        self._states = states
        # Until the first replay: the state for what draws elsewhere, which has no seed of its own.
        self._other: torch.Generator | None = other

    def replay(self, seeds: Sequence[int] = ()) -> None:
        """Launch the graph."""
        if self._native is None:
            raise Closed("this graph was closed; capture it again")
        if len(seeds) != len(self._states):
            raise ValueError(f"this graph draws at {len(self._states)} places, but got {len(seeds)} seeds")
        for state, seed in zip(self._states, seeds, strict=True):
            state.manual_seed(seed)
        self._native.replay()
        if self._other is not None:
            self._refuse_other_draws(self._other)

    def _refuse_other_draws(self, other: torch.Generator) -> None:
        if other.get_offset():
            raise NotCapturable("it draws random numbers outside of the places that were given for it")
        self._other = None

    def close(self) -> None:
        """Free the graph; its memory is free once no tensor of it is left."""
        if self._native is not None:
            self._native.reset()
            self._native = None


class CudaCapture:
    """A capture under way on the calling thread. See `rp_transfer.api.Capture`."""

    def __init__(self, generator: torch.Generator, num_draws: int) -> None:
        self._generator = generator
        self.states = [generator.clone_state() for _ in range(num_draws)]
        self.other = generator.clone_state()
        self.other.set_offset(0)

    @contextmanager
    def drawing(self, place: int) -> Generator[None]:
        """Let what is launched inside draw random numbers, in replays from the seed of this place."""
        if not 0 <= place < len(self.states):
            raise ValueError(f"a graph with {len(self.states)} places to draw at has no place {place}")
        with _state_of(self._generator, self.states[place]):
            yield


def capture(
    pool: CudaGraphPool, body: Callable[[CudaCapture], _Result], generator: torch.Generator, num_draws: int
) -> tuple[_Result, CudaGraph]:
    """Capture what a body launches on the current stream; nothing of it runs.

    Not by `torch.cuda.graph`, which waits for the device, collects garbage and empties the allocator's cache.
    """
    run = CudaCapture(generator, num_draws)
    native = torch.cuda.CUDAGraph()
    for state in run.states:
        native.register_generator_state(state)
    # Backward runs on autograd's thread, and other threads go on with other streams.
    with _no_collections(), _state_of(generator, run.other):
        pool.hold()
        native.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        try:
            result = body(run)
        except BaseException as error:
            # What broke the capture is told by the body's error.
            _end(native, pool)
            if not isinstance(error, Exception) or is_out_of_memory(error):
                raise
            raise NotCapturable(_words(error)) from error
        broken = _end(native, pool)
    if broken is not None:
        raise NotCapturable(_words(broken)) from broken
    return result, CudaGraph(native, run.states, run.other)


def _end(native: torch.cuda.CUDAGraph, pool: CudaGraphPool) -> Exception | None:
    try:
        native.capture_end()
    except RuntimeError as error:
        pool.give_up()
        return error
    return None


def _words(error: Exception) -> str:
    line = (str(error).splitlines() or [""])[0]
    if "stream is capturing" in line or "during capture" in line:
        return f"it reads values of the device on the host, or waits for the device ({line})"
    return f"{type(error).__name__}: {line}"


@contextmanager
def _state_of(generator: torch.Generator, state: torch.Generator) -> Generator[None]:
    """Let the device's generator be in a state that is another object, which a graph can be given seeds for."""
    before = generator.graphsafe_get_state()
    generator.graphsafe_set_state(state)
    try:
        yield
    finally:
        generator.graphsafe_set_state(before)


_LOCK = threading.Lock()
_num_captures = 0
_was_enabled = False


@contextmanager
def _no_collections() -> Generator[None]:
    """Keep Python from collecting garbage: what frees CUDA's objects breaks a capture on the same thread."""
    global _num_captures, _was_enabled
    with _LOCK:
        if not _num_captures:
            _was_enabled = gc.isenabled()
            gc.disable()
        _num_captures += 1
    try:
        yield
    finally:
        with _LOCK:
            _num_captures -= 1
            if not _num_captures and _was_enabled:
                gc.enable()
