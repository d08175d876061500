"""Predict training on a machine: the fastest plan that fits, or the memory that is missing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from rp_engine.estimates import MemoryForecast, in_place
from rp_sched import (
    GRAPH_GAIN,
    Assigner,
    LayerCost,
    Limits,
    PricedPlan,
    Resource,
    Search,
    Task,
    Timeline,
    counts_of,
    fastest_count,
    simulate,
    simulated_ms,
)

from rp_estimate.machine.hardware import Machine, memory_bytes_for
from rp_estimate.machine.network import ONE_MACHINE, Network
from rp_estimate.workload import Workload, size_of

Bound = Resource | Literal["network"]
# The number of calls to simulate for the memory that devices use.
_CALLS = 2
# A plan this near to the bound of all plans is not improved on; numbers of microbatches as near are equal, too.
_NEAR = 0.01
# Significant digits of the bytes that an optimizer moves for a weight: states that differ by less share a search.
_DIGITS = 4
# Searches that are kept, with all of their plans, for cases with equal costs and limits.
_MOST_SEARCHES = 64

# The number of microbatches on each machine, with the costs and limits that it leads to.
_Problems = tuple[tuple[int, tuple[LayerCost, ...], Limits], ...]


@dataclass(frozen=True, slots=True)
class Case:
    """The question: training on a machine with `batch` sequences in a step.

    `microbatches`: None to choose the number whose plan is fastest. `network`: how many such machines share a
    step, its batch and its microbatches.
    """

    workload: Workload
    machine: Machine
    batch: int
    microbatches: int | None = None
    network: Network = ONE_MACHINE

    @property
    def machines(self) -> int:
        """The number of machines."""
        return self.network.machines

    def launched(self, launch: str) -> Case:
        """Return this case with devices that are told so what to compute."""
        how = replace(self.workload.how, launch=launch)
        return replace(self, workload=replace(self.workload, how=how))

    def counts(self) -> dict[int, int]:
        """Return the numbers of microbatches to try, by the number on each machine, fewest first."""
        if self.microbatches is not None:
            return {math.ceil(self.microbatches / self.machines): self.microbatches}
        own = counts_of(math.ceil(self.batch / self.machines))
        return {count: min(count * self.machines, self.batch) for count in own}


@dataclass(frozen=True)
class Planned:
    """A plan that fits the devices, with its times and bytes.

    `microbatches`: of all machines. `sequences`: of the largest microbatch. `machine_ms`: the time of a step
    without the network. `working_bytes`: a device's workspace; `pool_bytes`: that of graphs, which is their own.
    `tasks`: of one call. `traffic_bytes`: bytes that a machine sends in a step, and receives; `network_ms`: the
    time that this takes. `disk_ms`: the time in which a disk reads and writes the optimizer's state;
    `waits_for_disk`: whether nothing else is done meanwhile. `read_bytes`: frozen weights that are read from a
    disk in a step; `read_ms`: the time that this takes; `first_read_ms`: of it, for each device's first task.
    """

    priced_plan: PricedPlan
    microbatches: int
    sequences: int
    machine_ms: float
    working_bytes: int
    devices: int
    tasks: tuple[Task, ...]
    pool_bytes: int = 0
    traffic_bytes: int = 0
    network_ms: float = 0.0
    disk_ms: float = 0.0
    waits_for_disk: bool = False
    read_bytes: int = 0
    read_ms: float = 0.0
    first_read_ms: float = 0.0

    @property
    def ms(self) -> float:
        """The time of a step: traffic overlaps with everything else, so the longer of both counts.

        So does the disk of asynchronous steps; synchronous ones wait for it.
        """
        waited = self.disk_ms if self.waits_for_disk else 0.0
        return max(self.machine_ms + waited, self.network_ms, self.all_disk_ms)

    @property
    def later_read_ms(self) -> float:
        """The time to read what computing may hide."""
        return self.read_ms - self.first_read_ms

    @property
    def unread_ms(self) -> float:
        """The time for which the busiest resource but disks is busy."""
        loads_ms = self.priced_plan.loads_ms(self.devices)
        return max(ms for name, ms in loads_ms.items() if name != "disk")

    @property
    def all_disk_ms(self) -> float:
        """The time for which disks are busy in a step."""
        return self.disk_ms + self.read_ms

    @property
    def bound_by(self) -> Bound:
        """The resource that is busy for the longest time."""
        longest = max(self.machine_ms, self.network_ms, self.all_disk_ms)
        if longest == self.machine_ms:
            return self.priced_plan.bottleneck(self.devices)
        return "disk" if longest == self.all_disk_ms else "network"

    @cached_property
    def device_bytes(self) -> int:
        """The most bytes on a device at once, with workspace."""
        assigner = Assigner(self.devices)
        calls = [assigner.assign(self.priced_plan) for _ in range(_CALLS)]
        return (
            max(_timeline(self.priced_plan, calls, self.devices).peak_bytes) + self.working_bytes + self.pool_bytes
        )

    @cached_property
    def graph_bytes(self) -> int:
        """The bytes that graphs take on a device beside what Python's runs do."""
        costs = self.priced_plan.loads.costs
        layers = [task.layers for task in self.tasks if task.adds_gradients]
        return self.pool_bytes + max((sum(costs[at].graph_bytes for at in one) for one in layers), default=0)

    def timeline(self) -> Timeline:
        """Return one call of the plan, simulated."""
        return _timeline(self.priced_plan, [self.tasks], self.devices)

    def busy_ms(self) -> dict[Bound, float]:
        """Return the time for which each resource is busy in a step."""
        busy: dict[Bound, float] = {**self.priced_plan.loads_ms(self.devices)}
        others: dict[Bound, float] = {"network": self.network_ms, "disk": self.all_disk_ms}
        return {**busy, **{name: ms for name, ms in others.items() if ms}}


