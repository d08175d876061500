"""Where graphs of a task have its weights and sums of gradients, and whether there is room for that."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from rp_sched import Task
from rp_state.block import Block
from rp_state.gradient import sum_dtype
from rp_transfer import GraphPool, NotCapturable

from rp_engine.device.memory.graph_store import NOT_FIXED, FixedBlock, GraphStore, WeightSlot
from rp_engine.device.weights import Weights
from rp_engine.execution.stage.task_context import TaskContext


class NoRoom(NotCapturable):
    """Device memory is too short for graphs."""


def graphs_of(place: TaskContext, task: Task) -> GraphStore:
    """The graphs of a task: of calls that write state, those that read weights where they stay meanwhile."""
    return place.call.kept(task.device).graphs if place.call.holds_state else place.twins.graphs


class TaskGraphMemory:
    """The memory of one task's graphs, whose addresses stay: slots for its weights, and pools."""

    def __init__(self, place: TaskContext, task: Task, weights: Weights) -> None:
        self._call = place.call
        self._device = place.lane.device
        self._store = graphs_of(place, task)
        self._weights = weights
        self._layers = task.layers
        # Tasks that add gradients keep activations for that.
        self._trains = task.adds_gradients
        self._slots = self._store.memory_of(())

    def begin(self) -> None:
        """Have the task's weights and sums lie where graphs that are there read them, as the task begins."""
        self._slots = self._store.memory_of(self.blocks(self._layers))
        self._weights.use_fixed(self._slots.fixed)

    def forget(self) -> None:
        """Let what follows lie elsewhere: graphs are there no longer."""
        self._slots.fixed.clear()

    def blocks(self, layers: range) -> list[Block]:
        """The blocks of some layers, those that several have once."""
        return list(dict.fromkeys(block for layer in layers for block in self._call.state.layers[layer].blocks))

    def forms(self, layers: range) -> Hashable:
        """In which slots the weights of some layers lie, and which have come as codes."""
        return tuple((block in self._call.coded, slot) for block, slot in self.slots(layers).items())

    def stays(self, layer: int) -> bool:
        """Whether a layer's weights can be where graphs read them."""
        del layer
        return True

    def slots(self, layers: range) -> dict[Block, WeightSlot]:
        """Where the weights of some layers lie."""
        return {block: self._slots.slots[block] for block in self.blocks(layers)}

    def pool(self, place: int) -> GraphPool:
        """The pool of a place of layers in the task."""
        if place not in self._store.pools:
            self._store.pools[place] = self._device.graph_pool()
        return self._store.pools[place]

    def taken_bytes(self, layers: range) -> int:
        """The bytes that a run of these layers takes beside their weights, by what was measured."""
        return self._call.taken_bytes(layers if self._trains else range(0))

    def fix(self, layers: range, nbytes: int) -> None:
        """Wait for the weights of these layers, and have them where graphs read them.

        `nbytes`: what follows takes beside them. Raises `NoRoom` where memory is short.
        """
        blocks = self.blocks(layers)
        self._check_room(nbytes + sum(map(self._missing_bytes, blocks)))
        for block in blocks:
            self._slots.fix(block, self._fixed(block))
        self._store.graphed.update(blocks)
        for layer in layers:
            self._weights.bind(self._call.state.layers[layer], training=self._trains)
        if self._trains:
            # Now: a graph must not zero them. Those that a layer before has had made may lie elsewhere.
            self._weights.sums.make()
            self._weights.sums.begin_again()

    def _check_room(self, needed: int) -> None:
        # Only graphs use what pools hold.
        room = self._device.obtainable_bytes() - self._device.memory().used_bytes - self._store.pool_bytes
        if room < needed:
            raise NoRoom(f"{needed / 1e9:.1f} GB of device memory are not free, but {room / 1e9:.1f}")

    def _fixed(self, block: Block) -> FixedBlock:
        before, stream = self._slots.fixed.get(block, NOT_FIXED), self._device.compute
        numel, dtype = self._form(block)
        memory, sums = before.of(dtype), before.sums
        if memory is None:
            memory = self._device.empty((numel,), dtype, stream=stream)
        if sums is None and self._adds_to(block):
            sums = self._device.empty((block.layout.numel,), sum_dtype(block.layout.dtype), stream=stream)
        return FixedBlock({**before.memory, dtype: memory}, sums)

    def _missing_bytes(self, block: Block) -> int:
        before = self._slots.fixed.get(block, NOT_FIXED)
        numel, dtype = self._form(block)
        memory = 0 if before.of(dtype) is not None else numel * dtype.itemsize
        makes_sums = before.sums is None and self._adds_to(block)
        return memory + (block.layout.numel * sum_dtype(block.layout.dtype).itemsize if makes_sums else 0)

    def _form(self, block: Block) -> tuple[int, torch.dtype]:
        return block.form(coded=block in self._call.coded)

    def _adds_to(self, block: Block) -> bool:
        return self._trains and block.kind == "trainable"


class KeptGraphMemory(TaskGraphMemory):
    """The memory of graphs of a task that writes state: they read its weights where these stay for later calls."""

    def begin(self) -> None:
        """Nothing moves."""

    def forms(self, layers: range) -> Hashable:
        """Where the weights of some layers are."""
        return tuple(self._weights.place_of(block) for block in self.blocks(layers))

    def slots(self, layers: range) -> dict[Block, WeightSlot]:
        """None: nothing is made for their weights."""
        del layers
        return {}

    def stays(self, layer: int) -> bool:
        """Whether a layer's weights are there, and have stayed from the call before."""
        return all(map(self._weights.stays, self.blocks(range(layer, layer + 1))))

    def fix(self, layers: range, nbytes: int) -> None:
        """Bind the weights of these layers. Raises `NoRoom` where memory is short for what follows."""
        self._check_room(nbytes)
        for layer in layers:
            self._weights.bind(self._call.state.layers[layer], training=False)
