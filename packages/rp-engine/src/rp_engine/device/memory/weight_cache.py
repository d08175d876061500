"""Weights that stay on a device from call to call while nothing writes them, as far as its memory allows."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from rp_optim.jobs import Outcome
from rp_state.block import Block
from rp_state.layers import LayerState
from rp_transfer import Device, Event, MemoryUse, Retainer

from rp_engine.device.memory.graph_store import GraphStore
from rp_engine.runtime.lane import Lane
from rp_engine.runtime.launcher import wait_until
from rp_engine.runtime.runtime import Runtime

# What kernels take beside torch's allocator, and what its holes waste, is not seen.
_USABLE = 0.92
# A task that brings weights brings this share of it at most.
_STAGE_SHARE = 1 / 32
# Weights are there of the task that runs, of the next one, and of two that the device has not passed yet.
_IN_FLIGHT = 4

Arriving = tuple[torch.Tensor, Outcome[Event]]


class WeightCache:
    """The weights on one device that a task finds there, and those of its own that stay. For the device's thread.

    This one finds and keeps none, as in an ordinary call: each task frees its weights. See `WeightsAhead` for some
    that have travelled before.

    `graphs`: those of calls that write state, which read the weights where they stay.
    """

    graphs = GraphStore(is_off=True)

    def stage_bytes(self, otherwise: float) -> float:
        """Return what one task should bring at most; `otherwise` if no weights stay."""
        return otherwise

    def begin(self, call: int, version: int) -> None:
        """Begin a call, if it has not begun. `call`: its number. `version`: of the weights that it reads."""

    def bring(self, nbytes: int) -> None:
        """Note that a task brings so many bytes."""

    def start(self) -> None:
        """Begin a task that has brought its weights."""

    def find(self, block: Block) -> Arriving | None:
        """Return a block's memory, (numel,), and the event after which it is readable; None if it is not there."""
        del block

    def is_ready(self, block: Block, memory: torch.Tensor) -> bool:
        """Whether the compute stream has waited for a block that is in this memory."""
        del block, memory
        return False

    def holds(self, block: Block) -> bool:
        """Whether a block is there. On any thread while no task runs."""
        del block
        return False

    def forget(self, block: Block) -> None:
        """Let the task that has written a block of buffers free it."""

    def keep(
        self, arrived: Mapping[Block, Arriving], num_layers: int, release: Callable[[Block, torch.Tensor], None]
    ) -> Set[Block]:
        """Choose which blocks of a task that is over stay; return these. The others are the task's to free.

        `num_layers`: how many layers it ran. `release`: points the layers' tensors elsewhere if they are in this
        memory.
        """
        del arrived, num_layers, release
        return frozenset()

    def make_room(self, state: float, work: float) -> None:
        """Let weights go for the state of the present call to become so many times as large, and layers' work."""


NO_WEIGHT_CACHE = WeightCache()


@dataclass(slots=True)
class _CachedBlock:
    memory: torch.Tensor
    arrived: Outcome[Event]
    release: Callable[[Block, torch.Tensor], None]


