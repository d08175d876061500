"""Keep a plan up to date with measured times, searching only in the time the caller gives."""

from collections.abc import Sequence
from dataclasses import dataclass

from rp_sched.planners.adaptive import Search
from rp_sched.planners.estimator import Estimator
from rp_sched.problem.checks import milliseconds, non_negative
from rp_sched.problem.costs import LayerCost
from rp_sched.problem.limits import NO_LIMITS, Limits
from rp_sched.problem.modes import Mode
from rp_sched.problem.plan import Plan
from rp_sched.simulation.makespan import PricedPlan

# A plan replaces a measured one if it is expected to be faster by this fraction: what is measured varies as much.
_GAIN = 0.02
# What was measured of a plan that is not in use counts for so many calls: then it may be tried again.
_CALLS = 400


@dataclass(slots=True)
class _Measured:
    """How long a plan's calls took, `error` times as long as promised, and the number of the call after them."""

    priced_plan: PricedPlan
    call_ms: float
    error: float
    at: int


class Replanner:
    """The plan in use for one kind of call, and the search for a better one.

    >>> replanner = Replanner([LayerCost(0, weight_bytes=10**7)] * 4, devices=2, microbatches=4, mode="fused")
    >>> replanner.priced_plan().plan
    Plan(FB[0:4] m0:2 m2:4, first free)
    >>> replanner.improve(budget_ms=1.0)
    True

    Call `priced_plan()` before every call of the model: it returns the plan in use at once. If times have changed
    by more than a fraction `threshold` (see `Estimator.moved`), it first simulates that plan with the new times
    and restarts the search, which replaces the plan when it finds a better one. The search runs only in `improve`:
    call it while the devices are busy and the caller is idle, until it returns True.

    Tell it what calls took with `note`. A measured plan is expected to take that long, and is replaced only by one
    that is expected to be 2 % faster. Other plans are expected to take as long as they promise, times the largest
    error of a measured plan that has no more tasks.

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
        self._search = Search(
            self.estimator.costs(self._layers),
            devices=devices,
            microbatches=microbatches,
            mode=mode,
            limits=limits,
        )
        self._in_use = self._search.best
        self._measured: dict[Plan, _Measured] = {}
        self._calls = 0

    def priced_plan(self, limits: Limits | None = None) -> PricedPlan:
        """Return the plan in use; restart the search if times or the given `limits` have changed."""
        before, self._limits = self._limits, self._limits if limits is None else limits
        moved = self.estimator.moved(self._threshold)
        if moved or _room(before) != _room(self._limits):
            self._measured.clear()
        if moved or before != self._limits:
            self._search = Search(
                self.estimator.costs(self._layers),
                devices=self._devices,
                microbatches=self._microbatches,
                mode=self._mode,
                limits=self._limits,
                first=(self._search.best.plan,),
                quick_plans=0,
            )
        self._calls += 1
        self._forget_old()
        self._in_use = self._chosen()
        return self._in_use

    # Its name in 0.1.0.
    course = priced_plan

    def note(self, call_ms: float) -> None:
        """Note how long calls under the plan in use take now, in ms, from launch to launch.

        It holds until times or the room for plans change, and for 400 calls once another plan is in use. Raises
        `ValueError` for what is no time.

        >>> replanner = Replanner([LayerCost(1.0, weight_bytes=10)] * 2, devices=1, microbatches=1, mode="fused")
        >>> replanner.note(5.0)
        >>> replanner.expected_ms
        5.0
        """
        took_ms, promised_ms = milliseconds("call_ms", call_ms), self.promised_ms
        error = took_ms / promised_ms if promised_ms else 1.0
        self._measured[self._in_use.plan] = _Measured(self._in_use, took_ms, error, self._calls)

    @property
    def in_use(self) -> PricedPlan:
        """The plan in use: what `priced_plan` returned last."""
        return self._in_use

    @property
    def promised_ms(self) -> float:
        """The predicted time per call of the plan in use; see `Search.promised_ms`."""
        if self._in_use.plan == self._search.best.plan:
            return self._search.promised_ms
        simulated_ms = self._search.simulated_ms.get(self._in_use.plan)
        return self._in_use.steady_ms(self._devices) if simulated_ms is None else simulated_ms

    @property
    def expected_ms(self) -> float:
        """The time per call of the plan in use, as it is compared with other plans."""
        measured = self._measured.get(self._in_use.plan)
        return self.promised_ms * self._error(self._in_use) if measured is None else measured.call_ms

    def improve(self, *, budget_ms: float) -> bool:
        """Search for about `budget_ms` and settle last (see `Search.settle`); return whether that is done."""
        return self._search.advance_settling(budget_ms=budget_ms)

    def _forget_old(self) -> None:
        in_use, least = self._in_use.plan, self._calls - _CALLS
        self._measured = {plan: one for plan, one in self._measured.items() if plan == in_use or one.at >= least}

    def _chosen(self) -> PricedPlan:
        """Return the best plan of the search, unless a measured one is about as fast or faster."""
        best = self._search.best
        fastest = min(self._measured.values(), key=lambda one: one.call_ms, default=None)
        if fastest is None:
            return best
        current = self._measured.get(self._in_use.plan)
        if current is not None and current.call_ms * (1 - _GAIN) <= fastest.call_ms:
            fastest = current
        known = self._measured.get(best.plan)
        best_ms = self._search.promised_ms * self._error(best) if known is None else known.call_ms
        if best_ms < fastest.call_ms * (1 - _GAIN):
            return best
        return self._renewed(fastest)

    def _renewed(self, measured: _Measured) -> PricedPlan:
        """Return a measured plan with the present costs."""
        loads, priced = self._search.best.loads, measured.priced_plan
        if priced.plan == self._search.best.plan:
            return self._search.best
        if priced.loads is not loads:
            measured.priced_plan = PricedPlan.unchecked(priced.plan, loads, self._mode, self._microbatches)
        return measured.priced_plan

    def _error(self, priced: PricedPlan) -> float:
        """How many times as long as promised the calls of a plan may take that was not measured."""
        known = list(self._measured.values())
        alike = [one for one in known if len(one.priced_plan.jobs) <= len(priced.jobs)] or known
        return max((one.error for one in alike), default=1.0)


def _room(limits: Limits) -> object:
    """Return the limits that decide whether a plan fits."""
    memory = tuple(device.memory_bytes for device in limits.devices)
    return limits.device_memory_bytes, limits.stage_bytes, limits.ahead_bytes, limits.host_memory_bytes, memory