@dataclass(frozen=True, slots=True)
class Foretold:
    """The answer to a case. `planned`: None if no plan fits the devices. `forecast`: host memory, under the plan.

    `device_short_bytes`: the bytes that a device lacks for any plan; 0 if one fits.
    """

    case: Case
    planned: Planned | None
    forecast: MemoryForecast
    device_short_bytes: int = 0

    @property
    def fits(self) -> bool:
        """Whether devices and host have enough memory, and the disk enough space."""
        return self.planned is not None and self.forecast.fits and not self.disk_short_bytes

    @property
    def disk_short_bytes(self) -> int:
        """The bytes that the disk lacks for the optimizer's state and frozen weights; 0 if it needs no more."""
        workload = self.case.workload
        drive = workload.how.drive
        frozen = workload.frozen_bytes if drive.is_there and workload.how.frozen is drive else 0
        return max(workload.disk_bytes(self.case.machines) + frozen - drive.total_bytes, 0)

    def gains_over(self, eager: Foretold) -> bool:
        """Whether graphs, which launch this case, make a step as much shorter as the engine asks for."""
        mine, other = self.planned, eager.planned
        return mine is not None and other is not None and mine.ms <= (1 - GRAPH_GAIN) * other.ms

    @property
    def hiding_batch(self) -> int:
        """The batch from which on something else takes longer than what is read meanwhile; 0 without a plan."""
        planned = self.planned
        return 0 if planned is None else math.ceil(self.case.batch * planned.later_read_ms / planned.unread_ms)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of the plan; 0 without one."""
        return 0.0 if self.planned is None else self.tokens * 1e3 / self.planned.ms

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.case.batch * self.case.workload.how.sequence


def foretell(case: Case, *, settles: bool = True) -> Foretold:
    """Plan a case and forecast its memory. `settles`: search until the end, and simulate the result.

    With ``compute="auto"`` the answer's case has what is chosen. So it has with ``launch="auto"``: graphs where
    launching bounds a call, and they make it shorter by the part that the engine asks for. Graphs that do not fit
    are none, as in the engine; CPU devices have none. Cases that differ in host memory only often lead to the same
    search, which is then made once.
    """
    if not case.machine.has_graphs:
        return _with_compute(case.launched("eager"), settles=settles)
    if case.workload.how.chooses_launch:
        return _with_launch(case, settles=settles)
    answer = _with_compute(case, settles=settles)
    if case.workload.how.launch == "graphs" and answer.planned is None:
        return _with_compute(case.launched("eager"), settles=settles)
    return answer


def _with_launch(case: Case, *, settles: bool) -> Foretold:
    eager = _with_compute(case.launched("eager"), settles=settles)
    if eager.planned is None or eager.planned.bound_by != "GIL":
        return eager
    by_graphs = _with_compute(case.launched("graphs"), settles=settles)
    return by_graphs if by_graphs.gains_over(eager) else eager


def _with_compute(case: Case, *, settles: bool) -> Foretold:
    answer = _foretold(replace(case, workload=case.workload.on(case.machine.card)), settles=settles)
    how = answer.case.workload.how
    if not how.chooses_compute or how.compute != "fp8" or answer.forecast.fits:
        return answer
    # As the engine does where the host has no room for codes.
    workload = replace(case.workload, how=replace(how, compute="fp8-cast"))
    return _foretold(replace(case, workload=workload), settles=settles)


def _foretold(case: Case, *, settles: bool) -> Foretold:
    counts = case.counts()
    problems = tuple((own, *_problem(case, size_of(case.batch, count))) for own, count in counts.items())
    best = _fastest(problems, case.machine.devices)
    own = list(counts)[-1] if best is None else best[0]
    count = counts[own]
    planned = None if best is None else _planned(count, best[1], case, settles=settles)
    tasks = () if planned is None else planned.tasks
    forecast = case.workload.forecast(tasks, own, size_of(case.batch, count), case.machine, case.machines)
    short = 0 if planned else min(_lacking_bytes(case, size_of(case.batch, one)) for one in counts.values())
    return Foretold(case, planned, forecast, short)


@lru_cache(_MOST_SEARCHES)
def _fastest(problems: _Problems, devices: int) -> tuple[int, Search] | None:
    by_count = {own: (costs, limits) for own, costs, limits in problems}
    return fastest_count(by_count, by_count.__getitem__, devices=devices, mode="fused", tolerance=_NEAR)


def could_fit(case: Case) -> bool:
    """Return whether host memory is enough without activations, as it must be under any plan."""
    return case.workload.forecast((), 1, 0, case.machine, case.machines).fits


def _lacking_bytes(case: Case, sequences: int) -> int:
    """Return the bytes that a device lacks to run each layer alone, with gradients, activations and workspace."""
    costs = case.workload.costs(sequences, case.machine.card)
    most = max(cost.weight_bytes + cost.gradient_bytes + cost.kept_bytes for cost in costs)
    least = memory_bytes_for(most + case.workload.working_bytes(sequences))
    return max(least - case.machine.card.memory_bytes, 1)


def _problem(case: Case, sequences: int) -> tuple[tuple[LayerCost, ...], Limits]:
    workload, machine = case.workload, case.machine
    is_double = workload.is_double(machine.ram, case.machines)
    costs = workload.costs(sequences, machine.card)
    limits = machine.limits(
        workload.working_bytes(sequences) + workload.pool_bytes(sequences),
        optimizer_bytes=float(f"{workload.step_bytes(case.machines):.{_DIGITS}g}"),
        double_buffer=is_double,
    )
    if workload.how.master_kind == "split" and not is_double:
        limits = replace(limits, host=in_place(limits.host))
    if workload.how.frozen.is_there:
        limits = replace(limits, host=replace(limits.host, disk_gb_s=workload.how.frozen.read_gb_s))
    return tuple(costs), limits


def _planned(count: int, search: Search, case: Case, *, settles: bool) -> Planned:
    devices = case.machine.devices
    priced = search.settle() if settles else search.best
    tasks = Assigner(devices).assign(priced)
    sequences = size_of(case.batch, count)
    traffic, read = case.workload.traffic_bytes(case.machines, tasks), case.workload.read_bytes(tasks)
    # The last one that is noted for a device is its first.
    first = {task.device: task for task in reversed(tasks)}
    disk = case.workload.how.frozen
    return Planned(
        priced_plan=priced,
        microbatches=count,
        sequences=sequences,
        machine_ms=_simulated_ms(search, devices) if settles else search.best_ms,
        working_bytes=case.workload.working_bytes(sequences),
        devices=devices,
        tasks=tasks,
        pool_bytes=case.workload.pool_bytes(sequences),
        traffic_bytes=traffic,
        network_ms=traffic / (case.network.gb_s * 1e6),
        disk_ms=case.workload.how.drive.ms(case.workload.disk_bytes(case.machines)),
        waits_for_disk=case.workload.how.is_sync,
        read_bytes=read,
        read_ms=disk.read_ms(read),
        first_read_ms=disk.read_ms(case.workload.read_bytes(tuple(first.values()))),
    )


def _simulated_ms(search: Search, devices: int) -> float:
    # Comparing it with its rivals has simulated it, where there was something to compare.
    return search.promised_ms if search.is_simulated else simulated_ms(search.best, devices)


def _timeline(priced: PricedPlan, calls: Sequence[Sequence[Task]], devices: int) -> Timeline:
    return simulate(
        calls,
        priced.loads.costs,
        devices=devices,
        microbatches=priced.microbatches,
        mode=priced.mode,
        limits=priced.loads.limits,
    )
