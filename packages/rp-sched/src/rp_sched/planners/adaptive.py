"""The strategy `adaptive`: an anytime search for the plan with the shortest time per call."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from rp_sched.planners.local_search import EQUAL, MOST_STEPS, Finder
from rp_sched.planners.roundrobin import RoundRobin
from rp_sched.planners.search_space import Space
from rp_sched.problem.checks import non_negative
from rp_sched.problem.costs import LayerCost
from rp_sched.problem.limits import NO_LIMITS, Limits
from rp_sched.problem.modes import Mode
from rp_sched.problem.plan import Plan
from rp_sched.problem.validation import check_problem
from rp_sched.simulation.makespan import PricedPlan
from rp_sched.simulation.resources import Resource
from rp_sched.simulation.simulate import STEADY_CALLS, simulated_ms
from rp_sched.simulation.stage_costs import Loads

# For 100 layers these take a few hundredths of a second and find most of the possible gain.
QUICK_PLANS = 12
# Stop trying fewer devices when all searches together have simulated this many steps (see `local_search`).
ALL_STEPS = 3 * MOST_STEPS

# The most steps that `Search.settle` simulates; 30,000 take about a second.
SETTLED_STEPS = 25_000
# A plan is chosen in place of another if it is expected to be faster by this fraction.
GAIN = 0.05
# The number of fast plans among the candidates.
OTHERS = 4
# Up to this many devices, plans for every smaller number are tried; above it, only for some.
EACH_DEVICES = 8


class Search:
    """An anytime search for the plan with the shortest steady-state time per call.

    >>> search = Search([LayerCost(1.0, weight_bytes=1)] * 12, devices=2, microbatches=4, mode="fused")
    >>> before = search.best_ms
    >>> while not search.advance(budget_ms=5.0):
    ...     pass
    >>> search.best_ms <= before
    True

    `best`: the `PricedPlan` of the best plan so far; set from the start. `best_ms`: its steady-state time per call
    (see `PricedPlan.steady_ms`). `steps`: the work of the searches that are over (one per number of devices), in
    simulated steps of one microbatch in one stage. `first`: plans within the limits to start from, in addition to
    that of `roundrobin`. `quick_plans`: how many more plans the constructor tries. `tolerance`: the search ends
    with a plan that exceeds the bound of all plans by at most this fraction, and looks for no simpler one.

    Up to 8 layers, 3 devices and 16 microbatches (more microbatches for fewer layers: `EXACT_SIZE` in
    `rp_sched.planners.local_search`) the search tries every plan in `rp_sched.planners.search_space`, which may
    take minutes. Larger problems get a bounded search, which rarely takes a second. Plans for fewer devices are
    tried if their bound allows a better time: for every number up to `EACH_DEVICES`, so that there a finished
    search never gets slower with one more device, and for a few larger ones, until it reaches `ALL_STEPS`.

    Raises `Infeasible` if no plan is within the limits, `TypeError` or `ValueError` for invalid arguments.
    """

    def __init__(
        self,
        costs: Sequence[LayerCost],
        *,
        devices: int,
        microbatches: int,
        mode: Mode,
        limits: Limits = NO_LIMITS,
        first: Sequence[Plan] = (),
        quick_plans: int = QUICK_PLANS,
        tolerance: float = 0.0,
    ) -> None:
        check_problem(costs, devices=devices, microbatches=microbatches, mode=mode)
        limits.check_devices(devices)
        self._loads = Loads(costs, limits)
        self._loads.check_feasible(mode)
        self._mode: Mode = mode
        self._microbatches = microbatches
        self._devices = devices
        self._tolerance = non_negative("tolerance", tolerance)
        self.is_done = False
        self.steps = 0
        self._simulated_ms: float | None = None
        self._is_settled = False
        for plan in first:
            plan.check(len(costs), mode)
            plan.check_microbatches(microbatches)
        finder = self._finder(devices, first)
        self.best, self.best_ms = self._best_priced_plan(finder), finder.best_ms
        self._first_finder = finder
        self._source = (finder, finder.best)
        self._run = self._all(finder)
        self._advance(quick_plans, float("inf"))

    def advance(self, *, budget_ms: float) -> bool:
        """Search for about `budget_ms`; return whether the search is finished.

        >>> Search([LayerCost(1.0)], devices=1, microbatches=1, mode="infer").advance(budget_ms=1.0)
        True
        """
        self._advance(None, time.perf_counter() + non_negative("budget_ms", budget_ms) / 1e3)
        return self.is_done

    def finish(self) -> PricedPlan:
        """Search to the end; return the best priced plan.

        >>> Search([LayerCost(1.0)], devices=1, microbatches=1, mode="infer").finish().plan
        Plan(F[0:1])
        """
        self._advance(None, float("inf"))
        return self.best

    def settle(self) -> PricedPlan:
        """Search to the end, then compare the best plan with rivals by `simulated_ms`; return the fastest.

        >>> Search([LayerCost(1.0)], devices=1, microbatches=1, mode="infer").settle().plan
        Plan(F[0:1])

        The search prices a shared resource by its total load, which is too low where many tasks need it at once.
        The rivals are the plan of `roundrobin` and the fastest plans that divide microbatches in other ways, or
        not at all. A rival whose simulation would exceed `SETTLED_STEPS` steps in total is skipped.
        """
        self.finish()
        if not (self._is_settled or self._loads.shares_nothing):
            self._compare(self._rivals())
        self._is_settled = True
        return self.best

    @property
    def promised_ms(self) -> float:
        """The predicted time per call of the best plan: simulated once `settle` is finished, until then `best_ms`.

        >>> Search([LayerCost(1.0)], devices=1, microbatches=2, mode="infer").promised_ms
        2.0
        """
        return self.best_ms if self._simulated_ms is None else self._simulated_ms

    @property
    def is_simulated(self) -> bool:
        """Whether `promised_ms` is by `simulate`: after `settle`, unless nothing is shared or it would take long.

        >>> Search([LayerCost(1.0)], devices=1, microbatches=2, mode="infer").is_simulated
        False
        """
        return self._simulated_ms is not None

    def candidates(self) -> list[PricedPlan]:
        """Return the best plan, the rivals of `settle`, other fast plans, and one that uses all devices.

        >>> search = Search([LayerCost(1.0)] * 4, devices=2, microbatches=4, mode="fused")
        >>> search.candidates()[0] is search.best
        True
        """
        full = self._using_all()
        more = [*self._rivals(), *map(self._priced, self.others(OTHERS)), *([] if full is None else [full])]
        plans = {priced.plan: priced for priced in (self.best, *more)}
        return [priced for priced in plans.values() if self._loads.fits_host(priced.plan, self._microbatches)]

    @property
    def choice(self) -> PricedPlan:
        """The best plan, unless it leaves devices idle and one that uses all is slower by less than `GAIN`.

        >>> Search([LayerCost(1.0)] * 4, devices=2, microbatches=4, mode="fused").choice.idle(2)
        0
        """
        full = self._using_all() or self.best
        is_near = self.best_ms >= full.steady_ms(self._devices) * (1 - GAIN)
        return full if is_near else self.best

    @property
    def idle_because(self) -> Resource | Literal["nothing fits"]:
        """What bounds the fastest plan of those with a task for each device.

        "nothing fits": there is no such plan.

        >>> Search([LayerCost(1.0)] * 4, devices=2, microbatches=4, mode="fused").idle_because
        'device'
        """
        full = self._using_all()
        return "nothing fits" if full is None else full.bottleneck(self._devices)

    def _using_all(self) -> PricedPlan | None:
        if not self.best.idle(self._devices):
            return self.best
        tried = [*self._first_finder.rivals(), *map(self._priced, self._first_finder.using_all(OTHERS))]
        full = {
            priced.plan: (priced.steady_ms(self._devices), priced)
            for priced in tried
            if not priced.idle(self._devices) and self._loads.fits_host(priced.plan, self._microbatches)
        }
        least_ms = min((ms for ms, _ in full.values()), default=0.0)
        near = (priced for ms, priced in full.values() if ms <= least_ms * (1 + EQUAL))
        return min(near, key=lambda priced: len(priced.jobs), default=None)

    def _priced(self, plan: Plan) -> PricedPlan:
        return PricedPlan.unchecked(plan, self._loads, self._mode, self._microbatches)

    def _rivals(self) -> list[PricedPlan]:
        published = RoundRobin().plan(
            self._loads, devices=self._devices, microbatches=self._microbatches, mode=self._mode
        )
        rivals = {rival.plan: rival for rival in (self._priced(published), *self._first_finder.rivals())}
        allowed = (rival for rival in rivals.values() if self._loads.fits_host(rival.plan, self._microbatches))
        return [rival for rival in allowed if rival.plan != self.best.plan]

    def _compare(self, rivals: Sequence[PricedPlan]) -> None:
        left = SETTLED_STEPS - STEADY_CALLS * self.best.steps
        if left < 0:
            return
        fastest, fastest_ms = self.best, simulated_ms(self.best, self._devices)
        for rival in rivals:
            steps = STEADY_CALLS * rival.steps
            if steps > left or rival.bound_ms(self._devices) >= fastest_ms * (1 - self._tolerance):
                continue
            left -= steps
            rival_ms = simulated_ms(rival, self._devices)
            if rival_ms < fastest_ms * (1 - EQUAL):
                fastest, fastest_ms = rival, rival_ms
        if fastest is not self.best:
            self.best, self.best_ms = fastest, fastest.steady_ms(self._devices)
        self._simulated_ms = fastest_ms

    def others(self, count: int) -> list[Plan]:
        """Return the fastest plans tried, fastest first, for planners that need alternatives to `best`."""
        return self._first_finder.ranked(count)

    def _advance(self, plans: int | None, until: float) -> None:
        while not self.is_done and plans != 0:
            self.is_done = next(self._run, self) is self
            plans = None if plans is None else plans - 1
            if time.perf_counter() >= until:
                return

    def _all(self, finder: Finder) -> Iterator[None]:
        devices = finder.devices
        while True:
            for _ in finder.run():
                self._adopt(finder)
                yield
            self._adopt(finder)
            devices = fewer(devices)
            self.steps += finder.steps
            if devices == 0 or self.steps > ALL_STEPS or self._is_bound(devices):
                return
            finder = self._finder(devices, ())

    def _finder(self, devices: int, first: Sequence[Plan]) -> Finder:
        return Finder(
            self._loads_of(devices),
            mode=self._mode,
            devices=devices,
            microbatches=self._microbatches,
            first=first,
            tolerance=self._tolerance,
        )

    def _is_bound(self, devices: int) -> bool:
        """Return whether no plan for so few devices can be faster than the best one."""
        return self._bound_ms(devices) >= self.best_ms * (1 - max(self._tolerance, EQUAL))

    def _bound_ms(self, devices: int) -> float:
        loads = self._loads_of(devices)
        return Space(loads, mode=self._mode, devices=devices, microbatches=self._microbatches).bound_ms()

    def _loads_of(self, devices: int) -> Loads:
        """Return the loads if only the first devices are used; they may have more memory than the others."""
        limits = self._loads.limits.first(devices)
        return self._loads if limits is self._loads.limits else Loads(self._loads.costs, limits)

    def _best_priced_plan(self, finder: Finder) -> PricedPlan:
        if finder.devices == self._devices:
            return finder.best
        plan = replace(finder.best.plan, devices=finder.devices)
        return PricedPlan.unchecked(plan, self._loads, self._mode, self._microbatches)

    def _adopt(self, finder: Finder) -> None:
        """Adopt a finder's best plan if it is faster, or if it replaced the plan adopted from the same finder."""
        priced, (source, adopted) = finder.best, self._source
        better = finder.best_ms < self.best_ms * (1 - EQUAL)
        if better or (source is finder and adopted is not priced):
            self._source = (finder, priced)
            self.best, self.best_ms = self._best_priced_plan(finder), finder.best_ms


def fewer(devices: int) -> int:
    """Return the next smaller number of devices to plan for.

    >>> fewer(64), fewer(9), fewer(8)
    (48, 8, 7)
    """
    return devices - 1 if devices <= EACH_DEVICES else max(devices * 3 // 4, EACH_DEVICES)
