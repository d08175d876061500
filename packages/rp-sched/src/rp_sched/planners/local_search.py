"""Search for the fastest plan that uses a given number of devices."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from rp_sched.errors import Infeasible
from rp_sched.planners.roundrobin import RoundRobin
from rp_sched.planners.search_space import Division, PlanShape, Space
from rp_sched.problem.modes import Mode
from rp_sched.problem.plan import Plan
from rp_sched.problem.task_kinds import TaskKind
from rp_sched.simulation.makespan import MOST_CALLS, Pace, PricedPlan, pace
from rp_sched.simulation.stage_costs import Loads

# Up to these sizes every plan is simulated, or excluded by its bound. There are about 4^layers * microbatches
# plans, and simulating one takes time in proportion to microbatches. The total grows as the square of
# 2^layers * microbatches, which must be at most EXACT_SIZE.
EXACT_LAYERS = 8
EXACT_DEVICES = 3
EXACT_SIZE = 4096
# Limit on simulated steps (one microbatch in one stage) in a search that is not exact. With links, a step counts
# as several, since it takes that much longer to simulate.
MOST_STEPS = 2_000_000
LINKED_STEPS = 5
# Computing the bound of this many steps takes as long as simulating one step.
STEPS_A_BOUND = 2
# Above FEW_DEVICES devices, choosing a task's device counts as one step per DEVICES_A_STEP devices.
FEW_DEVICES = 64
DEVICES_A_STEP = 16
# Plans with more tasks per call are not tried: their tasks would mostly wait for each other.
MOST_TASKS = 20_000
# Calls simulated to compare shapes, and how many of the best shapes have their neighbours tried.
ROUGH_CALLS = 10
BEST_SHAPES = 6
# A plan is a rival of the best one if its time per call is at most this many times as long.
RIVAL = 1.3
# Plans whose times differ by a smaller fraction count as equal; of these, the one with fewest tasks wins.
EQUAL = 1e-9


class Finder:
    """The state of the search for the fastest plan that uses exactly `devices` devices."""

    def __init__(
        self,
        loads: Loads,
        *,
        mode: Mode,
        devices: int,
        microbatches: int,
        first: Sequence[Plan],
        tolerance: float = 0.0,
    ) -> None:
        self.best_ms = float("inf")
        self.devices = devices
        self._best: PricedPlan | None = None
        # By the most tasks among which a stage's microbatches are divided: the fastest plan and its time.
        self._divided: dict[int, tuple[float, PricedPlan]] = {}
        self._space = Space(loads, mode=mode, devices=devices, microbatches=microbatches)
        self._least_ms = self._space.bound_ms()
        self._tolerance = max(tolerance, EQUAL)
        self.steps = 0
        self._tried: dict[PlanShape, float] = {}
        published = RoundRobin().plan(loads, devices=devices, microbatches=microbatches, mode=mode)
        for plan in (*first, published, *self._leanest()):
            self._try(plan, MOST_CALLS)

    @property
    def best(self) -> PricedPlan:
        """The fastest priced plan so far. Raises `Infeasible` if host memory is too small for every plan."""
        if self._best is None:
            leanest, host = self._space.leanest(), self._space.loads.limits.host_memory_bytes
            raise Infeasible(None, self._space.loads.host_bytes(leanest, self._space.microbatches), host or 0)
        return self._best

    def run(self) -> Iterator[None]:
        """Continue the search; yield after each plan."""
        for _ in self._bounded():
            yield
            if self._is_perfect or self.steps > MOST_STEPS:
                break
        # Fewer tasks are not worth simulations to who takes a plan that is only almost as fast.
        for _ in self._simplify() if self._tolerance <= EQUAL else ():
            yield
            if self.steps > 2 * MOST_STEPS:
                break
        if self._is_small:
            yield from self._exact()

    def ranked(self, count: int) -> list[Plan]:
        """Return the plans of the fastest shapes tried, fastest first."""
        shapes = sorted(self._tried, key=self._tried.__getitem__)[:count]
        return [self._space.shaped(shape) for shape in shapes if self._tried[shape] < float("inf")]

    def using_all(self, count: int) -> list[Plan]:
        """Return the plans of the fastest shapes with a task for each device, fastest first, then fewest tasks."""
        # Those from which the search starts, too: it ends at once if nothing can be faster than its first plan.
        known = {**dict.fromkeys(seeds(self._space), float("inf")), **self._tried}
        shapes = (shape for shape in known if self.devices <= shape.tasks <= MOST_TASKS)
        ranked = sorted(shapes, key=lambda shape: (known[shape], shape.tasks))
        return list(map(self._space.shaped, ranked[:count]))

    def rivals(self) -> list[PricedPlan]:
        """Return the fastest plan for each number of tasks among which microbatches are divided, fastest first.

        Plans far slower than the best are left out, except the one that divides nothing.
        """
        near_ms = self.best_ms * RIVAL
        ranked = sorted(self._divided.items(), key=lambda item: item[1][0])
        return [priced for tasks, (ms, priced) in ranked if ms <= near_ms or tasks == 1]

    def _leanest(self) -> list[Plan]:
        return [] if self._space.loads.limits.host_memory_bytes is None else [self._space.leanest()]

    @property
    def _is_perfect(self) -> bool:
        return self.best_ms <= self._least_ms * (1 + self._tolerance)

    @property
    def _is_small(self) -> bool:
        layers = self._space.loads.num_layers
        small = layers <= EXACT_LAYERS and self.devices <= EXACT_DEVICES
        return small and 2**layers * self._space.microbatches <= EXACT_SIZE

    def _try(self, plan: Plan, most_calls: int) -> float:
        """Simulate a plan for at most `most_calls` calls; return its time per call, infinite if it cannot win."""
        space = self._space
        priced = PricedPlan.unchecked(plan, space.loads, space.mode, space.microbatches)
        if self._cannot_win(priced):
            return float("inf")
        result = self._pace(priced, most_calls)
        if most_calls < MOST_CALLS and result.calls == most_calls and self._is_better(result.call_ms, priced):
            result = self._pace(priced, MOST_CALLS)
        if self._is_better(result.call_ms, priced):
            self._best, self.best_ms = priced, result.call_ms
        tasks = plan.tasks_a_stage
        if tasks not in self._divided or result.call_ms < self._divided[tasks][0]:
            self._divided[tasks] = result.call_ms, priced
        return result.call_ms

    def _pace(self, priced: PricedPlan, most_calls: int) -> Pace:
        result = pace([priced], self.devices, most_calls=most_calls)
        choice = self.devices // DEVICES_A_STEP if self.devices > FEW_DEVICES else 0
        steps = priced.steps + len(priced.jobs) * choice
        self.steps += result.calls * steps * (1 if priced.loads.plain else LINKED_STEPS)
        return result

    def _cannot_win(self, priced: PricedPlan) -> bool:
        # The first bound is cheap; the second visits every step.
        self.steps += len(priced.jobs)
        if not self._is_better(priced.load_bound_ms(self.devices), priced):
            return True
        self.steps += priced.steps // STEPS_A_BOUND
        if not self._is_better(priced.bound_ms(self.devices), priced):
            return True
        return not self._space.loads.fits_host(priced.plan, priced.microbatches)

    def _is_better(self, call_ms: float, priced: PricedPlan) -> bool:
        """Return whether a plan with this time per call beats the best: faster, or as fast with fewer tasks."""
        if call_ms < self.best_ms * (1 - EQUAL) or self._best is None:
            return True
        return call_ms <= self.best_ms * (1 + EQUAL) and len(priced.jobs) < len(self._best.jobs)

    def _exact(self) -> Iterator[None]:
        for start in self._space.starts:
            for plan in self._space.everything(start):
                if self._is_perfect:
                    return
                self._try(plan, MOST_CALLS)
                yield

    def _bounded(self) -> Iterator[None]:
        """Try the seed shapes, then the neighbours of the best ones, then move cuts of the best plan."""
        for shape in seeds(self._space):
            self._try_shape(shape)
            yield
        for shape in sorted(self._tried, key=self._tried.__getitem__)[:BEST_SHAPES]:
            yield from self._climb(shape)
        yield from self._move_cuts()

    def _try_shape(self, shape: PlanShape) -> float:
        if shape not in self._tried:
            few = shape.tasks <= MOST_TASKS
            self._tried[shape] = self._try(self._space.shaped(shape), ROUGH_CALLS) if few else float("inf")
        return self._tried[shape]

    def _simplify(self) -> Iterator[None]:
        """Try shapes with fewer tasks than the best plan, until none of them is as fast."""
        before: PricedPlan | None = None
        while before is not self.best:
            before = self.best
            for shape in simpler(self._space, before.plan):
                self._try(self._space.shaped(shape), MOST_CALLS)
                yield

    def _climb(self, shape: PlanShape) -> Iterator[None]:
        """Climb by moving to the fastest neighbour while it is faster."""
        while True:
            nearby: list[PlanShape] = []
            for other in neighbours(self._space, shape):
                self._try_shape(other)
                nearby.append(other)
                yield
            fastest = min(nearby, key=self._try_shape, default=shape)
            if self._try_shape(fastest) >= self._try_shape(shape):
                return
            shape = fastest

    def _move_cuts(self) -> Iterator[None]:
        """Move single cuts of the best plan by one layer while that makes it faster."""
        before = float("inf")
        while self.best_ms < before:
            before = self.best_ms
            for plan in moved_cuts(self._space.loads, self.best.plan):
                self._try(plan, MOST_CALLS)
                yield


def seeds(space: Space) -> Iterator[PlanShape]:
    """Yield a variety of shapes to start from, the most promising first."""
    devices, most = space.devices, space.microbatches
    totals = dict.fromkeys((2 * devices, 3 * devices, 4 * devices, devices, 6 * devices, 3 * devices // 2))
    all_devices = min(devices, most)
    parts = [
        *((1, all_devices, 1), (all_devices,) * 3, (1, 1, 1), (most,) * 3, (2, 2, 2), (1, most, 1), (3, 3, 3)),
        *((1, 2, 1), (1, 3, 1), (4, 4, 4)),
    ]
    seen: set[PlanShape] = set()
    for total, start, part in product(totals, _spread(space.starts), parts):
        shape = space.nearest(PlanShape(start, *_stages(space, start, total), Division(*part)))
        if shape is not None and shape not in seen:
            seen.add(shape)
            yield shape


def _spread(starts: Sequence[int]) -> list[int]:
    """Return a few of the starts, spread evenly."""
    last = len(starts) - 1
    return [starts[at] for at in dict.fromkeys((0, last, last // 2, last // 4, 3 * last // 4))]


def _stages(space: Space, start: int, total: int) -> tuple[int, int]:
    """Return the numbers of forward and backward stages for about `total` stages of about equal time."""
    loads = space.loads
    up_ms = loads.forward_ms[start]
    down_ms = up_ms + loads.backward_ms[start] if space.mode != "infer" else 0.0
    fused_ms = loads.forward_ms[-1] - up_ms + (loads.backward_ms[-1] - loads.backward_ms[start])
    all_ms = max(up_ms + down_ms + (fused_ms if space.mode == "fused" else 0.0), 1e-300)
    return round(total * up_ms / all_ms), round(total * down_ms / all_ms)


def neighbours(space: Space, shape: PlanShape) -> Iterator[PlanShape]:
    """Yield shapes that differ slightly from `shape`."""
    start, up, down, division = shape
    parts = max(division)
    near = [
        *(PlanShape(start + by, up, down, division) for by in (-1, 1, -3, 3)),
        *(PlanShape(start, up + by, down, division) for by in (-1, 1, -2, 2)),
        *(PlanShape(start, up, down + by, division) for by in (-1, 1, -2, 2)),
        *(PlanShape(start, up + by, down + by, division) for by in (-1, 1)),
    ]
    for other in (parts - 1, parts, parts + 1):
        near += [PlanShape(start, up, down, Division(*part)) for part in ((other,) * 3, (1, other, 1))]
    found = (space.nearest(candidate) for candidate in near)
    yield from dict.fromkeys(candidate for candidate in found if candidate not in (None, shape))


def simpler(space: Space, plan: Plan) -> Iterator[PlanShape]:
    """Yield shapes with fewer stages or groups than a plan, with the same start of the fused stage."""
    start = space.loads.num_layers if plan.fused is None else plan.fused.start
    up, down = len(plan.forward), len(plan.backward)
    division = Division(len(plan.forward_groups) or 1, len(plan.groups) or 1, len(plan.backward_groups) or 1)
    near = [
        *(PlanShape(start, up, down, less) for less in space.divisions(start) if max(less) <= max(division)),
        *(PlanShape(start, fewer, down, division) for fewer in (up - 1, up // 2)),
        *(PlanShape(start, up, fewer, division) for fewer in (down - 1, down // 2)),
    ]
    found = (space.nearest(candidate) for candidate in near)
    yield from dict.fromkeys(candidate for candidate in found if candidate is not None)


def moved_cuts(loads: Loads, plan: Plan) -> Iterator[Plan]:
    """Yield the plans that differ from `plan` by one cut moved by one layer."""
    for name, kind in (("forward", TaskKind.FORWARD), ("backward", TaskKind.BACKWARD)):
        stages: tuple[range, ...] = getattr(plan, name)
        for at, by in product(range(len(stages) - 1), (-1, 1)):
            pair = sorted(stages[at : at + 2], key=lambda stage: stage.start)
            cut = pair[0].stop + by
            moved = [range(pair[0].start, cut), range(cut, pair[1].stop)]
            if all(stage and loads.fits(kind, stage) for stage in moved):
                ordered = moved[::-1] if kind.runs_backward else moved
                yield replace(plan, **{name: (*stages[:at], *ordered, *stages[at + 2 :])})
