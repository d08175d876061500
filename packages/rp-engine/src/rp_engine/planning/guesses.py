"""What layers are assumed to cost before anything of them is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rp_packing import packed_weights
from rp_sched import LayerCost
from rp_state.layers import LayerState

from rp_engine.planning.footprint import Footprint
from rp_engine.planning.pricing import FORWARD_PART, LAUNCH_MS, REPLAY_LAUNCH_MS

# Until times are measured only their ratio matters, also to the guessed link (`pricing`). A byte of weights takes
# this many ms in a microbatch's forward pass: about right for 4096 tokens on an H100 with PCIe 5.
_FORWARD_MS_PER_BYTE = 1e-6
# The same in real time and by row, for choosing the number of microbatches, which also depends on launch times.
# A byte of weights takes this many ms for a row on an H100; a link of PCIe 5 moves this many 10^9 bytes a second.
_REAL_FORWARD_MS = 1e-8 / 4096
_REAL_LINK_GB_S = 50.0


def guessed_cost(layer: LayerState, footprint: Footprint, rows: int, by_graphs: frozenset[int]) -> LayerCost:
    """Return the cost of a layer in microbatches of so many rows. `by_graphs`: the layers that graphs launch."""
    # A block that several layers share is uploaded once for a stage, so only its last layer counts it.
    own = [block for block in layer.blocks if max(block.users) == layer.index]
    nbytes = sum(block.nbytes for block in own)
    expanded = sum(one.expanded_nbytes - one.packed_nbytes for one in packed_weights(layer.module))
    return LayerCost(
        _FORWARD_MS_PER_BYTE * (nbytes + expanded + 1),
        weight_bytes=nbytes - footprint.spared_bytes([layer.index]),
        trainable_bytes=sum(block.nbytes for block in own if block.kind == "trainable"),
        kept_bytes=footprint.kept_bytes(layer.index, rows),
        writes_buffers=may_write(layer),
        replay_launch_ms=REPLAY_LAUNCH_MS if layer.index in by_graphs else None,
    )


def may_write(layer: LayerState) -> bool:
    """Whether a layer has buffers that its forward may write."""
    return any(block.kind == "buffer" and not block.is_read_only for block in layer.blocks)


def at_most(cost: LayerCost, budget: int) -> LayerCost:
    """Return the cost of a layer that fits within a device's bytes alone, without graphs if need be.

    A single layer is never refused because of a guess: torch's allocator decides whether it fits when it runs.
    """
    room = max(budget - cost.weight_bytes - cost.gradient_bytes, 0)
    replay_launch_ms = cost.replay_launch_ms if cost.kept_bytes + cost.graph_bytes <= room else None
    return replace(cost, kept_bytes=min(cost.kept_bytes, room), replay_launch_ms=replay_launch_ms)


def in_real_time(cost: LayerCost, rows: int) -> LayerCost:
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


def slowest_gb_s(rates: Sequence[float | None]) -> float:
    """Return the rate of the slowest measured link, in GB/s; a guess if none was measured.

    >>> slowest_gb_s([None, 20.0, 24.0]), slowest_gb_s([None])
    (20.0, 50.0)
    """
    return min((rate for rate in rates if rate is not None), default=_REAL_LINK_GB_S)
