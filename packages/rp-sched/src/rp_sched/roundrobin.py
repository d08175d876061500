"""The published way to plan: stages of even time, and devices that take them strictly in turn."""

from dataclasses import dataclass, replace
from functools import partial

from rp_sched.arguments import part, speed, whole
from rp_sched.loads import Loads
from rp_sched.pack import Row, backward_row, even, fewest, forward_row, least_cap, tail
from rp_sched.plan import Mode, Plan

BYTES_PER_GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRobin:
    """The strategy `roundrobin` with its knobs.

    >>> RoundRobin(upper_threshold=1.3).upper_threshold
    1.3

    The layers are cut into contiguous stages, once for the forward pass and differently for the backward pass; the
    last stage does both. No stage takes longer than `upper_threshold` times the slowest layer. There are at least
    `min_stages` if there are that many layers; as many as devices if not given. `model_memory_limit`, in 10^9
    bytes: what a device has for weights and gradients, of which a stage takes half at most, since the next one is
    fetched while it runs; what `Limits` says if not given.

    Source: the execution plans that RoundPipe's user guides describe.
    """

    min_stages: int | None = None
    upper_threshold: float = 1.1
    model_memory_limit: float | None = None

    def __post_init__(self) -> None:
        if self.min_stages is not None:
            whole("min_stages", self.min_stages, least=1)
        if self.model_memory_limit is not None:
            speed("model_memory_limit", self.model_memory_limit, unit="size in GB")
        if not part("upper_threshold", self.upper_threshold) >= 1:
            raise ValueError(
                f"upper_threshold must be at least 1, since a stage has at least one layer, "
                f"but is {self.upper_threshold!r} instead"
            )

    def plan(self, loads: Loads, *, devices: int, microbatches: int, mode: Mode) -> Plan:
        """The plan for loads that were found feasible."""
        loads = self._limited(loads)
        stages = min(self.min_stages or devices, loads.num_layers)
        forward, backward = forward_row(loads, microbatches), backward_row(loads, microbatches)
        if mode == "fused":
            return _fused(forward, backward, stages, self.upper_threshold)
        up = _stages(forward, stages, self.upper_threshold)
        return Plan(up, None, _stages(backward, stages, self.upper_threshold)[::-1] if mode == "train" else ())

    def _limited(self, loads: Loads) -> Loads:
        if self.model_memory_limit is None:
            return loads
        most = max(1, int(self.model_memory_limit * BYTES_PER_GB / 2))
        known = loads.limits.stage_limit_bytes
        return Loads(loads.costs, replace(loads.limits, stage_bytes=most if known is None else min(most, known)))


def _stages(row: Row, wanted: int, threshold: float) -> tuple[range, ...]:
    """All layers of the row, from the first up."""
    end, high_ms = row.num_layers, threshold * row.slowest_layer_ms
    stages = max(wanted, fewest(row, end, high_ms))
    cap_ms = least_cap(partial(fewest, row, end), stages, row.slowest_layer_ms, high_ms)
    return even(row, end, stages, cap_ms)


def _fused(forward: Row, backward: Row, wanted: int, threshold: float) -> Plan:
    """Forward stages, a fused last one, and backward stages, all of about the same time."""
    num_layers = backward.num_layers
    # Each layer below the fused stage gives two stages at most, one up and one down.
    longest = num_layers - wanted // 2

    def count(cap_ms: float) -> int:
        end = tail(backward, longest, cap_ms).start
        return fewest(forward, end, cap_ms) + 1 + fewest(backward, end, cap_ms)

    slowest_ms = backward.slowest_layer_ms
    stages = max(wanted, count(threshold * slowest_ms))
    cap_ms = least_cap(count, stages, slowest_ms, threshold * slowest_ms)
    fused = tail(backward, longest, cap_ms)
    up, down = _share(forward, backward, fused.start, stages - 1, cap_ms)
    return Plan(even(forward, fused.start, up, cap_ms), fused, even(backward, fused.start, down, cap_ms)[::-1])


def _share(forward: Row, backward: Row, end: int, stages: int, cap_ms: float) -> tuple[int, int]:
    """How many of `stages` go up and how many down: what each needs, and the rest where stages are slower."""
    up, down = fewest(forward, end, cap_ms), fewest(backward, end, cap_ms)
    up_ms, down_ms = forward.stage_ms(range(end)), backward.stage_ms(range(end))
    while up + down < min(stages, 2 * end):
        if down == end or (up < end and up_ms / up > down_ms / down):
            up += 1
        else:
            down += 1
    return up, down
