"""`PricedPlan`: the simulated time of a plan, for one call alone and in the steady state."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rp_sched.problem import bounds
from rp_sched.problem.checks import whole
from rp_sched.problem.costs import LayerCost
from rp_sched.problem.limits import NO_LIMITS, Limits
from rp_sched.problem.modes import Mode
from rp_sched.problem.plan import Plan
from rp_sched.problem.tasks import check_tasks, phases
from rp_sched.simulation.clock import Clock
from rp_sched.simulation.resources import Resource, total
from rp_sched.simulation.stage_costs import Brief, Loads, StageJobs, saved_layers

# The most calls simulated for the steady state. Nearly always the devices return to an earlier state much sooner;
# if not, the mean of the second half is used.
MOST_CALLS = 64


class PricedPlan:
    """A plan with its costs, ready to be simulated or assigned to devices.

    >>> priced = PricedPlan(Plan(fused=range(0, 2)), [LayerCost(1.0)] * 2, mode="fused", microbatches=4)
    >>> priced.steady_ms(devices=1), priced.alone_ms(devices=1)
    (24.0, 24.0)

    The rules of the simulation are in `rp_sched.simulation.clock`; a call takes at least as long as it keeps what
    devices share busy. `simulate` divides that at each moment, which takes far longer.

    Raises `InvalidPlan` for a plan that does not suit the costs, the mode or the microbatches.
    """

    def __init__(
        self, plan: Plan, costs: Sequence[LayerCost], *, mode: Mode, microbatches: int, limits: Limits = NO_LIMITS
    ) -> None:
        plan.check(len(costs), mode)
        plan.check_microbatches(microbatches)
        check_tasks(plan, microbatches)
        self._set(plan, Loads(costs, limits), mode, microbatches)

    @classmethod
    def unchecked(cls, plan: Plan, loads: Loads, mode: Mode, microbatches: int) -> "PricedPlan":
        """The priced plan of a plan known to be valid. Skips the checks, since planners make thousands."""
        priced = cls.__new__(cls)
        priced._set(plan, loads, mode, microbatches)
        return priced

    def _set(self, plan: Plan, loads: Loads, mode: Mode, microbatches: int) -> None:
        self.plan = plan
        self.loads = loads
        self.mode: Mode = mode
        self.microbatches = microbatches
        pieces = list(_pieces(plan, loads, mode, microbatches))
        self.jobs = [job for piece in pieces for job in piece.jobs]
        self._brief = [brief for piece in pieces for brief in piece.brief]
        self.work = total(piece.work for piece in pieces)

    def used(self, devices: int) -> int:
        """How many of `devices` devices the plan uses."""
        return min(devices, self.plan.devices or devices)

    def idle(self, devices: int) -> int:
        """How many of `devices` devices have no task in a call.

        >>> groups = range(0, 2), range(2, 4)
        >>> plan = Plan(fused=range(0, 2), groups=groups)
        >>> PricedPlan(plan, [LayerCost(1.0)] * 2, mode="fused", microbatches=4).idle(devices=3)
        1
        """
        return devices - min(self.used(devices), len(self.jobs))

    @property
    def fits(self) -> bool:
        """Whether devices and host have memory for it, and no stage is divided that may not be.

        >>> layers, limits = [LayerCost(1.0, weight_bytes=10)] * 2, Limits(device_memory_bytes=30)
        >>> PricedPlan(Plan(fused=range(2)), layers, mode="fused", microbatches=4, limits=limits).fits
        False
        """
        return self.loads.fits_host(self.plan, self.microbatches) and all(
            self.loads.fits(kind, stage) and (len(groups) < 2 or self.loads.may_divide(stage))
            for kind, stages, groups in self.plan.phases()
            for stage in stages
        )

    @property
    def steps(self) -> int:
        """The number of steps of one call; a step is one microbatch in one stage."""
        return sum(len(job.microbatches) for job in self.jobs)

    @property
    def busy_ms(self) -> float:
        """The compute time of one call, summed over devices."""
        return self.work.busy_ms

    def alone_ms(self, devices: int) -> float:
        """The time of one call on idle devices."""
        clock = Clock.idle(whole("devices", devices, least=1, bound=bounds.DEVICES))
        self.loads.limits.check_devices(devices)
        self.play(clock)
        return max(clock.over_ms, clock.results_ms, shared_ms([self], devices))

    def steady_ms(self, devices: int, *, most_calls: int = MOST_CALLS) -> float:
        """The steady-state time per call, from launch to launch, of calls that follow each other.

        It is the mean over the calls between two launches with the same device state, to the nanosecond. If no
        state recurs within `most_calls`, it is the mean over their second half.
        """
        whole("most_calls", most_calls, least=1, bound=bounds.CALLS)
        return pace([self], devices, most_calls=most_calls).call_ms

    def bound_ms(self, devices: int) -> float:
        """A lower bound on `steady_ms`, for any assignment to devices.

        It is the largest of: the compute time divided by the devices; the link times divided by the links; the
        time from launch to losses, and half the time to the end, if every task had a device of its own.
        """
        fastest = min(lane.slowdown for lane in self.loads.resources(self.used(devices)).lanes)
        return max(self.load_bound_ms(devices), min(fastest, 1.0) * self._path_bound_ms())

    def load_bound_ms(self, devices: int) -> float:
        """The part of `bound_ms` from the work of each resource."""
        return max(self.loads_ms(devices).values())

    def loads_ms(self, devices: int) -> dict[Resource, float]:
        """How long a call keeps each kind of resource busy, if the work is spread evenly over devices and links.

        >>> priced = PricedPlan(Plan(fused=range(0, 2)), [LayerCost(1.0)] * 2, mode="fused", microbatches=4)
        >>> priced.loads_ms(devices=1)["device"]
        24.0
        """
        used = self.used(whole("devices", devices, least=1, bound=bounds.DEVICES))
        return self.loads.resources(used).loads_ms(self.work, used)

    def bottleneck(self, devices: int) -> Resource:
        """The resource that a call keeps busy for the longest time."""
        loads_ms = self.loads_ms(devices)
        return max(loads_ms, key=loads_ms.__getitem__)

    def _path_bound_ms(self) -> float:
        ready = [0.0] * self.microbatches
        results = over = 0.0
        for gate, first, stop, ms, hop_ms, after_ms in self._brief:
            if gate:
                ready = [results] * self.microbatches
            t = 0.0
            for m in range(first, stop):
                t = max(t, ready[m]) + ms
                ready[m] = t + hop_ms
            over, results = max(over, t), max(results, t + after_ms)
        return max(results, over / 2)

    def play(self, clock: Clock) -> list[int]:
        """Simulate one call, launched at the clock's zero; return the device of each job."""
        return _play(self, self._brief, clock) if self.loads.plain else _play_all(self, clock)


