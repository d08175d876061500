"""The log of calls: the time that plans promise for a call, and the time that calls take."""

from __future__ import annotations

import copy
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, Protocol

from rp_sched import LayerCost, Mode, Plan, PricedPlan, Resource, simulated_ms
from rp_telemetry.call_span import CallSpan
from rp_telemetry.layer_times import ModelTimer
from rp_telemetry.tables import table

from rp_engine.planning.pricing import Pricing

_LOG = logging.getLogger(__name__)
# The number of latest calls whose median is taken.
CALLS = 8
# An error is logged again once it has grown by this much.
_NEWS = 0.1
# The number of calls to remember that are not over: more than may be under way.
_LAUNCHED = 64

IdleBecause = Resource | Literal["nothing fits"]


@dataclass(frozen=True, slots=True)
class CallTime:
    """The time that a plan promises and the time that its calls took, in milliseconds per call.

    >>> CallTime("model 'm', fused calls of 8 microbatches", Plan(fused=range(4)), 75.0, 100.0, 8, "device").error
    -0.25

    `what`: the model and the kind of call. `promised_ms`: simulated with what was measured of layers, links and
    host; None while calls of this kind are not measured. `measured_ms`: the median of the last `calls` calls; None
    if there were none. `bound_by`: what the simulation keeps busy for the longest time, or the
    network between machines if a step's traffic takes longer: `network_ms`, None for one machine. `idle_devices`:
    the devices that have no task in a call. `idle_because`: what bounds plans that use all devices, or that none
    fits; None if the plan leaves none idle, is a user's, or was not yet compared with others.

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
    idle_devices: int = 0
    idle_because: IdleBecause | None = None

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
    # Only calls of several machines have times of a network.
    has_network = any(one.network_ms is not None for one in times)
    has_idle = any(one.idle_devices for one in times)
    rows = [
        [
            one.what,
            repr(one.plan),
            _ms(one.promised_ms),
            _ms(one.measured_ms),
            _error(one.error),
            one.bound_by or "-",
            *([_ms(one.network_ms)] if has_network else []),
            *([_idle(one)] if has_idle else []),
        ]
        for one in times
    ]
    more = [*(["network"] if has_network else []), *(["idle devices"] if has_idle else [])]
    return table(["calls", "plan", "promised", "measured", "error", "bound by", *more], rows)


def _idle(time: CallTime) -> str:
    because = "" if time.idle_because is None else f" ({time.idle_because})"
    return f"{time.idle_devices}{because}"


def _ms(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.3f} ms"


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"


Guesses = Callable[[], Sequence[LayerCost]]


class InUse(Protocol):
    """What plans the calls: a `PlanInUse`."""

    @property
    def idle_because(self) -> IdleBecause | None:
        """See `CallTime`."""
        ...

    def promised_ms(self, plan: Plan) -> float | None:
        """Return the predicted time of a call under this plan; None if it is not known."""
        ...

    def note(self, plan: Plan, call_ms: float) -> None:
        """Note how long a call under this plan took."""
        ...


class _UnderPlan:
    """The calls under one plan. `guesses`, `in_use`: see `CallLog.follow`."""

    def __init__(self, timer: ModelTimer, plan: Plan, guesses: Guesses, in_use: InUse | None) -> None:
        self.timer = timer
        self.plan = plan
        self.guesses = guesses
        self.in_use = in_use
        self._last: CallSpan | None = None
        self._ms: deque[float] = deque(maxlen=CALLS)
        self._logged_error: float | None = None

    def note(self, call: CallSpan, network_ms: float | None) -> None:
        """Add a call; it counts if it directly follows the previous one. `network_ms`: see `CallTime`."""
        if self._last is not None and call.follows(self._last):
            self._ms.append((call.ended_s - self._last.ended_s) * 1e3)
        self._last = call
        promised = None if self.in_use is None else self.in_use.promised_ms(self.plan)
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
        # By their numbers, calls that are not over.
        self._launched: dict[int, tuple[_UnderPlan, InUse | None]] = {}
        # The end of the latest call that is over.
        self._ended_s = -math.inf

    def follow(
        self,
        number: int,
        timer: ModelTimer,
        mode: Mode,
        microbatches: int,
        plan: Plan,
        guesses: Guesses,
        in_use: InUse | None = None,
    ) -> None:
        """Note that the call with this number, which is launched next, runs under this plan.

        `guesses`: costs of the layers without their times. `in_use`: what has planned it; None for users' plans.
        """
        known = self._plans.get((mode, microbatches))
        if known is None or known.plan != plan:
            self._plans[mode, microbatches] = known = _UnderPlan(timer, plan, guesses, in_use)
        else:
            known.guesses, known.in_use = guesses, in_use
        # Calls that failed are never over.
        self._launched = {other: call for other, call in self._launched.items() if other > number - _LAUNCHED}
        self._launched[number] = known, in_use

    def note(self, mode: Mode, call: CallSpan) -> None:
        """Note that a call is over: tell what has planned it, and log how its plan's promise compares.

        For plans, calls count that `CallTime` leaves out, too: from the end of the call before, or from their
        launch if that is later. Not those whose backward pass the caller runs: their end depends on the caller.
        """
        under, in_use = self._launched.pop(call.number, (None, None))
        if under is None:
            return
        under.note(call, self._network_ms(mode, under.plan))
        if in_use is not None and mode != "train" and call.ended_s > self._ended_s:
            in_use.note(under.plan, (call.ended_s - max(call.launched_s, self._ended_s)) * 1e3)
        self._ended_s = max(self._ended_s, call.ended_s)

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
            idle_devices=0 if priced_plan is None else priced_plan.idle(devices),
            idle_because=None if under.in_use is None else under.in_use.idle_because,
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
