"""The log of calls: the time that plans promise for a call, and the time that calls take."""

from __future__ import annotations

import copy
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Protocol

from rp_sched import LaunchDecision, LayerCost, Limits, Mode, Plan, PricedPlan, simulated_ms

from rp_telemetry.calls.call_span import CallSpan
from rp_telemetry.calls.call_time import CallTime, IdleBecause
from rp_telemetry.layer_times import ModelTimer

_LOG = logging.getLogger(__name__)
# The number of latest calls whose median is taken.
CALLS = 8
# An error is logged again once it has grown by this much.
_NEWS = 0.1
# The number of calls to remember that are not over: more than may be under way.
_LAUNCHED = 64

Guesses = Callable[[], Sequence[LayerCost]]


class Prices(Protocol):
    """What plans are priced with: rp-engine's `Pricing`."""

    @property
    def devices(self) -> int:
        """How many devices run calls."""
        ...

    def network_ms(self, plan: Plan) -> float | None:
        """How long gradients take over the network; None on one machine."""
        ...

    def limits(self, guesses: Sequence[LayerCost], /) -> Limits:
        """The limits of plans for layers of these costs."""
        ...

    def priced(self, timer: ModelTimer, limits: Limits, /) -> Limits:
        """The same with what was measured."""
        ...


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

    def leave_out(self, plan: Plan) -> None:
        """Note that a call under this plan did more than others do."""
        ...


class UsersPlan:
    """A user's plan, which promises nothing and changes with no measurement: see `InUse`."""

    idle_because: IdleBecause | None = None

    def promised_ms(self, plan: Plan) -> float | None:
        """Nothing is known."""
        del plan

    def note(self, plan: Plan, call_ms: float) -> None:
        """Nothing follows."""

    def leave_out(self, plan: Plan) -> None:
        """Nothing follows."""


_USERS = UsersPlan()


class _UnderPlan:
    """The calls under one plan. `guesses`, `in_use`: see `CallLog.follow`."""

    def __init__(self, timer: ModelTimer, plan: Plan, guesses: Guesses, in_use: InUse) -> None:
        self.timer = timer
        self.plan = plan
        self.guesses = guesses
        self.in_use = in_use
        # At first one that none follows.
        self._last = CallSpan(number=-1)
        self._ms: deque[float] = deque(maxlen=CALLS)
        self._logged_error = -math.inf

    def note(self, call: CallSpan, network_ms: float | None) -> None:
        """Add a call; it counts if it directly follows the previous one. `network_ms`: see `CallTime`."""
        if call.follows(self._last):
            self._ms.append((call.ended_s - self._last.ended_s) * 1e3)
        self._last = call
        promised = self.in_use.promised_ms(self.plan)
        if promised is not None and len(self._ms) == CALLS:
            self._compare(max(promised, network_ms or 0.0), median(self._ms))

    @property
    def calls(self) -> int:
        """The number of calls that count."""
        return len(self._ms)

    @property
    def measured_ms(self) -> float | None:
        """The median of the latest calls."""
        return median(self._ms) if self._ms else None

    def _compare(self, promised: float, measured: float) -> None:
        """Log the promised and the measured time once both are known, and again when they drift apart."""
        error = promised / measured - 1
        if abs(error) > self._logged_error + _NEWS:
            words = "took" if math.isinf(self._logged_error) else "now take"
            _LOG.info(
                "%s: %r promised %.3f ms a call, calls %s %.3f ms (%+.1f %%)",
                *(self.timer.what, self.plan, promised, words, measured, 100 * error),
            )
            self._logged_error = abs(error)


class CallLog:
    """The measured and promised times of one model's calls, under the latest plan of each kind of call.

    `launch_of`: how calls of a mode and number of microbatches are launched.
    """

    def __init__(self, pricing: Prices, launch_of: Callable[[Mode, int], LaunchDecision | None]) -> None:
        self._pricing = pricing
        self._launch_of = launch_of
        self._plans: dict[tuple[Mode, int], _UnderPlan] = {}
        # By their numbers, calls that are not over.
        self._launched: dict[int, tuple[_UnderPlan, InUse]] = {}
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
        in_use: InUse = _USERS,
    ) -> None:
        """Note that the call with this number, which is launched next, runs under this plan.

        `guesses`: costs of the layers without their times. `in_use`: what has planned it.
        """
        known = self._plans.setdefault((mode, microbatches), _UnderPlan(timer, plan, guesses, in_use))
        if known.plan != plan:
            self._plans[mode, microbatches] = known = _UnderPlan(timer, plan, guesses, in_use)
        known.guesses, known.in_use = guesses, in_use
        # Calls that failed are never over.
        self._launched = {other: call for other, call in self._launched.items() if other > number - _LAUNCHED}
        self._launched[number] = known, in_use

    def note(self, mode: Mode, call: CallSpan, *, is_usual: bool = True) -> float | None:
        """Note that a call is over: tell what has planned it, and log how its plan's promise compares.

        Returns the ms that count for plans, if any. `is_usual`: it did what later calls do, or does not count.

        For plans, calls count that `CallTime` leaves out, too: from the end of the call before, or from their
        launch if that is later. Not those whose backward pass the caller runs: their end depends on the caller.
        """
        if call.number not in self._launched:
            return None
        under, in_use = self._launched.pop(call.number)
        under.note(call, self._network_ms(mode, under.plan))
        counts = mode != "train" and call.ended_s > self._ended_s
        call_ms = (call.ended_s - max(call.launched_s, self._ended_s)) * 1e3
        self._ended_s = max(self._ended_s, call.ended_s)
        if not is_usual:
            in_use.leave_out(under.plan)
        elif counts:
            in_use.note(under.plan, call_ms)
            return call_ms
        return None

    def plans(self) -> dict[tuple[Mode, int], Plan]:
        """Return the latest plan of each kind of call and number of microbatches."""
        return {kind: under.plan for kind, under in self._plans.items()}

    def times(self) -> list[CallTime]:
        """Return each plan's promise, simulated with all measurements so far, and the time of its calls."""
        return [self._time(mode, count, under) for (mode, count), under in self._plans.items()]

    def _time(self, mode: Mode, microbatches: int, under: _UnderPlan) -> CallTime:
        time = CallTime(
            what=under.timer.what,
            plan=under.plan,
            promised_ms=None,
            measured_ms=under.measured_ms,
            calls=under.calls,
            bound_by=None,
            network_ms=self._network_ms(mode, under.plan),
            idle_because=under.in_use.idle_because,
            launch=self._launch_of(mode, microbatches),
        )
        if not under.timer.estimator.samples:
            return time
        return self._with_promise(time, self._priced_plan(mode, microbatches, under))

    def _with_promise(self, time: CallTime, priced_plan: PricedPlan) -> CallTime:
        devices, network_ms = self._pricing.devices, time.network_ms or 0.0
        alone_ms = _simulated_ms(priced_plan, devices)
        return replace(
            time,
            promised_ms=max(alone_ms, network_ms),
            bound_by="network" if network_ms > alone_ms else priced_plan.bottleneck(devices),
            idle_devices=priced_plan.idle(devices),
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