class Pace(NamedTuple):
    """The steady-state time per call, and the number of calls simulated to measure it."""

    call_ms: float
    calls: int


def pace(priced_plans: Sequence[PricedPlan], devices: int, *, most_calls: int = MOST_CALLS) -> Pace:
    """The steady-state time of one call of each priced plan, called in turn; see `PricedPlan.steady_ms`."""
    used = [priced.used(whole("devices", devices, least=1, bound=bounds.DEVICES)) for priced in priced_plans]
    for priced in priced_plans:
        priced.loads.limits.check_devices(max(used))
    clock = Clock.idle(max(used))
    least_ms = shared_ms(priced_plans, devices)
    named = min(used) < max(used) or any(priced.plan.in_turn for priced in priced_plans)
    seen: dict[object, int] = {}
    launches = [0.0]
    for call in range(most_calls):
        state = clock.rounded_state(named=named)
        if state in seen:
            first = seen[state]
            return Pace(max((launches[call] - launches[first]) / (call - first), least_ms), call)
        seen[state] = call
        launches.append(launches[-1] + sum(_next(priced, clock) for priced in priced_plans))
    half = most_calls // 2
    return Pace(max((launches[most_calls] - launches[half]) / (most_calls - half), least_ms), most_calls)


def shared_ms(priced_plans: Sequence[PricedPlan], devices: int) -> float:
    """How long one call of each priced plan keeps what devices share busy: the GIL, host memory and so on."""
    if all(priced.loads.shares_nothing for priced in priced_plans):
        return 0.0
    sums: dict[Resource, float] = {}
    for priced in priced_plans:
        for resource, ms in priced.loads_ms(devices).items():
            sums[resource] = sums.get(resource, 0.0) + ms
    return max(ms for resource, ms in sums.items() if resource not in ("device", "link"))


def _next(priced: PricedPlan, clock: Clock) -> float:
    priced.play(clock)
    return clock.next_call()


def _pieces(plan: Plan, loads: Loads, mode: Mode, microbatches: int) -> Iterator[StageJobs]:
    saved = saved_layers(plan)
    for kind, stages, groups in phases(plan, microbatches):
        for index, layers in enumerate(stages):
            # In mode `train` the caller has all outputs before it starts the backward pass.
            gate = mode == "train" and kind.runs_backward and index == 0
            yield loads.piece(kind, layers, groups, saved, gate)


def _play(priced: PricedPlan, brief: Sequence[Brief], clock: Clock) -> list[int]:
    """`_play_all` where only devices take time. The innermost loop of the planners, hence inlined."""
    free = clock.free
    used = priced.used(len(free))
    in_turn, turn = priced.plan.in_turn, clock.turn % used
    ready = [0.0] * priced.microbatches
    results = over = 0.0
    taken: list[int] = []
    for gate, first, stop, ms, hop_ms, after_ms in brief:
        if gate:
            ready = [results] * priced.microbatches
        if in_turn:
            device = turn
            turn = (turn + 1) % used
        else:
            device = free.index(min(free if used == len(free) else free[:used]))
        taken.append(device)
        t = free[device]
        for m in range(first, stop):
            r = ready[m]
            if r > t:
                t = r
            t += ms
            ready[m] = t + hop_ms
        free[device] = t
        if t > over:
            over = t
        if t + after_ms > results:
            results = t + after_ms
    clock.turn, clock.results_ms, clock.over_ms = turn, results, over
    return taken


def _play_all(priced: PricedPlan, clock: Clock) -> list[int]:
    """Simulate one call with transfers, additions and the optimizer."""
    used = priced.used(len(clock.free))
    resources = priced.loads.resources(len(clock.free))
    differ = bool(priced.loads.limits.devices)
    clock.turn %= used
    ready = [0.0] * priced.microbatches
    taken: list[int] = []
    for job in priced.jobs:
        if job.gate:
            ready = [clock.results_ms] * priced.microbatches
        if priced.plan.in_turn:
            device, clock.turn = clock.turn, (clock.turn + 1) % used
        elif differ:
            device = clock.first_done(job.load, len(job.microbatches), resources.lanes[:used])
        else:
            device = clock.first_free(used)
        taken.append(device)
        clock.run(job.load, job.microbatches, device, ready, resources)
    return taken
