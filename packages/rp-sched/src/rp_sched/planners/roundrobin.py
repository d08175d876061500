"""The strategy `roundrobin`: stages of about equal time, assigned to devices strictly in turn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rp_sched.planners.partition import CostSums, backward_row, even, fewest, forward_row, least_cap, tail
from rp_sched.problem import bounds
from rp_sched.problem.checks import non_negative, speed, whole
from rp_sched.problem.modes import Mode
from rp_sched.problem.plan import Plan
from rp_sched.problem.task_kinds import TaskKind
from rp_sched.simulation.stage_costs import Loads

BYTES_PER_GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRobin:
    """The strategy `roundrobin` and its parameters.

    >>> RoundRobin(upper_threshold=1.3).upper_threshold
    1.3

    The layers are cut into contiguous stages, once for the forward pass and differently for the backward pass; the
    last stage does both. No stage takes longer than `upper_threshold` times the slowest layer. `min_stages`: at
    least this many stages, if there are that many layers; by default the number of devices. `model_memory_limit`,
    in 10^9 bytes: device memory for weights and gradients; a stage uses at most half of it, since the next one is
    fetched while it runs. By default `Limits` decides.

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
        if not non_negative("upper_threshold", self.upper_threshold) >= 1:
            raise ValueError(
                f"upper_threshold must be at least 1, since a stage has at least one layer, "
                f"but is {self.upper_threshold!r} instead"
            )

    def plan(self, loads: Loads, *, devices: int, microbatches: int, mode: Mode) -> Plan:
        """Return the plan for loads that passed `Loads.check_feasible`."""
        loads = self._limited(loads)
        stages = min(self.min_stages or devices, loads.num_layers)
        rows = _Rows.of(loads, microbatches)
        slowest_ms = self.upper_threshold * rows.backward.slowest_layer_ms
        if mode == "fused":
            return _fused(rows, stages, slowest_ms)
        up = _stages(rows.forward, stages, self.upper_threshold * rows.forward.slowest_layer_ms)
        if mode == "infer":
            return Plan(up)
        return Plan(up, None, _stages(rows.backward, stages, slowest_ms)[::-1])

    def together(
        self, models: Sequence[Loads], *, devices: int, microbatches: int, mode: Mode
    ) -> tuple[Plan, ...]:
        """Return plans for several models, with one time limit per stage, that of the slowest layer of all."""
        rows = [_Rows.of(self._limited(loads), microbatches) for loads in models]
        wanted = self.min_stages or devices
        if mode == "fused":
            high_ms = self.upper_threshold * max(each.backward.slowest_layer_ms for each in rows)
            needs = [_count_fused(each, _longest(each.num_layers, 1), high_ms) for each in rows]
            times = [each.forward.total_ms + each.backward.total_ms for each in rows]
            counts = _spread(wanted, needs, times, [each.num_layers for each in rows])
            return tuple(_fused(each, count, high_ms) for each, count in zip(rows, counts, strict=True))
        forward = self._even_rows([each.forward for each in rows], wanted)
        if mode == "infer":
            return tuple(map(Plan, forward))
        backward = self._even_rows([each.backward for each in rows], wanted)
        return tuple(Plan(up, None, down[::-1]) for up, down in zip(forward, backward, strict=True))

    def _even_rows(self, rows: Sequence[CostSums], wanted: int) -> list[tuple[range, ...]]:
        high_ms = self.upper_threshold * max(row.slowest_layer_ms for row in rows)
        layers = [row.num_layers for row in rows]
        needs = [fewest(row, row.num_layers, high_ms) for row in rows]
        counts = _spread(wanted, needs, [row.total_ms for row in rows], layers)
        return [_stages(row, count, high_ms) for row, count in zip(rows, counts, strict=True)]

    def _limited(self, loads: Loads) -> Loads:
        if self.model_memory_limit is None:
            return loads
        # Sizes are limited to what a machine can address.
        most = max(1, int(min(self.model_memory_limit * BYTES_PER_GB / 2, bounds.BYTES.most)))
        limits = replace(loads.limits, ahead_bytes=None)
        known = limits.stage_limit_bytes
        return Loads(loads.costs, replace(limits, stage_bytes=most if known is None else min(most, known)))


@dataclass(frozen=True, slots=True)
class _Rows:
    """The prefix sums of one model's layers for forward and for backward stages."""

    loads: Loads
    forward: CostSums
    backward: CostSums

    @classmethod
    def of(cls, loads: Loads, microbatches: int) -> "_Rows":
        return cls(loads, forward_row(loads, microbatches), backward_row(loads, microbatches))

    @property
    def num_layers(self) -> int:
        return self.loads.num_layers

    def fused(self, longest: int, cap_ms: float) -> range:
        # The fused stage has limits of its own: its weights may exceed `Limits.ahead_bytes`.
        return tail(self.backward, partial(self.loads.fits, TaskKind.FUSED), longest, cap_ms)


def _spread(wanted: int, needs: Sequence[int], times_ms: Sequence[float], most: Sequence[int]) -> list[int]:
    """Return the stage count of each model: at least `needs`. The rest of `wanted` go where stages are longest."""
    counts = list(needs)
    while sum(counts) < wanted:
        open_ = [at for at, count in enumerate(counts) if count < most[at]]
        if not open_:
            break
        counts[max(open_, key=lambda at: times_ms[at] / counts[at])] += 1
    return counts


def _stages(row: CostSums, wanted: int, high_ms: float) -> tuple[range, ...]:
    """Cut all layers into at least `wanted` stages, from the first layer on."""
    end = row.num_layers
    stages = max(wanted, fewest(row, end, high_ms))
    cap_ms = least_cap(partial(fewest, row, end), stages, row.slowest_layer_ms, high_ms)
    return even(row, end, stages, cap_ms)


def _longest(num_layers: int, wanted: int) -> int:
    # Each layer below the fused stage makes at most two stages, one forward and one backward.
    return num_layers - wanted // 2


def _count_fused(rows: _Rows, longest: int, cap_ms: float) -> int:
    end = rows.fused(longest, cap_ms).start
    return fewest(rows.forward, end, cap_ms) + 1 + fewest(rows.backward, end, cap_ms)


def _fused(rows: _Rows, wanted: int, high_ms: float) -> Plan:
    """Return the plan of forward stages, a fused last stage and backward stages, all of about equal time."""
    longest = _longest(rows.num_layers, wanted)
    count: Callable[[float], int] = partial(_count_fused, rows, longest)
    stages = max(wanted, count(high_ms))
    cap_ms = least_cap(count, stages, rows.backward.slowest_layer_ms, high_ms)
    fused = rows.fused(longest, cap_ms)
    up, down = _share(rows.forward, rows.backward, fused.start, stages - 1, cap_ms)
    return Plan(
        even(rows.forward, fused.start, up, cap_ms), fused, even(rows.backward, fused.start, down, cap_ms)[::-1]
    )


def _share(forward: CostSums, backward: CostSums, end: int, stages: int, cap_ms: float) -> tuple[int, int]:
    """Return the numbers of forward and backward stages: what each needs, and the rest where stages are slower."""
    up, down = fewest(forward, end, cap_ms), fewest(backward, end, cap_ms)
    up_ms, down_ms = forward.stage_ms(range(end)), backward.stage_ms(range(end))
    while up + down < min(stages, 2 * end):
        if down == end or (up < end and up_ms / up > down_ms / down):
            up += 1
        else:
            down += 1
    return up, down