class DeviceWeightCache(WeightCache):
    """Keeps what fits beside everything else on the device, the first layers' weights before the last ones'.

    So the later ones are on their way while the first ones run. What else there is comes first: state that layers
    write, such as keys and values, what they work in, and the caller's own work between the calls. All of it
    is measured, call by call, and weights leave before it needs their memory.

    `usable_bytes`: of the device. `total_bytes`: of the weights of its layers, `sizes` of each. `stage_bytes`:
    what a task brings at most, or a single layer.
    """

    def __init__(
        self,
        device: Device,
        retainer: Retainer,
        usable_bytes: int,
        total_bytes: int,
        sizes: Sequence[int],
        stage_bytes: int,
    ) -> None:
        self.graphs = GraphStore()
        self._stage_bytes = stage_bytes
        self._device = device
        self._retainer = retainer
        self._usable_bytes = usable_bytes
        self._total_bytes = total_bytes
        self._num_layers = len(sizes)
        stages = [max(size, stage_bytes) for size in sizes]
        # What passes through if not all of them stay.
        self._passing_bytes = max((sum(stages[at : at + _IN_FLIGHT]) for at in range(len(stages))), default=0)
        self._blocks: dict[Block, _CachedBlock] = {}
        self._call = self._version = -1
        # How many layers of the present call have run, and the bytes beside weights as it began.
        self._num_done = self._base_bytes = 0
        # From one call's beginning to the next one's.
        self._growth_bytes = 0
        self._start_bytes = self._start_coming_bytes = 0
        # Above `_start_bytes`, in use as a task begins: by tasks, or by the caller's own work between calls.
        self._peak_bytes = self._last_peak_bytes = 0
        # Bytes that tasks bring, and memory that is freed once nothing uses it.
        self._coming_bytes = 0
        self._leaving: list[weakref.ref[torch.Tensor]] = []

    # See `WeightCache`

    def stage_bytes(self, otherwise: float) -> float:
        """Return the share of a task."""
        del otherwise
        return self._stage_bytes

    def begin(self, call: int, version: int) -> None:
        """Begin a call; new weights replace those that are kept."""
        if call == self._call:
            return
        if version != self._version:
            self.clear()
        is_first = self._call < 0
        self._call, self._version = call, version
        self._num_done = self._coming_bytes = 0
        use = self._memory()
        base = self._other_bytes(use)
        if not is_first:
            # A prompt's call takes much more than those of the tokens after it.
            self._last_peak_bytes, self._peak_bytes = self._peak_bytes, use.peak_bytes - self._start_bytes
            self._growth_bytes = max(base - self._base_bytes, 0)
        self._base_bytes = base

    def bring(self, nbytes: int) -> None:
        """Note that a task brings so many bytes."""
        self._coming_bytes += nbytes

    def start(self) -> None:
        """Begin a task: what it takes beside its weights is measured."""
        self._measure_from_now()

    def find(self, block: Block) -> Arriving | None:
        """Return a block that is there."""
        if block not in self._blocks:
            return None
        cached = self._blocks[block]
        return cached.memory, cached.arrived

    def is_ready(self, block: Block, memory: torch.Tensor) -> bool:
        """Return whether it is there: the task that has brought it has waited."""
        return block in self._blocks and self._blocks[block].memory is memory

    def holds(self, block: Block) -> bool:
        """Return whether it is there."""
        return block in self._blocks

    def forget(self, block: Block) -> None:
        """Remove a block that the present task has found here or has brought, and will free."""
        self._blocks.pop(block, None)

    def keep(
        self, arrived: Mapping[Block, Arriving], num_layers: int, release: Callable[[Block, torch.Tensor], None]
    ) -> Set[Block]:
        """Keep all blocks of a task, then let the last layers' go until all else fits."""
        use = self._memory()
        # Without what the next task has brought meanwhile.
        taken = use.peak_bytes - self._start_bytes - (self._coming_bytes - self._start_coming_bytes)
        self._peak_bytes = max(self._peak_bytes, taken)
        self._num_done += num_layers
        brought = {block: found for block, found in arrived.items() if not self.is_ready(block, found[0])}
        self._coming_bytes -= sum(block.nbytes for block in brought)
        # Another task may have brought a block that they share.
        new = {block: found for block, found in brought.items() if block not in self._blocks}
        for block, (memory, event) in new.items():
            self._blocks[block] = _CachedBlock(memory, event, release)
        excess = self._kept_bytes() - self._room_bytes(use)
        for block in sorted(self._blocks, key=_first_user, reverse=True) if excess > 0 else ():
            if excess <= 0:
                break
            excess -= block.nbytes
            if block in new:
                # The task itself frees it.
                self._note_leaving(self._blocks.pop(block).memory)
            else:
                self._drop([block])
        # What the caller takes until the next call is measured, too.
        self._measure_from_now()
        return {block for block, (memory, _) in arrived.items() if self.is_ready(block, memory)}

    def make_room(self, state: float, work: float) -> None:
        """Let all weights go unless there is room: what the next calls take has not been measured."""
        use = self._memory()
        made = max(self._other_bytes(use) - self._base_bytes, 0)
        self._peak_bytes = int(self._peak_bytes * max(work, 1))
        # And for what the next calls add, whose layers write as they work.
        growth = int(made * (state - 1 + 2 * work))
        if self._kept_bytes() > self._room_bytes(use) - growth:
            self.clear()

    def _measure_from_now(self) -> None:
        # After what is free was freed: its memory would count as the next task's peak.
        self._retainer.flush()
        self._device.reset_peak_memory()
        self._start_bytes, self._start_coming_bytes = self._device.memory().used_bytes, self._coming_bytes

    def _room_bytes(self, use: MemoryUse) -> int:
        """How many bytes of weights may stay until the next call is over."""
        others = self._other_bytes(use)
        # What stays of the layers that have run will stay of the others, too.
        left = self._num_layers - self._num_done
        coming = max(others - self._base_bytes, 0) * left // self._num_done if self._num_done else 0
        room = self._usable_bytes - others - coming - 2 * self._growth_bytes
        room -= max(self._peak_bytes, self._last_peak_bytes)
        return room if self._total_bytes <= room else room - self._passing_bytes

    def _memory(self) -> MemoryUse:
        self._retainer.flush()
        return self._device.memory()

    def _other_bytes(self, use: MemoryUse) -> int:
        return use.used_bytes - self._kept_bytes() - self._coming_bytes - self._leaving_bytes()

    def _kept_bytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def _leaving_bytes(self) -> int:
        # Not by events: one may happen before what it was recorded for is freed.
        there = [memory for each in self._leaving if (memory := each()) is not None]
        self._leaving = list(map(weakref.ref, there))
        return sum(memory.nbytes for memory in there)

    def _note_leaving(self, memory: torch.Tensor) -> None:
        self._leaving.append(weakref.ref(memory))

    def _drop(self, blocks: Iterable[Block]) -> None:
        if self.graphs.has_any:
            # They know where the weights are, and one may be running.
            self._device.synchronize()
            self.graphs.lose()
        for block in blocks:
            cached = self._blocks.pop(block)
            cached.release(block, cached.memory)
            self._retainer.keep(self._device.compute.record(), cached.memory)
            self._note_leaving(cached.memory)

    def clear(self) -> None:
        """Free all of them, and the graphs that read them, once what uses them is over."""
        self._drop(list(self._blocks))
        self.graphs.clear()


