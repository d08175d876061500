"""What training takes on a machine: the fastest plan that fits, or what is short."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rp_sched import Course, Dealer, Infeasible, LayerCost, Limits, Resource, Search, Task, simulate, simulated_ms

from roundpipe.cli.estimate.hardware import Machine
from roundpipe.cli.estimate.workload import Workload, size_of, sizes_of
from roundpipe.engine.forecast import MemoryForecast
from roundpipe.planning.adaptive import memory_splits

# Longer lists are not tried: launching alone would take minutes a step.
_MOST_TRIED = 512
# A plan that is faster by less than this is not worth more microbatches.
_EQUAL = 0.01
# Plans that are tried for each number of microbatches, before the best is searched from on.
_QUICK_PLANS = 3
# Calls that are simulated to see how much memory devices use.
_CALLS = 2


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked: training on a machine with so many sequences in a step.

    `microbatches`: None chooses the number whose plan is fastest.
    """

    workload: Workload
    machine: Machine
    batch: int
    microbatches: int | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan that fits the devices, and what it takes.

    `sequences`: of the largest microbatch. `ms`: of a step. `device_bytes`: the most on a device at once, with
    workspace; 0 if it was not simulated. `tasks`: of one call.
    """

    course: Course
    microbatches: int
    sequences: int
    ms: float
    device_bytes: int
    devices: int
    tasks: tuple[Task, ...]

    @property
    def bound_by(self) -> Resource:
        """The resource that is busy for the longest time."""
        return self.course.bottleneck(self.devices)


@dataclass(frozen=True, slots=True)
class Foretold:
    """The answer. `planned`: None if no plan fits the devices. `forecast`: host memory under the plan, or without.

    `device_short_bytes`: what a device lacks for any plan; 0 if one fits.
    """

    case: Case
    planned: Planned | None
    forecast: MemoryForecast
    device_short_bytes: int = 0

    @property
    def fits(self) -> bool:
        """Whether devices and host have memory enough."""
        return self.planned is not None and self.forecast.fits

    @property
    def tokens_per_s(self) -> float:
        """Of the plan; 0 without one."""
        return 0.0 if self.planned is None else self.tokens * 1e3 / self.planned.ms

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.case.batch * self.case.workload.sequence


def foretell(case: Case, *, settles: bool = True) -> Foretold:
    """Plan, simulate and add up. `settles`: search for longer than for a first plan, and simulate the result."""
    counts = _counts(case) if case.microbatches is None else [case.microbatches]
    found, short = _fastest(case, counts)
    planned = None if found is None else _planned(*found, case, settles=settles)
    tasks = () if planned is None else planned.tasks
    count = counts[-1] if planned is None else planned.microbatches
    forecast = case.workload.forecast(tasks, count, size_of(case.batch, count), case.machine)
    return Foretold(case, planned, forecast, 0 if planned else short)


def _counts(case: Case) -> list[int]:
    """Numbers of microbatches to try: those that divide the batch evenly, fewest first."""
    return [count for count in sizes_of(case.batch) if count <= max(_MOST_TRIED, case.machine.devices)]


def _fastest(case: Case, counts: Iterable[int]) -> tuple[tuple[Search, int] | None, int]:
    """The search whose first plans are fastest, with its number of microbatches; or else what a device lacks."""
    best: tuple[Search, int] | None = None
    short: int | None = None
    for count in counts:
        try:
            search = _search(case, count)
        except Infeasible:
            lacks = _lacking_bytes(case, size_of(case.batch, count))
            short = lacks if short is None else min(short, lacks)
            continue
        if best is None or search.best_ms < best[0].best_ms * (1 - _EQUAL):
            best = (search, count)
    return best, short or 0


def _search(case: Case, count: int) -> Search:
    """The fastest of the searches for several splits of device memory. Raises `Infeasible` if none has a plan."""
    costs, limits = _problem(case, size_of(case.batch, count))
    found: list[Search] = []
    refused: Infeasible | None = None
    for choice in memory_splits(costs, limits):
        try:
            found.append(
                Search(
                    costs,
                    devices=case.machine.devices,
                    microbatches=count,
                    mode="fused",
                    limits=choice,
                    quick_plans=_QUICK_PLANS,
                )
            )
        except Infeasible as error:
            refused = error
    if not found:
        assert refused is not None
        raise refused
    return min(found, key=lambda search: search.best_ms)


def _lacking_bytes(case: Case, sequences: int) -> int:
    """What a device lacks to run each layer alone: its weights, gradients and activations, and the workspace."""
    costs = case.workload.costs(sequences, case.machine.card.tflops)
    most = max(cost.weight_bytes + cost.gradient_bytes + cost.kept_bytes for cost in costs)
    return max(most + case.workload.working_bytes(sequences) - case.machine.usable_bytes, 1)


def _problem(case: Case, sequences: int) -> tuple[list[LayerCost], Limits]:
    workload, machine = case.workload, case.machine
    limits = machine.limits(
        workload.working_bytes(sequences),
        optimizer_bytes=workload.step_bytes,
        double_buffer=machine.ram is not None and workload.is_double(machine.ram),
    )
    return workload.costs(sequences, machine.card.tflops), limits


def _planned(search: Search, count: int, case: Case, *, settles: bool) -> Planned:
    devices = case.machine.devices
    course = search.settle() if settles else search.best
    dealer = Dealer(devices)
    calls = [dealer.deal(course) for _ in range(_CALLS)]
    sequences = size_of(case.batch, count)
    return Planned(
        course=course,
        microbatches=count,
        sequences=sequences,
        ms=simulated_ms(course, devices) if settles else search.best_ms,
        device_bytes=_peak_bytes(course, calls, devices) + case.workload.working_bytes(sequences)
        if settles
        else 0,
        devices=devices,
        tasks=calls[0],
    )


def _peak_bytes(course: Course, calls: Sequence[Sequence[Task]], devices: int) -> int:
    timeline = simulate(
        calls,
        course.loads.costs,
        devices=devices,
        microbatches=course.microbatches,
        mode=course.mode,
        limits=course.loads.limits,
    )
    return max(timeline.peak_bytes)
