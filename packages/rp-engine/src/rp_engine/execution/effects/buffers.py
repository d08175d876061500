"""The buffers of one task's layers: which of them layers write, and what a recomputation starts from."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rp_sched import Task
from rp_state.block import Block
from rp_transfer import is_out_of_memory
from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage] - of batch and instance norms

from rp_engine.device.activations import Origins, PacketCopier
from rp_engine.device.packet import Packet, Slot
from rp_engine.device.weights import Weights
from rp_engine.errors import AloneOnly, RoundPipeError
from rp_engine.execution.call import Call
from rp_engine.execution.effects.sampled_comparison import SampledComparison
from rp_engine.execution.shortage.task_slots import TaskSlots


class LayerBuffers:
    """Runs layers that have buffers, and keeps what these were before a microbatch that is recomputed."""

    def __init__(
        self,
        call: Call,
        task: Task,
        weights: Weights,
        copier: PacketCopier,
        slots: TaskSlots,
        sampled: SampledComparison,
    ) -> None:
        self._call = call
        self._task = task
        self._weights = weights
        self._copier = copier
        self._exchange = slots
        self._sampled = sampled
        self._buffered = {layer for layer in task.layers if call.state.layers[layer].has_buffers}
        # By layer: host copy of the buffers that its next microbatch starts from, if they were sent already.
        self._snapshots: dict[int, Packet] = {}

    def has(self, layer: int) -> bool:
        """Whether a layer has buffers."""
        return layer in self._buffered

    def run(
        self,
        layer: int,
        microbatch: int,
        body: Callable[[], Any],
        seeded: Callable[[Callable[[], Any]], Any],
        *,
        recomputes: bool,
    ) -> Any:
        """Run a layer. `seeded` runs what it is given, a second time if that drew random numbers unexpectedly.

        Raises `AloneOnly` or `ValueError` if the layer writes buffers that its microbatches cannot write in order,
        and `RoundPipeError` if only this call's cannot.
        """
        memories = self._weights.buffers(self._call.state.layers[layer])
        if recomputes:
            if (packet := self._exchange.fetch(Slot("buffers", layer, microbatch))) is not None:
                _set(memories.values(), self._copier.bring(packet))
            return seeded(body)
        before = {block: memory.clone() for block, memory in memories.items()}
        versions = self._weights.versions(memories)

        def from_the_start() -> Any:
            # A layer that draws from the CPU generator unexpectedly is run a second time: restore its buffers.
            _set(memories.values(), before.values())
            return body()

        try:
            output = seeded(from_the_start)
        except Exception as error:
            if is_out_of_memory(error):
                # The task may run again from these.
                _set(memories.values(), before.values())
            raise
        written = [
            block
            for block in memories
            if self._writes(layer, block, before[block], memories[block], versions[block])
        ]
        self._refuse(layer, written)
        if self._call.compares and microbatch == 0:
            for block in [block for block in memories if block not in written]:
                self._sampled.see_buffers(layer, block, before[block], memories[block])
        self._keep(layer, microbatch, written, list(before.values()))
        return output

    def values(self, layer: int) -> list[torch.Tensor]:
        """Copies of a layer's buffers."""
        memories = self._weights.buffers(self._call.state.layers[layer])
        return [memory.clone() for memory in memories.values()]

    @contextmanager
    def starting_from(self, layer: int, values: Sequence[torch.Tensor]) -> Generator[None]:
        """Give a layer's buffers these values within the context, for a run that leaves no trace.

        Also in version counters: the graph of another run may go on with these buffers.
        """
        memories = self._weights.buffers(self._call.state.layers[layer])
        now = [memory.clone() for memory in memories.values()]
        # Any: torch leaves it out of its public names.
        torch_autograd: Any = torch.autograd
        with torch_autograd._unsafe_preserve_version_counter(self._weights.tensors(memories)):
            _set(memories.values(), values)
            try:
                yield
            finally:
                _set(memories.values(), now)

    def _writes(
        self, layer: int, block: Block, before: torch.Tensor, after: torch.Tensor, versions: list[int]
    ) -> bool:
        # Batch norm writes its statistics past the version counters, so a layer's first run compares the values.
        if self._weights.versions((block,))[block] != versions:
            block.counts_writes = True
            return True
        if layer not in block.looked_at:
            block.looked_at.add(layer)
            differs = not torch.equal(before.view(torch.uint8), after.view(torch.uint8))
            if differs or _gathers_statistics(self._call.state.layers[layer].module):
                block.writes = True
            elif block.writes is None:
                block.writes = False
        return bool(block.writes)

    def _refuse(self, layer: int, written: Sequence[Block]) -> None:
        for block in written:
            self._refuse_divided(layer)
            self._refuse_apart(block)
            self._refuse_shared(layer, block)

    def _refuse_divided(self, layer: int) -> None:
        if self._call.is_divided:
            raise AloneOnly(
                f"{self._call.where(layer)} writes a buffer in forward, from one microbatch to the next, so "
                "several machines cannot divide the microbatches: let such layers write none (as batch norms in "
                "eval()), replace them, or train on one machine"
            )

    def _refuse_apart(self, block: Block) -> None:
        # A stage runs all microbatches before the next stage starts, so layers in different stages would write in
        # another order than in plain PyTorch. A planned stage may hold all these layers in one call, not in the
        # next.
        together = not self._call.is_planned and set(block.users) <= set(self._task.layers)
        if len(block.users) == 1 or self._call.num_microbatches == 1 or together:
            return
        users = sorted(block.users)
        span = f"layers {users[0]} to {users[-1]}"
        raise ValueError(
            f"layers {', '.join(map(str, users))} share a buffer that running them writes, so with "
            f"{self._call.num_microbatches} microbatches {span} must be in one stage; make {span} one layer of "
            "the row (an nn.Sequential), give each a buffer of its own, set num_microbatch=1, or pass an "
            "execute_plan that has them in one stage"
        )

    def _refuse_shared(self, layer: int, block: Block) -> None:
        if self._weights.turns[block].writes:
            return
        drop = "" if self._call.mode == "infer" else "drop this call's gradients (zero_grad) and "
        raise RoundPipeError(
            f"{self._call.where(layer)} wrote a buffer with persistent=False in forward that no earlier call had "
            f"written, while other tasks of this call read it; the write is not kept. To go on, {drop}make the "
            "call again: from now on such tasks run one after another. Buffers that other layers wrote in this "
            "call may stay as written. This cannot happen with persistent=True, or with an execute_plan without "
            "groups"
        )

    def _keep(self, layer: int, microbatch: int, written: Sequence[Block], before: Sequence[torch.Tensor]) -> None:
        for block in written:
            self._weights.note_written(block)
        if self._exchange.will_recompute(layer, microbatch):
            if layer not in self._snapshots:
                self._snapshots[layer] = self._copier.send(None, before, [False] * len(before), Origins())
            self._exchange.keep(Slot("buffers", layer, microbatch), self._snapshots[layer])
        for user in {user for block in written for user in block.users}:
            self._snapshots.pop(user, None)


def _gathers_statistics(module: nn.Module) -> bool:
    """Whether a norm in it may write its statistics in some later run, if it has not in the first one."""
    return any(isinstance(one, _NormBase) and one.training and one.track_running_stats for one in module.modules())


def _set(memories: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    with torch.no_grad():
        for memory, value in zip(memories, values, strict=True):
            memory.copy_(value)
