"""The plan in use for one kind of call: from guessed costs first, then from measured times of layers and calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal

from rp_sched import (
    Infeasible,
    LayerCost,
    Limits,
    Mode,
    Plan,
    PricedPlan,
    Replanner,
    Resource,
    Search,
    memory_splits,
)
from rp_telemetry.layer_times import ModelTimer

from rp_engine.planning.plan_cache import NO_PLAN_CACHE, CachedPlan, NoPlanCache

_LOG = logging.getLogger(__name__)
# Samples before plans are searched with measured times, besides the dropped warm-up: one may be an outlier.
_SAMPLES = 2


class PlanInUse:
    """Follows a `Replanner` with the measurements of `timer`; logs each change of the plan in one line.

    `guesses` and `limits` apply until times are measured. From then on `priced(limits)` returns the limits as
    measured by then, once a call. `search_ms`: how long a search may take, once after every change of layer times.
    `cache`: where the plan is kept for the next process, and what the last one kept.
    """

    def __init__(
        self,
        timer: ModelTimer,
        guesses: Sequence[LayerCost],
        limits: Limits,
        *,
        devices: int,
        microbatches: int,
        mode: Mode,
        priced: Callable[[Limits], Limits] = lambda limits: limits,
        search_ms: float = 0.0,
        cache: NoPlanCache = NO_PLAN_CACHE,
    ) -> None:
        self._timer = timer
        self._priced = priced
        self._problem = tuple(guesses), limits
        self._devices = devices
        self._microbatches = microbatches
        self._mode: Mode = mode
        self._cache = cache
        self._stored = cache.load(len(guesses), mode, microbatches)
        self._kept: CachedPlan | None = None
        # Whether any call has run under a plan.
        self._has_run = False
        # The plan that was last told to leave devices idle.
        self._told_idle: Plan | None = None
        self._num_drifts = timer.num_drifts
        self._is_outdated = False
        self._layers, self._limits, first = self._first()
        self._replanner = Replanner(
            self._layers,
            devices=devices,
            microbatches=microbatches,
            mode=mode,
            limits=self._limits,
            estimator=timer.estimator,
            first=first,
            search_ms=search_ms,
        )

    def _first(self) -> tuple[tuple[LayerCost, ...], Limits, PricedPlan]:
        """Return the costs, the limits and the plan to begin with."""
        layers, limits = self._problem
        # The search's first plan: a longer search is not worth its time while costs are only guessed.
        plans = [(choice, self._searched(layers, choice)) for choice in memory_splits(layers, limits)]
        return layers, *min(plans, key=lambda pair: pair[1].alone_ms(self._devices))

    def _searched(self, layers: Sequence[LayerCost], limits: Limits) -> PricedPlan:
        # Calls of other sizes may have been measured.
        is_measured = self._timer.estimator.samples >= _SAMPLES
        return Search(
            self._timer.costs(layers) if is_measured else layers,
            devices=self._devices,
            microbatches=self._microbatches,
            mode=self._mode,
            limits=self._priced(limits) if is_measured else limits,
        ).choice

    @property
    def current(self) -> PricedPlan:
        """The plan of the latest call, priced with what was measured by now."""
        return self._replanner.price(self._priced(self._limits), self._layers)

    @property
    def looks_back(self) -> bool:
        """Whether the next plan depends on what the calls before it took, so that they should be over."""
        return self._replanner.decides_next or self._stored is not None

    def priced_plan(self) -> PricedPlan:
        """Return the plan for the next call."""
        before = self._replanner.in_use.plan
        if self._timer.num_drifts != self._num_drifts:
            self._num_drifts = self._timer.num_drifts
            self._replanner.restart()
        begins_with_stored = False
        if self._replanner.decides_next:
            self._stored = None
            if self._is_outdated:
                self._layers, self._limits, _ = self._first()
                self._is_outdated = False
        elif self._stored is not None:
            begins_with_stored = self._try_stored(self._stored)
        priced = self._replanner.priced_plan(self._priced(self._limits), self._layers)
        self._tell(priced.plan, before, "earlier process" if begins_with_stored else self._replanner.why)
        self._has_run = True
        self._keep(priced)
        return priced

    def _try_stored(self, stored: CachedPlan) -> bool:
        """Use the plan of the last process from the next call on, if it fits by now; return whether it does."""
        layers, limits = self._problem
        fitting = (
            priced
            for choice in memory_splits(layers, limits)
            if (priced := self._with(stored.plan, layers, choice)).fits
        )
        for priced in fitting:
            self._stored = None
            self._layers, self._limits = layers, priced.loads.limits
            self._replanner.start_with(priced, slower=stored.slower)
            return True
        return False

    def _with(self, plan: Plan, layers: Sequence[LayerCost], limits: Limits) -> PricedPlan:
        return PricedPlan(plan, layers, mode=self._mode, microbatches=self._microbatches, limits=limits)

    def _keep(self, priced: PricedPlan) -> None:
        """Tell why devices are idle, and keep the plan for the next process, once it is settled."""
        if (because := self.idle_because) and self._told_idle != priced.plan:
            self._told_idle = priced.plan
            idle = f"{priced.idle(self._devices)} of {self._devices} devices idle"
            fits_none = "no plan that uses all of them fits"
            why = fits_none if because == "nothing fits" else f"plans that use all of them are bound by {because}"
            _LOG.info("%s: %r leaves %s, since %s", self._timer.what, priced.plan, idle, why)
        # The next process begins without graphs.
        if not self._replanner.is_settled or any(layer.has_graphs for layer in self._layers):
            return
        settled = CachedPlan(priced.plan, frozenset(self._replanner.slower))
        if settled != self._kept:
            self._kept = settled
            self._cache.save(settled)

    def promised_ms(self, plan: Plan) -> float | None:
        """Return the predicted time of a call; None while costs are guessed, or if this plan is not in use."""
        is_in_use = self._replanner.in_use.plan == plan
        return self._replanner.promised_ms if is_in_use and self._replanner.has_samples else None

    def note(self, plan: Plan, call_ms: float) -> None:
        """Note how long a call under a plan took; see `Replanner.note`."""
        self._replanner.note(call_ms, plan)

    def leave_out(self, plan: Plan) -> None:
        """Note that a call under a plan did more than others do; see `Replanner.leave_out`."""
        self._replanner.leave_out(plan)

    @property
    def measured_ms(self) -> float | None:
        """How long calls under the plan in use take; None if none counts yet."""
        return self._replanner.measured_ms

    @property
    def idle_because(self) -> Resource | Literal["nothing fits"] | None:
        """What bounds plans that use all devices, if the plan in use does not; see `Replanner.idle_because`."""
        return self._replanner.idle_because

    def update(self, guesses: Sequence[LayerCost], limits: Limits, *, ran_out: bool) -> None:
        """Take what was measured of memory. `ran_out`: calls needed more than there was, so the plan must change.

        Otherwise the plan in use has fit so far, and the next search counts with it.
        """
        self._problem, self._is_outdated = (tuple(guesses), limits), True
        if ran_out:
            before = self._replanner.in_use.plan
            self._layers, self._limits, first = self._first()
            self._stored, self._is_outdated = None, False
            self._replanner.restart(first)
            self._tell(first.plan, before, "memory")

    def reprice(self, guesses: Sequence[LayerCost], limits: Limits) -> None:
        """Take what calls cost that are launched otherwise from now on, and begin anew with the plan in use."""
        self._problem, before = (tuple(guesses), limits), self._replanner.in_use.plan
        self._layers, self._limits, first = self._first()
        self._stored, self._is_outdated = None, False
        fits = any(self._with(before, guesses, choice).fits for choice in memory_splits(guesses, limits))
        self._replanner.restart(None if fits else first)
        self._tell(self._replanner.in_use.plan, before, "memory")

    def fitting(self, guesses: Sequence[LayerCost], limits: Limits) -> PricedPlan | None:
        """Return the plan that a short search finds for costs that are not those in use; None if none fits."""
        try:
            plans = [self._searched(guesses, choice) for choice in memory_splits(guesses, limits)]
        except Infeasible:
            return None
        return min((plan for plan in plans if plan.fits), key=self._alone_ms, default=None)

    def _alone_ms(self, plan: PricedPlan) -> float:
        return plan.alone_ms(self._devices)

    def _tell(self, plan: Plan, before: Plan, why: str) -> None:
        if plan == before:
            return
        source = "an earlier process" if why == "earlier process" else f"measured {why}"
        was = f", was {before!r}" if self._has_run else ""
        _LOG.info("%s: replanned from %s: %r%s", self._timer.what, source, plan, was)
