"""Report of the host and device memory that a model and its runtime use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rp_transfer import MemoryUse
from torch.optim import Optimizer

from roundpipe.runtime.runtime import Runtime
from roundpipe.state.model_state import Block, ModelState
from roundpipe.telemetry.tables import readable_bytes, table


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory in bytes, at one moment; prints as a table.

    On the host, of this model: `weights_bytes` (frozen and trained, including second copies), `buffers_bytes`,
    `gradients_bytes` and `masters_bytes` (master weights). `optimizer_bytes`: the state of the given optimizers;
    None if none was given. `activations_bytes`: the runtime's host memory without the blocks and gradients of all
    its models, that is activations, results, idle buffers kept for later calls, and staging memory of copies.
    `pinned_bytes`: all pinned memory of the runtime. `host_total_bytes`: the machine's memory. `devices`: used and
    peak bytes of each device, all models together. `predicted_bytes`: device memory that this model's last call
    was expected to use, from measurements of earlier calls; None if there are none, and on CPU devices.

    >>> MemoryReport(2, 0, 2, 4, 8, 100, 4096, 1 << 30, ()).host_bytes
    116
    """

    weights_bytes: int
    buffers_bytes: int
    gradients_bytes: int
    masters_bytes: int
    optimizer_bytes: int | None
    activations_bytes: int
    pinned_bytes: int
    host_total_bytes: int
    devices: tuple[MemoryUse, ...]
    predicted_bytes: int | None = None

    @property
    def host_bytes(self) -> int:
        """The sum of the host's kinds; without optimizer state if that is unknown."""
        kinds = (self.weights_bytes, self.buffers_bytes, self.gradients_bytes, self.masters_bytes)
        return sum(kinds) + (self.optimizer_bytes or 0) + self.activations_bytes

    def __str__(self) -> str:
        unknown = "not given" if self.optimizer_bytes is None else readable_bytes(self.optimizer_bytes)
        host = [
            ["weights", readable_bytes(self.weights_bytes)],
            ["buffers", readable_bytes(self.buffers_bytes)],
            ["gradients", readable_bytes(self.gradients_bytes)],
            ["masters", readable_bytes(self.masters_bytes)],
            ["optimizer state", unknown],
            ["activations and pool", readable_bytes(self.activations_bytes)],
            ["total", readable_bytes(self.host_bytes)],
            ["pinned", readable_bytes(self.pinned_bytes)],
            ["machine total", readable_bytes(self.host_total_bytes)],
        ]
        devices = [
            [
                use.name,
                readable_bytes(use.used_bytes),
                readable_bytes(use.peak_bytes),
                readable_bytes(use.total_bytes),
            ]
            for use in self.devices
        ]
        foreseen = [] if self.predicted_bytes is None else [f"predicted: {readable_bytes(self.predicted_bytes)}"]
        tables = [table(["host", "bytes"], host), "", table(["device", "used", "peak", "total"], devices)]
        return "\n".join(tables + foreseen)


def memory_report(
    runtime: Runtime,
    states: Sequence[ModelState],
    optimizers: Sequence[object],
    predicted_bytes: int | None = None,
) -> MemoryReport:
    """Measure the memory of one model, in one or several parts, and of its runtime.

    Raises `TypeError` if an item of `optimizers` is not a ``torch.optim.Optimizer``.
    """
    host = runtime.host_memory()
    blocks = [block for state in states for block in state.blocks]
    own = [block for other in list(runtime.states) for block in other.blocks]
    given = sum(_given_bytes(block) + _gradient_bytes(block) for block in own)
    return MemoryReport(
        weights_bytes=_bytes(block for block in blocks if block.kind != "buffer") + sum(map(_back_bytes, blocks)),
        buffers_bytes=_bytes(block for block in blocks if block.kind == "buffer"),
        gradients_bytes=sum(map(_gradient_bytes, blocks)),
        masters_bytes=sum(master.nbytes for state in states for master in list(state.masters.values())),
        optimizer_bytes=sum(map(_state_bytes, optimizers)) if optimizers else None,
        # Blocks may be allocated or released between the two measurements.
        activations_bytes=max(host.used_bytes - given, 0),
        pinned_bytes=host.pinned_bytes,
        host_total_bytes=host.total_bytes,
        devices=runtime.memory(),
        predicted_bytes=predicted_bytes,
    )


def _bytes(blocks: Iterable[Block]) -> int:
    return sum(tensor.nbytes for block in blocks for tensor in block.host_tensors())


def _given_bytes(block: Block) -> int:
    # Tensors left in their original memory are not the runtime's.
    return 0 if block.memory is None else block.memory.nbytes + _back_bytes(block)


def _back_bytes(block: Block) -> int:
    return 0 if block.back is None else block.back.nbytes


def _gradient_bytes(block: Block) -> int:
    return 0 if block.gradient is None else block.gradient.nbytes


def _state_bytes(optimizer: object) -> int:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"memory_report takes optimizers, but got a {type(optimizer).__name__} instead; give it the "
            "torch.optim.Optimizer that steps this model"
        )
    states: list[Mapping[str, Any]] = list(optimizer.state.values())  # Any: each optimizer has its own
    values = [value for state in states for value in list(state.values())]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
