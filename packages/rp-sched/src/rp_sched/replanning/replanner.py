"""Keep the plan whose calls are the fastest: as they were measured, and as plans promise only until then."""

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Literal

from rp_sched.planners.adaptive import Search
from rp_sched.problem.checks import milliseconds, non_negative
from rp_sched.problem.costs import LayerCost
from rp_sched.problem.limits import NO_LIMITS, Limits
from rp_sched.problem.modes import Mode
from rp_sched.problem.plan import Plan
from rp_sched.replanning.choice import fastest
from rp_sched.replanning.estimator import Estimator
from rp_sched.simulation.makespan import PricedPlan
from rp_sched.simulation.resources import Resource
from rp_sched.simulation.simulate import STEADY_CALLS, simulated_ms
from rp_sched.simulation.stage_costs import Loads

# Calls of a plan before it is judged: the first one warms up, and two show the spread.
TRIAL = 3
# The most calls of a stage that are left out.
MOST_LEFT_OUT = 16
# The latest calls of a plan whose median counts.
WINDOW = 8
# Samples of layer times before plans are searched with them: one may be an outlier.
SAMPLES = 2
# A settled plan stays while its calls take at most this fraction longer than those of another one.
BAND = 0.1
# Plans whose promises are compared are simulated if that takes at most this many steps, about half a second.
SIMULATED_STEPS = 15_000

Why = Literal["times", "calls", "memory"]
"""Why a plan was replaced: by measured layer times, by what calls took, or since it does not fit."""


class _Calls:
    """The times of a plan's calls; the first call after each change to the plan does not count."""

    def __init__(self) -> None:
        self.latest_ms: deque[float] = deque(maxlen=WINDOW)
        self.is_warm = False

    def add(self, call_ms: float) -> None:
        if self.is_warm:
            self.latest_ms.append(call_ms)
        self.is_warm = True

    @property
    def ms(self) -> float | None:
        return median(self.latest_ms) if self.latest_ms else None


