"""What training takes on a machine: the fastest plan that fits, or what is short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rp_sched import Course, Dealer, LayerCost, Limits, Resource, Search, Task, simulate, simulated_ms

from roundpipe.cli.estimate.hardware import Machine
from roundpipe.cli.estimate.workload import Workload, size_of
from roundpipe.engine.forecast import MemoryForecast
from roundpipe.planning.microbatches import counts_of, fastest

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
    counts = counts_of(case.batch) if case.microbatches is None else [case.microbatches]
    found = fastest(
        counts,
        lambda count: _problem(case, size_of(case.batch, count)),
        devices=case.machine.devices,
        mode="fused",
    )
    planned = None if found is None else _planned(*found, case, settles=settles)
    tasks = () if planned is None else planned.tasks
    count = counts[-1] if planned is None else planned.microbatches
    forecast = case.workload.forecast(tasks, count, size_of(case.batch, count), case.machine)
    short = 0 if planned else min(_lacking_bytes(case, size_of(case.batch, count)) for count in counts)
    return Foretold(case, planned, forecast, short)


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


def _planned(count: int, search: Search, case: Case, *, settles: bool) -> Planned:
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
