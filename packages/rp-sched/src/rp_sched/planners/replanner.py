"""Keep a plan up to date with measured times, searching only in the time the caller gives."""

import time
from collections.abc import Iterator, Sequence

from rp_sched.planners.adaptive import QUICK_PLANS, Search
from rp_sched.planners.estimator import Estimator
from rp_sched.problem.checks import milliseconds, non_negative
from rp_sched.problem.costs import LayerCost
from rp_sched.problem.limits import NO_LIMITS, Limits
from rp_sched.problem.modes import Mode
from rp_sched.problem.plan import Plan
from rp_sched.simulation.makespan import Course
from rp_sched.simulation.simulate import simulating
from rp_sched.simulation.stage_costs import Loads

# A plan replaces the one in use if it is expected to be faster by this fraction: what is measured varies as much.
_GAIN = 0.02
# The number of measured plans to remember, since each is simulated anew when times or limits change.
_KNOWN = 8


class Replanner:
    """The plan in use for one kind of call, and the search for a better one.

    >>> replanner = Replanner([LayerCost(0, weight_bytes=10**7)] * 4, devices=2, microbatches=4, mode="fused")
    >>> replanner.course().plan
    Plan(FB[0:4] m0:2 m2:4, first free)
    >>> replanner.improve(budget_ms=1.0)
    True

    Call `course()` before every call of the model: it returns the plan in use at once. If times have changed by
    more than a fraction `threshold` (see `Estimator.moved`), it first simulates that plan with the new times and
    restarts the search. The search runs only in `improve`: call it while the devices are busy and the caller is
    idle, until it returns True.

    A plan replaces the one in use if it is expected to be faster by 2 %. It is expected to take as long as its
    calls took, if you tell that with `note`; otherwise as long as it promises, times the largest error of the
    promises of measured plans that have no more tasks than it.

    `layers`: the costs; the estimator replaces their times. Raises what `Search` raises.
    """

    def __init__(
        self,
        layers: Sequence[LayerCost],
        *,
        devices: int,
        microbatches: int,
        mode: Mode,
        limits: Limits = NO_LIMITS,
        estimator: Estimator | None = None,
        threshold: float = 0.1,
    ) -> None:
        self.estimator = Estimator(len(layers)) if estimator is None else estimator
        self._layers = tuple(layers)
        self._devices = devices
        self._microbatches = microbatches
        self._mode: Mode = mode
        self._limits = limits
        self._threshold = non_negative("threshold", threshold)
        # By plan: how long its calls took.
        self._measured: dict[Plan, float] = {}
        self._begin(self._new_search((), QUICK_PLANS))
        self._in_use = self._search.best

    def course(self, limits: Limits | None = None) -> Course:
        """Return the course of the plan in use; restart the search if times or the given `limits` have changed."""
        changed = limits is not None and limits != self._limits
        self._limits = self._limits if limits is None else limits
        moved = self.estimator.moved(self._threshold)
        if moved:
            self._measured.clear()
        if changed or moved:
            self._restart()
        chosen = self._chosen()
        if chosen is not self._in_use:
            self._in_use, self._simulated_ms, self._simulation = chosen, None, self._simulate()
        return chosen

    def note(self, plan: Plan, call_ms: float) -> None:
        """Note how long calls under a plan take now, in ms, from launch to launch. It holds until times change.

        Raises `InvalidPlan` for a plan that does not suit the layers, and `ValueError` for what is no time.

        >>> how = {"devices": 1, "microbatches": 1, "mode": "fused"}
        >>> replanner = Replanner([LayerCost(1.0, weight_bytes=10)] * 2, **how)
        >>> replanner.note(replanner.course().plan, call_ms=5.0)
        >>> replanner.expected_ms
        5.0
        """
        plan.check(len(self._layers), self._mode)
        plan.check_microbatches(self._microbatches)
        took_ms = milliseconds("call_ms", call_ms)
        # Last, since the plans noted longest ago are dropped first.
        self._measured.pop(plan, None)
        self._measured[plan] = took_ms
        for oldest in list(self._measured)[:-_KNOWN]:
            del self._measured[oldest]

    @property
    def in_use(self) -> Course:
        """The course that `course` returned last."""
        return self._in_use

    @property
    def promised_ms(self) -> float:
        """The predicted time per call of the plan in use: its price, and simulated once `improve` is over."""
        if self._in_use is self._search.best:
            return self._search.promised_ms
        return self._price_ms(self._in_use) if self._simulated_ms is None else self._simulated_ms

    @property
    def expected_ms(self) -> float:
        """The time per call that counts when the plan in use is compared with others."""
        return self._expected_ms(self._in_use)

    def improve(self, *, budget_ms: float) -> bool:
        """Search for about `budget_ms` and settle last (see `Search.settle`); return whether that is done."""
        until = time.perf_counter() + non_negative("budget_ms", budget_ms) / 1e3
        if not self._search.advance_settling(budget_ms=budget_ms):
            return False
        while next(self._simulation, self) is None:
            if time.perf_counter() >= until:
                return False
        return True

    def _restart(self) -> None:
        loads = Loads(self.estimator.costs(self._layers), self._limits)
        known = dict.fromkeys([self._in_use.plan, self._search.best.plan])
        self._begin(self._new_search([plan for plan in known if self._fits(plan, loads)], quick_plans=0))

    def _new_search(self, first: Sequence[Plan], quick_plans: int) -> Search:
        return Search(
            self.estimator.costs(self._layers),
            devices=self._devices,
            microbatches=self._microbatches,
            mode=self._mode,
            limits=self._limits,
            first=first,
            quick_plans=quick_plans,
        )

    def _begin(self, search: Search) -> None:
        self._search = search
        self._courses: dict[Plan, Course] = {}
        self._prices: dict[Plan, float] = {}
        self._simulated_ms: float | None = None
        self._simulation: Iterator[None] = self._simulate()

    def _simulate(self) -> Iterator[None]:
        course = self._in_use
        if course is not self._search.best and not course.loads.shares_nothing:
            self._simulated_ms = yield from simulating(course, self._devices)

    def _chosen(self) -> Course:
        """Return the course of the plan in use, unless another one is expected to be faster."""
        best = self._search.best
        known = [self._course(plan) for plan in self._measured if self._fits(plan, best.loads)]
        fastest = min([best, *known], key=self._expected_ms)
        if not self._fits(self._in_use.plan, best.loads):
            return fastest
        current = self._course(self._in_use.plan)
        return fastest if self._expected_ms(fastest) < self._expected_ms(current) * (1 - _GAIN) else current

    def _course(self, plan: Plan) -> Course:
        best = self._search.best
        if plan == best.plan:
            return best
        if plan not in self._courses:
            self._courses[plan] = Course.unchecked(plan, best.loads, self._mode, self._microbatches)
        return self._courses[plan]

    def _expected_ms(self, course: Course) -> float:
        measured = self._measured.get(course.plan)
        return self._price_ms(course) * self._error(course) if measured is None else measured

    def _error(self, course: Course) -> float:
        """How many times as long as promised the calls of a plan may take that was not measured."""
        known = [self._course(plan) for plan in self._measured]
        alike = [one for one in known if len(one.jobs) <= len(course.jobs)] or known
        prices = {one.plan: self._price_ms(one) for one in alike}
        return max((self._measured[plan] / price for plan, price in prices.items() if price), default=1.0)

    def _price_ms(self, course: Course) -> float:
        if course.plan not in self._prices:
            self._prices[course.plan] = course.steady_ms(self._devices)
        return self._prices[course.plan]

    def _fits(self, plan: Plan, loads: Loads) -> bool:
        each = ((kind, layers) for kind, stages, _ in plan.phases() for layers in stages)
        return loads.fits_host(plan, self._microbatches) and all(loads.fits(*one) for one in each)
