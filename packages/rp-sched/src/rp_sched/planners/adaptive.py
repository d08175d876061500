"""The strategy `adaptive`: a search that has an answer from the start, and better ones as it goes on."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rp_sched.planners.local_search import EQUAL, MOST_STEPS, Finder
from rp_sched.planners.search_space import Space
from rp_sched.problem.checks import part
from rp_sched.problem.costs import NO_LIMITS, LayerCost, Limits
from rp_sched.problem.modes import Mode
from rp_sched.problem.plan import Plan
from rp_sched.problem.validation import check_problem
from rp_sched.simulation.makespan import Course
from rp_sched.simulation.stage_costs import Loads

# In a few hundredths of a second for a hundred layers these find most of what there is to gain.
QUICK_PLANS = 12
# Plans for fewer devices are tried until all searches together have simulated so many steps (see `local_search`).
ALL_STEPS = 8 * MOST_STEPS


class Search:
    """The search for the plan whose calls follow each other fastest.

    >>> search = Search([LayerCost(1.0, weight_bytes=1)] * 12, devices=2, microbatches=4, mode="fused")
    >>> before = search.best_ms
    >>> while not search.advance(budget_ms=5.0):
    ...     pass
    >>> search.best_ms <= before
    True

    `best`: the plan so far, in its `Course`; there is one from the start. `best_ms`: the time of a call in the
    steady state (see `Course.steady_ms`). Of up to 8 layers, 3 devices and 16 microbatches (of fewer layers, more:
    `EXACT_SIZE` of `rp_sched.planners.local_search`) nothing is left out of what `rp_sched.planners.search_space`
    describes, which may take minutes; larger problems get a bounded search, which rarely takes a second. Where
    that could be better, plans for fewer devices are tried, so one more device never hurts once both are over,
    unless they are so large that their bound ends them (`ALL_STEPS`). `first`: plans to begin with, which keep the
    limits, beside the published one. `quick_plans`: how many more are tried at once.

    Raises `Infeasible` if no plan keeps the limits, `TypeError` or `ValueError` for arguments that cannot be.
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
    ) -> None:
        check_problem(costs, devices=devices, microbatches=microbatches, mode=mode)
        self._loads = Loads(costs, limits)
        self._loads.check_feasible(mode)
        self._mode: Mode = mode
        self._microbatches = microbatches
        self._devices = devices
        self.is_done = False
        for plan in first:
            plan.check(len(costs), mode)
            plan.check_microbatches(microbatches)
        finder = self._finder(devices, first)
        self.best, self.best_ms = self._found(finder), finder.best_ms
        self._first_finder = finder
        self._source = (finder, finder.best)
        self._run = self._all(finder)
        self._go(quick_plans, float("inf"))

    def advance(self, *, budget_ms: float) -> bool:
        """Look further for about so long; whether there is nothing left to look at.

        >>> Search([LayerCost(1.0)], devices=1, microbatches=1, mode="infer").advance(budget_ms=1.0)
        True
        """
        self._go(None, time.perf_counter() + part("budget_ms", budget_ms) / 1e3)
        return self.is_done

    def finish(self) -> Course:
        """Look at all there is to look at; the best.

        >>> Search([LayerCost(1.0)], devices=1, microbatches=1, mode="infer").finish().plan
        Plan(F[0:1])
        """
        self._go(None, float("inf"))
        return self.best

    def others(self, count: int) -> list[Plan]:
        """The fastest plans that are not the best, for searches that want more than that."""
        return self._first_finder.ranked(count)

    def _go(self, plans: int | None, until: float) -> None:
        while not self.is_done and plans != 0:
            self.is_done = next(self._run, self) is self
            plans = None if plans is None else plans - 1
            if time.perf_counter() >= until:
                return

    def _all(self, finder: Finder) -> Iterator[None]:
        devices, steps = finder.devices, 0
        while True:
            for _ in finder.run():
                self._take(finder)
                yield
            self._take(finder)
            devices -= 1
            steps += finder.steps
            if devices == 0 or steps > ALL_STEPS or self._bound_ms(devices) >= self.best_ms * (1 - EQUAL):
                return
            finder = self._finder(devices, ())

    def _finder(self, devices: int, first: Sequence[Plan]) -> Finder:
        return Finder(self._loads, mode=self._mode, devices=devices, microbatches=self._microbatches, first=first)

    def _bound_ms(self, devices: int) -> float:
        space = Space(self._loads, mode=self._mode, devices=devices, microbatches=self._microbatches)
        return space.bound_ms()

    def _found(self, finder: Finder) -> Course:
        if finder.devices == self._devices:
            return finder.best
        plan = replace(finder.best.plan, devices=finder.devices)
        return Course.unchecked(plan, self._loads, self._mode, self._microbatches)

    def _take(self, finder: Finder) -> None:
        """Take over what a finder found, if it is better; its own last one it may also have made simpler."""
        found, known = finder.best, self._source
        better = finder.best_ms < self.best_ms * (1 - EQUAL)
        if better or (known[0] is finder and known[1] is not found):
            self._source = (finder, found)
            self.best, self.best_ms = self._found(finder), finder.best_ms
