"""The log of calls: the time that plans promise for a call, and the time that calls take."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from rp_sched import LayerCost, Mode, Plan, PricedPlan, Resource, simulated_ms

from rp_engine.planning.pricing import Pricing
from rp_engine.telemetry.call_span import CallSpan
from rp_engine.telemetry.layer_times import ModelTimer
from rp_engine.telemetry.tables import table

_LOG = logging.getLogger(__name__)
# The number of latest calls whose median is taken.
CALLS = 8
# An error is logged again once it has grown by this much.
_NEWS = 0.1


@dataclass(frozen=True, slots=True)
class CallTime:
    """The time that a plan promises and the time that its calls took, in milliseconds per call.

    >>> CallTime("model 'm', fused calls of 8 microbatches", Plan(fused=range(4)), 75.0, 100.0, 8, "device").error
    -0.25

    `what`: the model and the kind of call. `promised_ms`: simulated with what was measured of layers, links and
    host; None while calls of this kind are not measured. `measured_ms`: the median of the last `calls` calls; None
    if there were none. `bound_by`: what the simulation keeps busy for the longest time, or the
    network between machines if a step's traffic takes longer: `network_ms`, None for one machine.

    A call counts if it was launched before the previous call's gradients were on the host, with nothing in
    between. Its time runs from the end of the previous call to its own end, when its own gradients are on the
    host. If the caller waits for its step (`is_async=False`), or does other things for long, no call counts.
    """

    what: str
    plan: Plan
    promised_ms: float | None
    measured_ms: float | None
    calls: int
    bound_by: Resource | Literal["network"] | None
    network_ms: float | None = None

    @property
    def error(self) -> float | None:
        """The promised time over the measured one, less 1; None while one of them is unknown."""
        if self.promised_ms is None or self.measured_ms is None:
            return None
        return self.promised_ms / self.measured_ms - 1

    def __str__(self) -> str:
        return as_table([self])


def as_table(times: Sequence[CallTime]) -> str:
    """Format several calls' times as one table.

    >>> print(as_table([CallTime("m", Plan(fused=range(4)), 98.0, 100.0, 8, "device")]))
    calls  |          plan |  promised |   measured | error | bound by
    m      | Plan(FB[0:4]) | 98.000 ms | 100.000 ms | -2.0% |   device
    """
    # Of several machines.
    has_network = any(one.network_ms is not None for one in times)
    rows = [
        [
            one.what,
            repr(one.plan),
            _ms(one.promised_ms),
            _ms(one.measured_ms),
            _error(one.error),
            one.bound_by or "-",
            *([_ms(one.network_ms)] if has_network else []),
        ]
        for one in times
    ]
    more = ["network"] if has_network else []
    return table(["calls", "plan", "promised", "measured", "error", "bound by", *more], rows)


def _ms(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.3f} ms"


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"


Promise = Callable[[Plan], float | None]
Guesses = Callable[[], Sequence[LayerCost]]


def _no_promise(plan: Plan) -> None:
    del plan


class _UnderPlan:
    """The calls under one plan. `promised`, `guesses`: see `CallLog.follow`."""

    def __init__(self, timer: ModelTimer, plan: Plan, guesses: Guesses, promised: Promise) -> None:
        self.timer = timer
        self.plan = plan
        self.guesses = guesses
        self.promised = promised
        self._last: CallSpan | None = None
        self._ms: deque[float] = deque(maxlen=CALLS)
        self._logged_error: float | None = None

    def note(self, call: CallSpan, network_ms: float | None) -> None:
        """Add a call; it counts if it directly follows the previous one. `network_ms`: see `CallTime`."""
        if self._last is not None and call.follows(self._last):
            self._ms.append((call.ended_s - self._last.ended_s) * 1e3)
        self._last = call
        promised = self.promised(self.plan)
        self._compare(None if promised is None else max(promised, network_ms or 0.0))

    @property
    def calls(self) -> int:
        """The number of calls that count."""
        return len(self._ms)

    @property
    def measured_ms(self) -> float | None:
        """The median of the latest calls."""
        return median(self._ms) if self._ms else None

    def _compare(self, promised: float | None) -> None:
        """Log the promised and the measured time once both are known, and again when they drift apart."""
        measured = self.measured_ms
        if promised is None or measured is None or len(self._ms) < CALLS:
            return
        error = promised / measured - 1
        if self._logged_error is None or abs(error) > self._logged_error + _NEWS:
            words = "took" if self._logged_error is None else "now take"
            _LOG.info(
                "%s: %r promised %.3f ms a call, calls %s %.3f ms (%+.1f %%)",
                *(self.timer.what, self.plan, promised, words, measured, 100 * error),
            )
            self._logged_error = abs(error)


class CallLog:
    """The measured and promised times of one model's calls, under the latest plan of each kind of call."""

    def __init__(self, pricing: Pricing) -> None:
        self._pricing = pricing
        self._plans: dict[tuple[Mode, int], _UnderPlan] = {}

    def follow(
        self,
        timer: ModelTimer,
        mode: Mode,
        microbatches: int,
        plan: Plan,
        guesses: Guesses,
        promised: Promise = _no_promise,
    ) -> None:
        """Note that the next call of this kind runs under this plan.

        `guesses`: costs of the layers without their times. `promised`: see `PlanInUse.promised_ms`.
        """
        known = self._plans.get((mode, microbatches))
        if known is None or known.plan != plan:
            self._plans[mode, microbatches] = _UnderPlan(timer, plan, guesses, promised)
        else:
            known.guesses, known.promised = guesses, promised

    def note(self, mode: Mode, microbatches: int, call: CallSpan) -> None:
        """Note that a call is over; log how its plan's promise compares."""
        if (under := self._plans.get((mode, microbatches))) is not None:
            under.note(call, self._network_ms(mode, under.plan))

    def measured(self, mode: Mode, microbatches: int) -> tuple[Plan, float] | None:
        """Return the latest plan and the median time of its calls, in ms; None until `CALLS` were measured."""
        under = self._plans.get((mode, microbatches))
        if under is None or under.calls < CALLS or under.measured_ms is None:
            return None
        return under.plan, under.measured_ms

    def plans(self) -> dict[tuple[Mode, int], Plan]:
        """Return the latest plan of each kind of call and number of microbatches."""
        return {kind: under.plan for kind, under in self._plans.items()}

    def times(self) -> list[CallTime]:
        """Return each plan's promise, simulated with all measurements so far, and the time of its calls."""
        return [self._time(mode, count, under) for (mode, count), under in self._plans.items()]

    def _time(self, mode: Mode, microbatches: int, under: _UnderPlan) -> CallTime:
        priced_plan = self._priced_plan(mode, microbatches, under) if under.timer.estimator.samples else None
        devices = self._pricing.devices
        alone_ms = None if priced_plan is None else _simulated_ms(priced_plan, devices)
        network_ms = self._network_ms(mode, under.plan)
        is_slow = (network_ms or 0.0) > (alone_ms or 0.0)
        return CallTime(
            what=under.timer.what,
            plan=under.plan,
            promised_ms=None if alone_ms is None else max(alone_ms, network_ms or 0.0),
            measured_ms=under.measured_ms,
            calls=under.calls,
            bound_by=None if priced_plan is None else "network" if is_slow else priced_plan.bottleneck(devices),
            network_ms=network_ms,
        )

    def _network_ms(self, mode: Mode, plan: Plan) -> float | None:
        # Other calls leave no gradients that machines share.
        return self._pricing.network_ms(plan) if mode == "fused" else None

    def _priced_plan(self, mode: Mode, microbatches: int, under: _UnderPlan) -> PricedPlan:
        guesses = under.guesses()
        # On a copy: `costs` changes the estimator, which compares with the times it returned last.
        costs = copy.deepcopy(under.timer.estimator).costs(guesses)
        limits = self._pricing.priced(under.timer, self._pricing.limits(guesses))
        return PricedPlan(under.plan, costs, mode=mode, microbatches=microbatches, limits=limits)


def _simulated_ms(priced_plan: PricedPlan, devices: int) -> float:
    return (
        priced_plan.steady_ms(devices) if priced_plan.loads.shares_nothing else simulated_ms(priced_plan, devices)
    )
