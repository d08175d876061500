"""The plans that the strategy `adaptive` searches."""

import math
from collections.abc import Iterator
from functools import cached_property
from itertools import combinations, pairwise
from typing import NamedTuple, cast

from rp_sched.planners.partition import CostSums, backward_row, even, fewest, forward_row
from rp_sched.problem import spans
from rp_sched.problem.modes import Mode
from rp_sched.problem.plan import Plan
from rp_sched.problem.task_kinds import TaskKind
from rp_sched.simulation.resources import TaskWork
from rp_sched.simulation.stage_costs import ALONE, Loads

Cut = tuple[range, ...]


class Division(NamedTuple):
    """The number of tasks per stage, among which its microbatches are divided, for each kind of stage."""

    forward: int
    fused: int
    backward: int


class PlanShape(NamedTuple):
    """A plan without its exact cuts: the first fused layer, the numbers of stages, and the division."""

    start: int
    forward: int
    backward: int
    division: Division

    @property
    def tasks(self) -> int:
        """The number of tasks per call, counting a fused stage."""
        division = self.division
        return self.forward * division.forward + division.fused + self.backward * division.backward


class Space:
    """All plans of a model in a mode that are within the device limits; host memory is not checked.

    Plans differ in their cuts, in the length of the fused stage and in the division of microbatches: none, that of
    the fused stage, or the same number of even groups in all stages. Stages with layers that write buffers are
    never divided. Each task goes to the device that becomes free first.
    """

    def __init__(self, loads: Loads, *, mode: Mode, devices: int, microbatches: int) -> None:
        self.loads = loads
        self.mode: Mode = mode
        self.devices = devices
        self.microbatches = microbatches
        # Caches, since the same shapes recur.
        self._even: dict[tuple[TaskKind, int, int], Cut] = {}
        self._least: dict[tuple[TaskKind, int], int] = {}
        self._groups: dict[int, Cut] = {}

    @cached_property
    def starts(self) -> list[int]:
        """The possible first layers of the fused stage, ascending; the end of the model if it has none."""
        end = self.loads.num_layers
        if self.mode != "fused":
            return [end]
        return [start for start in range(end) if self.loads.fits(TaskKind.FUSED, range(start, end))]

    def divisions(self, start: int) -> list[Division]:
        """Return the possible divisions if the fused stage starts at layer `start`, fewest tasks first."""
        wanted = [Division(1, 1, 1)]
        for parts in range(2, self.microbatches + 1):
            wanted += [Division(1, parts, 1), Division(parts, parts, parts)]
        return list(dict.fromkeys(self._possible(start, division) for division in wanted))

    def _possible(self, start: int, division: Division) -> Division:
        """Return the division with 1 for stages that the mode lacks or whose layers may not be divided."""
        below, fused = range(start), range(start, self.loads.num_layers)
        up = division.forward if below and self.loads.may_divide(below) else 1
        both = division.fused if fused and self.loads.may_divide(fused) else 1
        return Division(up, both, up if self.mode != "infer" else 1)

    def make(self, start: int, forward: Cut, backward: Cut, division: Division) -> Plan:
        """Return the plan with these cuts; `backward` in ascending order."""
        fused = range(start, self.loads.num_layers)
        groups = self._divided
        return Plan(
            forward,
            fused or None,
            backward[::-1],
            groups(division.fused),
            groups(division.forward),
            groups(division.backward) if backward else (),
            in_turn=False,
        )

    def _divided(self, parts: int) -> Cut:
        """Return the microbatches in `parts` groups; empty if they are not divided."""
        if parts < 2:
            return ()
        if parts not in self._groups:
            self._groups[parts] = spans.divide(self.microbatches, parts)
        return self._groups[parts]

    def shaped(self, shape: PlanShape) -> Plan:
        """Return the plan of a shape: each direction is cut into stages of about equal time."""
        start, forward, backward, division = shape
        up = self._cut(TaskKind.FORWARD, start, forward)
        return self.make(start, up, self._cut(TaskKind.BACKWARD, start, backward), division)

    def _cut(self, kind: TaskKind, end: int, stages: int) -> Cut:
        if not stages:
            return ()
        if (kind, end, stages) not in self._even:
            self._even[kind, end, stages] = even(self._row(kind), end, stages, math.inf)
        return self._even[kind, end, stages]

    def _row(self, kind: TaskKind) -> CostSums:
        return self._backward if kind.runs_backward else self._forward

    @cached_property
    def _forward(self) -> CostSums:
        return forward_row(self.loads, self.microbatches)

    @cached_property
    def _backward(self) -> CostSums:
        return backward_row(self.loads, self.microbatches)

    def nearest(self, shape: PlanShape) -> PlanShape | None:
        """Return the shape with the nearest possible stage counts; None if its start or division is impossible."""
        if shape.start not in self.starts or not 1 <= max(shape.division) <= self.microbatches:
            return None
        end = shape.start
        up = min(max(shape.forward, self._fewest(TaskKind.FORWARD, end)), end)
        down = min(max(shape.backward, self._fewest(TaskKind.BACKWARD, end)), end) if self.mode != "infer" else 0
        return PlanShape(end, up, down, self._possible(end, shape.division))

    def _fewest(self, kind: TaskKind, end: int) -> int:
        if (kind, end) not in self._least:
            self._least[kind, end] = fewest(self._row(kind), end, math.inf)
        return self._least[kind, end]

    def bound_ms(self) -> float:
        """Return a lower bound on the time per call: least recomputation, every weight and gradient moved once."""
        loads, start, count = self.loads, self.starts[0], self.microbatches
        trains = self.mode != "infer"
        again_ms = loads.backward_ms[-1] + loads.forward_ms[start] if trains else 0.0
        sent, _, stepped = loads.leaving(range(loads.num_layers), ALONE) if trains else (0, 0, 0.0)
        work = TaskWork(
            busy_ms=count * (loads.forward_ms[-1] + again_ms),
            launch_ms=count * loads.least_launch_ms(start if trains else None),
            up_bytes=loads.weight_bytes[-1],
            down_bytes=sent,
            added_bytes=0,
            step_bytes=stepped,
            disk_bytes=loads.disk_bytes[-1],
        )
        return max(loads.resources(self.devices).loads_ms(work, self.devices).values())

    def leanest(self) -> Plan:
        """Return the plan that saves the fewest activation bytes on the host."""
        saved, cut = self._leanest_cuts()
        start = min(
            self.starts, key=lambda at: saved[at] + (self.loads.input_bytes[at] if self.mode == "fused" else 0)
        )
        up = self._cut(TaskKind.FORWARD, start, self._fewest(TaskKind.FORWARD, start))
        return self.make(start, up, () if self.mode == "infer" else cut[start], Division(1, 1, 1))

    def _leanest_cuts(self) -> tuple[list[int], list[Cut]]:
        """Return, for each end, the fewest input bytes of backward stages below it, and the cuts with those."""
        saved, cut = [0], [cast(Cut, ())]
        for end in range(1, self.loads.num_layers + 1):
            starts = [start for start in range(end) if self.loads.fits(TaskKind.BACKWARD, range(start, end))]
            best = min(starts, key=lambda start: saved[start] + self.loads.input_bytes[start])
            saved.append(saved[best] + self.loads.input_bytes[best])
            cut.append((*cut[best], range(best, end)))
        return saved, cut

    def everything(self, start: int) -> Iterator[Plan]:
        """Yield every plan whose fused stage starts at layer `start`."""
        backward = list(self.cuts(TaskKind.BACKWARD, start)) if self.mode != "infer" else [()]
        for division in self.divisions(start):
            for up in self.cuts(TaskKind.FORWARD, start):
                for down in backward:
                    yield self.make(start, up, down, division)

    def cuts(self, kind: TaskKind, end: int) -> Iterator[Cut]:
        """Yield every way to cut the layers below `end` into stages that fit, the fewest stages first."""
        if end == 0:
            yield ()
        for count in range(end):
            for marks in combinations(range(1, end), count):
                cut = tuple(range(a, b) for a, b in pairwise((0, *marks, end)))
                if all(self.loads.fits(kind, stage) for stage in cut):
                    yield cut
