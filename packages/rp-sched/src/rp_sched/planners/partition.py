"""Partition a row of layers into contiguous stages."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from rp_sched.problem.task_kinds import TaskKind
from rp_sched.simulation.stage_costs import Loads

# Where bisection stops: smaller differences are below the noise of any measured time.
RELATIVE_PRECISION = 1e-9


@dataclass(frozen=True, slots=True)
class CostSums:
    """Prefix sums of layer costs, for the cost of any contiguous stage.

    >>> row = CostSums.of(times_ms=[[1, 2, 3]], state_bytes=[5, 5, 5], resident_bytes=[6, 6, 6])
    >>> row.stage_ms(range(1, 3))
    5.0

    `times_ms`: one list per resource that works in parallel (compute, upload, download); the slowest one counts.
    `state_bytes`: weights and gradients, or only weights if `Limits.ahead_bytes` is given. `resident_bytes`:
    weights, gradients and kept activations. `state_limit` and `resident_limit` apply to stages of several layers.
    """

    times_ms: tuple[tuple[float, ...], ...]
    state_bytes: tuple[int, ...]
    resident_bytes: tuple[int, ...]
    state_limit: float
    resident_limit: float

    @classmethod
    def of(
        cls,
        *,
        times_ms: Iterable[Iterable[float]],
        state_bytes: Iterable[int],
        resident_bytes: Iterable[int],
        state_limit: float = math.inf,
        resident_limit: float = math.inf,
    ) -> "CostSums":
        """Return the prefix sums of costs given per layer."""
        return cls(
            tuple(tuple(accumulate(times, initial=0.0)) for times in times_ms),
            tuple(accumulate(state_bytes, initial=0)),
            tuple(accumulate(resident_bytes, initial=0)),
            state_limit,
            resident_limit,
        )

    @property
    def num_layers(self) -> int:
        return len(self.state_bytes) - 1

    @property
    def slowest_layer_ms(self) -> float:
        return max(self.stage_ms(range(layer, layer + 1)) for layer in range(self.num_layers))

    @property
    def total_ms(self) -> float:
        return self.stage_ms(range(self.num_layers))

    def stage_ms(self, layers: range) -> float:
        """Return the time of a stage on its slowest resource."""
        return max(sums[layers.stop] - sums[layers.start] for sums in self.times_ms)

    def fits(self, layers: range) -> bool:
        """Return whether a stage is within the memory limits; a single layer always is, since it was checked."""
        state = self.state_bytes[layers.stop] - self.state_bytes[layers.start]
        resident = self.resident_bytes[layers.stop] - self.resident_bytes[layers.start]
        return len(layers) == 1 or (state <= self.state_limit and resident <= self.resident_limit)


def forward_row(loads: Loads, microbatches: int) -> CostSums:
    """Return the layers' costs in forward stages: weights are uploaded, no activations are kept."""
    return _row(loads, TaskKind.FORWARD, microbatches)


def backward_row(loads: Loads, microbatches: int) -> CostSums:
    """Return the layers' costs in backward and fused stages, which run both directions and download gradients."""
    return _row(loads, TaskKind.BACKWARD, microbatches)


def _row(loads: Loads, kind: TaskKind, microbatches: int) -> CostSums:
    single = [loads.of(kind, range(layer, layer + 1)) for layer in range(loads.num_layers)]
    limits = loads.limits
    up_ms, down_ms = limits.upload_ms_per_byte, limits.download_ms_per_byte
    stage, device, ahead = limits.stage_limit_bytes, limits.smallest_memory_bytes, limits.ahead_bytes
    return CostSums.of(
        times_ms=[
            [microbatches * load.ms for load in single],
            [load.weight_bytes * up_ms for load in single],
            [load.sent_bytes * down_ms for load in single],
        ],
        state_bytes=[load.state_bytes - (load.gradient_bytes if ahead is not None else 0) for load in single],
        resident_bytes=[load.state_bytes + load.kept_bytes for load in single],
        state_limit=next((limit for limit in (stage, ahead) if limit is not None), math.inf),
        # Memory for the stage fetched ahead is not available to the running stage.
        resident_limit=math.inf if device is None else device - limits.room_ahead_bytes,
    )