@contextmanager
def keeping(runtime: Runtime, layers: Sequence[Sequence[LayerState]]) -> Generator[tuple[WeightCache, ...]]:
    """Let weights stay on the devices inside the context; yields those of each device, and frees them at its end.

    `layers`: those that run on each device.

    They are those of the first call inside until the model's version changes. A task for which memory is short
    takes theirs.
    """
    found = tuple(_opened(lane, runtime, own) for lane, own in zip(runtime.lanes, layers, strict=True))
    pairs = list(zip(runtime.lanes, found, strict=True))
    for lane, kept in pairs:
        lane.reserves.append(kept.clear)
    try:
        yield found
    except Exception:
        runtime.launch(partial(_close, pairs))
        raise
    except BaseException:
        # Such as Ctrl-C: a layer may go on, and nobody waits for that.
        runtime.launch_later(partial(_close, pairs))
        raise
    else:
        runtime.launch(partial(_close, pairs))


def _opened(lane: Lane, runtime: Runtime, layers: Sequence[LayerState]) -> DeviceWeightCache:
    use = lane.device.memory()
    usable = int(lane.device.obtainable_bytes() * _USABLE)
    if not use.is_complete:
        # Of devices that take the host's memory: half of what is free.
        usable = use.used_bytes + runtime.host_limit().free_bytes // (2 * len(runtime.lanes))
    sizes = [bytes_to_bring([layer]) for layer in layers]
    return DeviceWeightCache(
        lane.device, lane.retainer, usable, bytes_to_bring(layers), sizes, int(usable * _STAGE_SHARE)
    )


def _close(pairs: Sequence[tuple[Lane, DeviceWeightCache]]) -> None:
    for outcome in [lane.do(partial(_end, lane, kept)) for lane, kept in pairs]:
        wait_until(outcome.wait)
        outcome.result()


def _end(lane: Lane, kept: DeviceWeightCache) -> None:
    lane.reserves.remove(kept.clear)
    kept.clear()
    lane.retainer.drain()
    # What the calls took is no peak of others, for which plans leave room.
    lane.device.reset_peak_memory()


def bytes_to_bring(layers: Iterable[LayerState], kept: WeightCache = NO_WEIGHT_CACHE) -> int:
    """Return the bytes of the weights of some layers without those that are kept."""
    blocks = dict.fromkeys(block for layer in layers for block in layer.blocks)
    return sum(block.nbytes for block in blocks if not kept.holds(block))


def _first_user(block: Block) -> int:
    return min(block.users)