class Replanner:
    """The plan in use for one kind of call.

    >>> replanner = Replanner([LayerCost(0, weight_bytes=10**7)] * 4, devices=2, microbatches=4, mode="fused")
    >>> replanner.priced_plan().plan
    Plan(FB[0:4] m0:2 m2:4, first free)

    Call `priced_plan()` before every call of the model, and `note` what each call took. Calls settle within six:

    1. Three calls run the first plan, while `estimator` takes the times of layers.
    2. Then plans are searched with these times, for at most `search_ms`. One is tried for three calls if it is
       expected to be 5 % faster than the first: calls of a plan that has not run are expected to be as much longer
       than it promises as those of the first one are. Plans that leave devices idle have to be expected to be 5 %
       faster than those that use all.
    3. From the seventh call on, the plan whose calls were faster stays. It is left only for another one that has
       run, if the median of its latest eight calls is more than 10 % above that one's.

    `restart` begins anew. A slower plan is not tried again until then.

    `layers`: the costs; the estimator replaces their times. `first`: the first plan; by default the one that a
    short search finds. `threshold`: a plan is priced anew if times change by more than this fraction (see
    `Estimator.moved`). Raises what `Search` raises.
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
        first: PricedPlan | None = None,
        search_ms: float = 500.0,
    ) -> None:
        self.estimator = Estimator(len(layers)) if estimator is None else estimator
        self._layers = tuple(layers)
        self._devices = devices
        self._microbatches = microbatches
        self._mode: Mode = mode
        self._limits = limits
        self._threshold = non_negative("threshold", threshold)
        self._search_ms = non_negative("search_ms", search_ms)
        self._promised: dict[Plan, float] = {}
        self._simulates = False
        # Why the plan in use replaced the one before it.
        self.why: Why = "times"
        self._bound_of_all: Resource | Literal["nothing fits"] | None = None
        self.slower: set[Plan] = set()
        self._begin(self._search().choice if first is None else first)

    def _begin(self, first: PricedPlan) -> None:
        self._stage: Literal["first", "trial", "settled"] = "first"
        # Calls in this stage, and those that are left out of them.
        self._calls = self._left_out = 0
        self._measured: dict[Plan, _Calls] = {}
        self._begin_with(first)

    def _begin_with(self, first: PricedPlan) -> None:
        # It may be priced with guesses.
        self._is_priced = False
        self._promised.clear()
        self._use(first)

    def _use(self, priced: PricedPlan) -> None:
        self._in_use = priced
        self._measured.setdefault(priced.plan, _Calls()).is_warm = False

    def start_with(self, first: PricedPlan, *, slower: Iterable[Plan] = ()) -> None:
        """Replace the first plan, if another one was not tried yet. `slower`: plans measured to be slower."""
        if self._stage == "first":
            self.slower = set(slower)
            self._begin_with(first)

    def restart(self, first: PricedPlan | None = None) -> None:
        """Begin anew with the plan in use, or `first`: what was measured holds no longer."""
        self.slower.clear()
        self._begin(self._in_use if first is None else first)

    def priced_plan(self, limits: Limits | None = None, layers: Sequence[LayerCost] | None = None) -> PricedPlan:
        """Return the plan for the next call. `limits`, `layers`: those from now on.

        Raises `Infeasible` if no plan fits at the time of a search.
        """
        self.price(limits, layers)
        self._calls += 1
        if not self._in_use.loads.fits_host(self._in_use.plan, self._microbatches):
            self.why = "memory"
            self.restart(self._search().choice)
        elif self._calls > TRIAL:
            self._decide()
        return self._in_use

    # Its name in 0.1.0.
    course = priced_plan

    def note(self, call_ms: float, plan: Plan | None = None) -> None:
        """Note how long a call took, in ms, from the end of the one before. `plan`: its plan, if not that in use.

        >>> replanner = Replanner([LayerCost(1.0, weight_bytes=10)] * 2, devices=1, microbatches=1, mode="fused")
        >>> for call_ms in (50.0, 5.0, 7.0):
        ...     replanner.note(call_ms)
        >>> replanner.measured_ms
        6.0

        Calls under a plan that ran before the latest `restart` do not count. Raises `ValueError` for what is no
        time.
        """
        calls = self._measured.get(self._in_use.plan if plan is None else plan)
        milliseconds("call_ms", call_ms)
        if calls is not None:
            calls.add(call_ms)

    def leave_out(self, plan: Plan) -> None:
        """Leave a call out that did more than calls under its plan do: one more is made before the next decision.

        >>> replanner = Replanner([LayerCost(1.0, weight_bytes=10)] * 2, devices=1, microbatches=1, mode="fused")
        >>> for _ in range(3):
        ...     _ = replanner.priced_plan()
        >>> replanner.leave_out(replanner.in_use.plan)
        >>> replanner.decides_next
        False

        At most `MOST_LEFT_OUT` calls of a stage are.
        """
        if not self.is_settled and plan == self._in_use.plan and self._left_out < MOST_LEFT_OUT:
            self._left_out += 1
            self._calls -= 1

    @property
    def in_use(self) -> PricedPlan:
        """The plan in use: what `priced_plan` returned last."""
        return self._in_use

    @property
    def is_settled(self) -> bool:
        """Whether the plan in use stays, unless its calls get slower."""
        return self._stage == "settled"

    @property
    def decides_next(self) -> bool:
        """Whether the next `priced_plan` looks at what calls took, so that they should be over and noted."""
        return not self.is_settled and self._calls >= TRIAL

    @property
    def measured_ms(self) -> float | None:
        """The median time of the latest calls of the plan in use; None if none counts yet."""
        return self._measured[self._in_use.plan].ms

    @property
    def promised_ms(self) -> float:
        """The time per call that the plan in use promises."""
        return self._promise(self._in_use)

    @property
    def expected_ms(self) -> float:
        """The time per call of the plan in use, as it is compared with other plans."""
        return self._expected(self._in_use)

    @property
    def idle_because(self) -> Resource | Literal["nothing fits"] | None:
        """What bounds plans that use all devices, if the plan in use does not, by the latest search.

        "nothing fits": there are none. None before the first search with measured times.
        """
        return self._bound_of_all if self._in_use.idle(self._devices) else None

    def price(self, limits: Limits | None = None, layers: Sequence[LayerCost] | None = None) -> PricedPlan:
        """Take limits and layers; return the plan in use, with the times that were measured by now."""
        before = self._limits, self._layers
        self._limits = before[0] if limits is None else limits
        self._layers = before[1] if layers is None else tuple(layers)
        has_changed = before != (self._limits, self._layers) or self.estimator.moved(self._threshold)
        if self.has_samples and (has_changed or not self._is_priced):
            self._is_priced = True
            self._promised.clear()
            self._in_use = self._priced(self._in_use.plan, Loads(self._costs(), self._limits))
        return self._in_use

    @property
    def has_samples(self) -> bool:
        """Whether times of layers were measured often enough to plan with them."""
        return self.estimator.samples >= SAMPLES

    def _costs(self) -> tuple[LayerCost, ...]:
        return self.estimator.costs(self._layers)

    def _priced(self, plan: Plan, loads: Loads) -> PricedPlan:
        return PricedPlan.unchecked(plan, loads, self._mode, self._microbatches)

    def _decide(self) -> None:
        if self._stage == "first":
            if self.has_samples:
                self._try_another()
        elif self._stage == "trial":
            self._stage = "settled"
            self._use_faster(band=0.0)
            self.slower.update(plan for plan in self._measured if plan != self._in_use.plan)
        elif len(self._measured[self._in_use.plan].latest_ms) == WINDOW:
            self._use_faster(band=BAND)

    def _try_another(self) -> None:
        """Try the plan that is expected to be clearly faster than the one in use, if there is one; else settle."""
        search = self._search()
        search.advance(budget_ms=self._search_ms)
        self._bound_of_all = search.idle_because
        plans = search.candidates()
        self._promised.clear()
        compared = [self._in_use, *plans]
        self._simulates = sum(STEADY_CALLS * priced.steps for priced in compared) <= SIMULATED_STEPS
        known = self.slower | {self._in_use.plan}
        found = fastest(
            [self._in_use, *(priced for priced in plans if priced.plan not in known)],
            self._expected,
            in_use=self._in_use,
            devices=self._devices,
        )
        self._stage, self._calls = "settled", 0
        if found is not self._in_use:
            self._stage, self._calls, self._left_out, self.why = "trial", 1, 0, "times"
            self._use(found)

    def _use_faster(self, *, band: float) -> None:
        """Go to the measured plan with the fastest calls, if those of the plan in use take longer by `band`."""
        mine = self.measured_ms
        times = {plan: calls.ms for plan, calls in self._measured.items() if calls.ms is not None}
        if mine is None or min(times.values()) * (1 + band) >= mine:
            return
        self.slower.add(self._in_use.plan)
        best = min(times, key=times.__getitem__)
        self.slower.discard(best)
        self.why = "calls"
        self._use(self._priced(best, self._in_use.loads))

    def _search(self) -> Search:
        return Search(
            self._costs(),
            devices=self._devices,
            microbatches=self._microbatches,
            mode=self._mode,
            limits=self._limits,
        )

    def _promise(self, priced: PricedPlan) -> float:
        if priced.plan not in self._promised:
            simulates = self._simulates and not priced.loads.shares_nothing
            self._promised[priced.plan] = (
                simulated_ms(priced, self._devices) if simulates else priced.steady_ms(self._devices)
            )
        return self._promised[priced.plan]

    def _expected(self, priced: PricedPlan) -> float:
        calls = self._measured.get(priced.plan)
        return self._promise(priced) * self._error if calls is None or calls.ms is None else calls.ms

    @property
    def _error(self) -> float:
        """The most times as long as promised that the calls of a measured plan take; 1 if unknown."""
        pairs = [
            (calls.ms, self._promise(self._priced(plan, self._in_use.loads)))
            for plan, calls in self._measured.items()
        ]
        return max((ms / promised for ms, promised in pairs if ms is not None and promised), default=1.0)