def reach(row: CostSums, start: int, end: int, cap_ms: float) -> int:
    """Return the end of the longest stage from `start` that fits within `cap_ms`; it has at least one layer."""

    def too_much(stop: int) -> bool:
        layers = range(start, stop)
        return not row.fits(layers) or row.stage_ms(layers) > cap_ms

    return start + 1 + bisect_left(range(start + 2, end + 1), True, key=too_much)


def fewest(row: CostSums, end: int, cap_ms: float) -> int:
    """Return the smallest number of stages for the layers below `end` if none takes longer than `cap_ms`.

    >>> fewest(CostSums.of(times_ms=[[1, 2, 3]], state_bytes=[0, 0, 0], resident_bytes=[0, 0, 0]), 3, 3.0)
    2
    """
    count, start = 0, 0
    while start < end:
        start = reach(row, start, end, cap_ms)
        count += 1
    return count


def tail(row: CostSums, fits: Callable[[range], bool], longest: int, cap_ms: float) -> range:
    """Return the longest last stage, of at most `longest` layers, that `fits` and takes at most `cap_ms`."""
    end = row.num_layers

    def allowed(start: int) -> bool:
        layers = range(start, end)
        return fits(layers) and row.stage_ms(layers) <= cap_ms

    candidates = range(end - longest, end - 1)
    return range(end - longest + bisect_left(candidates, True, key=allowed), end)


def least_cap(count: Callable[[float], int], stages: int, low_ms: float, high_ms: float) -> float:
    """Return the smallest cap, between `low_ms` and `high_ms`, under which `count(cap)` is at most `stages`.

    `count` must be non-increasing, and `count(high_ms)` at most `stages`.
    """
    if count(low_ms) <= stages:
        return low_ms
    while high_ms - low_ms > RELATIVE_PRECISION * high_ms:
        middle = (low_ms + high_ms) / 2
        if not low_ms < middle < high_ms:
            # There is no float between the two.
            break
        low_ms, high_ms = (low_ms, middle) if count(middle) <= stages else (middle, high_ms)
    return high_ms


def even(row: CostSums, end: int, stages: int, cap_ms: float) -> tuple[range, ...]:
    """Cut the layers below `end` into exactly `stages` stages of about equal time, none above `cap_ms`.

    >>> row = CostSums.of(times_ms=[[1] * 6], state_bytes=[0] * 6, resident_bytes=[0] * 6)
    >>> even(row, 6, 3, 6.0)
    (range(0, 2), range(2, 4), range(4, 6))

    `stages` must be at least `fewest(row, end, cap_ms)` and at most `end`.
    """
    needed = _needed(row, end, cap_ms)
    cut: list[range] = []
    start = 0
    for left in range(stages, 0, -1):
        stops = _stops(needed, range(start, end), left, reach(row, start, end, cap_ms))
        stop = _nearest(row, range(start, end), left, stops)
        cut.append(range(start, stop))
        start = stop
    return tuple(cut)


def _needed(row: CostSums, end: int, cap_ms: float) -> list[int]:
    """Return, for each layer, the smallest number of stages from it to `end`."""
    needed = [0] * (end + 1)
    for start in range(end - 1, -1, -1):
        needed[start] = 1 + needed[reach(row, start, end, cap_ms)]
    return needed


def _stops(needed: Sequence[int], layers: range, left: int, furthest: int) -> range:
    """Return where the next of `left` stages may stop so that the others can cover the rest, a layer each."""
    last = min(furthest, layers.stop - (left - 1))
    first = last
    while first - 1 > layers.start and needed[first - 1] <= left - 1:
        first -= 1
    return range(first, last + 1)


def _nearest(row: CostSums, layers: range, left: int, stops: range) -> int:
    """Return the stop that brings the next stage closest to its share of the time, then of the layers."""
    share_ms, share = row.stage_ms(layers) / left, len(layers) / left

    def miss(stop: int) -> tuple[float, float]:
        stage = range(layers.start, stop)
        return abs(row.stage_ms(stage) - share_ms), abs(len(stage) - share)

    return min(stops, key=miss)
