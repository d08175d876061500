"""Report of the host and device memory that a model and its runtime use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rp_optim.host import HostOptimizer
from rp_state.host_bytes.held import given_to, held_by
from rp_state.host_bytes.kinds import CODES, HostBytes
from rp_state.model_state import ModelState
from rp_telemetry.tables import readable_bytes, table
from rp_transfer import MemoryUse
from torch.optim import Optimizer

from rp_engine.runtime.runtime import Runtime


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
    `second_blocks_bytes`: the second copies among the weights. `codes_bytes`: FP8 codes that travel in place of
    weights, which are beside these.

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
    second_blocks_bytes: int = 0
    codes_bytes: int = 0

    @property
    def host(self) -> HostBytes:
        """The host's kinds; without optimizer state if that is unknown."""
        return HostBytes(
            self.weights_bytes - self.second_blocks_bytes,
            self.second_blocks_bytes,
            self.codes_bytes,
            self.buffers_bytes,
            self.gradients_bytes,
            self.masters_bytes,
            self.optimizer_bytes or 0,
            self.activations_bytes,
        )

    @property
    def host_bytes(self) -> int:
        """The sum of the host's kinds; without optimizer state if that is unknown."""
        return self.host.total

    def __str__(self) -> str:
        unknown = {"optimizer state": "not given"} if self.optimizer_bytes is None else {}
        kinds = [
            [name, unknown.get(name, readable_bytes(nbytes))]
            for name, nbytes in self.host.by_kind()
            if nbytes or name != CODES
        ]
        sums = [
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
        tables = [table(["host", "bytes"], kinds + sums), "", table(["device", "used", "peak", "total"], devices)]
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
    host, held = runtime.host_memory(), held_by(states)
    return MemoryReport(
        weights_bytes=held.weights + held.second_blocks,
        buffers_bytes=held.buffers,
        gradients_bytes=held.gradients,
        masters_bytes=held.masters,
        optimizer_bytes=sum(map(state_bytes_now, optimizers)) if optimizers else None,
        # Blocks may be allocated or released between the two measurements.
        activations_bytes=max(host.used_bytes - given_to(list(runtime.states)), 0),
        pinned_bytes=host.pinned_bytes,
        host_total_bytes=host.total_bytes,
        devices=runtime.memory(),
        predicted_bytes=predicted_bytes,
        second_blocks_bytes=held.second_blocks,
        codes_bytes=held.codes,
    )


def state_bytes_now(optimizer: object) -> int:
    """Bytes of an optimizer's state now. Raises `TypeError` if it is no ``torch.optim.Optimizer``."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"memory_report takes optimizers, but got a {type(optimizer).__name__} instead; give it the "
            "torch.optim.Optimizer that steps this model"
        )
    if isinstance(optimizer, HostOptimizer):
        return optimizer.state_bytes_now()
    states: list[Mapping[str, Any]] = list(optimizer.state.values())  # Any: each optimizer has its own
    values = [value for state in states for value in list(state.values())]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
