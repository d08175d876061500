"""What layers are assumed to cost before their times are measured, and the problems that plans solve with that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rp_packing import packed_weights
from rp_sched import LayerCost, Limits, Mode, Task
from rp_state.layers import LayerState

from rp_engine.planning.footprint import Footprint, resident_bytes
from rp_engine.planning.pricing import FORWARD_PART, LAUNCH_MS, REPLAY_LAUNCH_MS, Pricing

# Until times are measured only their ratio matters, also to the guessed link (`pricing`). A byte of weights takes
# this many ms in a microbatch's forward pass: about right for 4096 tokens on an H100 with PCIe 5.
_FORWARD_MS_PER_BYTE = 1e-6
# The same in real time and by row on an H100: the number of microbatches also depends on what launching takes.
_REAL_FORWARD_MS = 1e-8 / 4096
# Until layers are measured, plans allow for this many times the guessed bytes of kept activations, which are
# guessed from the widths of weights alone.
_UNMEASURED = 4
# Calls of up to this many times the measured rows count as measured: of one step of `rounded_up`, which is 19 %.
_MORE_ROWS = 1.2


@dataclass(frozen=True, slots=True)
class Guesses:
    """What the layers of one model are assumed to cost: times by their weights, memory by what calls have shown.

    `rows`: of a microbatch. `by_graphs`: the layers that graphs launch.
    """

    layers: Sequence[LayerState]
    footprint: Footprint
    pricing: Pricing

    def costs(self, rows: int, by_graphs: frozenset[int] = frozenset()) -> list[LayerCost]:
        """Return the cost of each layer."""
        return [_cost(layer, self.footprint, rows, by_graphs) for layer in self.layers]

    def problem(
        self, mode: Mode, rows: int, by_graphs: frozenset[int] = frozenset()
    ) -> tuple[list[LayerCost], Limits]:
        """Return the costs and the limits of calls, from which a plan is made."""
        rows = rows if self.pricing.sees_memory else 0
        caution = self._caution(mode, rows)
        costs = [replace(cost, kept_bytes=int(cost.kept_bytes * caution)) for cost in self.costs(rows, by_graphs)]
        limits = self.pricing.limits(costs, rows, is_known=caution == 1)
        budget = limits.device_memory_bytes
        assert budget is not None
        return [_at_most(cost, budget) for cost in costs], limits

    def _caution(self, mode: Mode, rows: int) -> float:
        """Return the factor by which layers may keep more than estimated of a microbatch of `rows`."""
        if not self.pricing.sees_memory or (mode == "infer" and self.footprint.knows_peak):
            return 1
        if not self.footprint.is_measured:
            return _UNMEASURED
        # What layers keep may grow with the square of the rows, as attention's scores do.
        return max(rows / (rounded_up(self.footprint.most_rows) * _MORE_ROWS), 1)

    def real_problem(self, rows: int, count: int) -> tuple[list[LayerCost], Limits]:
        """Return costs and limits, in real time, if `rows` are split into `count` microbatches."""
        part = -(-rows // count)
        costs = [_in_real_time(cost, part) for cost in self.costs(part)]
        return costs, self.pricing.real_limits(costs)

    def foreseen_bytes(self, rows: int, tasks: Sequence[Task], by_graphs: frozenset[int]) -> int:
        """Return what tasks and graphs are foreseen to take of a device's memory."""
        costs = self.costs(rows, by_graphs)
        taken = self.footprint.working_at(rows) + self.footprint.graph_bytes(costs, rows)
        return resident_bytes(tasks, costs) + taken


def rounded_up(rows: int) -> int:
    """Return `rows` rounded up to a quarter power of two, so that batches of similar length share a plan."""
    return math.ceil(2 ** (math.ceil(4 * math.log2(rows)) / 4))


def _cost(layer: LayerState, footprint: Footprint, rows: int, by_graphs: frozenset[int]) -> LayerCost:
    # A block that several layers share is uploaded once for a stage, so only its last layer counts it.
    own = [block for block in layer.blocks if max(block.users) == layer.index]
    nbytes = sum(block.nbytes for block in own)
    expanded = sum(one.expanded_nbytes - one.packed_nbytes for one in packed_weights(layer.module))
    uploaded = nbytes - footprint.spared_bytes([layer.index])
    return LayerCost(
        _FORWARD_MS_PER_BYTE * (nbytes + expanded + 1),
        weight_bytes=uploaded,
        disk_bytes=min(sum(block.nbytes for block in own if block.on_disk), uploaded),
        trainable_bytes=sum(block.nbytes for block in own if block.kind == "trainable"),
        kept_bytes=footprint.kept_bytes(layer.index, rows),
        writes_buffers=may_write(layer),
        replay_launch_ms=REPLAY_LAUNCH_MS if layer.index in by_graphs else None,
    )


def may_write(layer: LayerState) -> bool:
    """Whether a layer has buffers that its forward may write."""
    return any(block.kind == "buffer" and not block.is_read_only for block in layer.blocks)


def _at_most(cost: LayerCost, budget: int) -> LayerCost:
    """Return the cost of a layer that fits within a device's bytes alone, without graphs if need be.

    A single layer is never refused because of a guess: torch's allocator decides whether it fits when it runs.
    """
    room = max(budget - cost.weight_bytes - cost.gradient_bytes, 0)
    replay_launch_ms = cost.replay_launch_ms if cost.kept_bytes + cost.graph_bytes <= room else None
    return replace(cost, kept_bytes=min(cost.kept_bytes, room), replay_launch_ms=replay_launch_ms)


def _in_real_time(cost: LayerCost, rows: int) -> LayerCost:
    """Return a guessed cost with the times that a microbatch of so many rows takes."""
    forward_ms = _REAL_FORWARD_MS * rows * (cost.weight_bytes + 1)
    return replace(
        cost,
        forward_ms=forward_ms,
        backward_ms=2 * forward_ms,
        forward_launch_ms=FORWARD_PART * LAUNCH_MS,
        recompute_launch_ms=FORWARD_PART * LAUNCH_MS,
        backward_launch_ms=(1 - FORWARD_PART) * LAUNCH_MS,
    )
