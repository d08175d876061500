"""The plan in use for one kind of call: from guessed costs first, then from measured times of layers and calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal

from rp_sched import (
    NOT_KEPT,
    Infeasible,
    KeptPlan,
    LayerCost,
    Limits,
    Mode,
    NotKept,
    Plan,
    PricedPlan,
    Replanner,
    Resource,
    Search,
    memory_splits,
)
from rp_telemetry.layer_times import ModelTimer

_LOG = logging.getLogger(__name__)
# Samples before plans are searched with measured times, besides the dropped warm-up: one may be an outlier.
_SAMPLES = 2
# The part by which another plan has to promise less, for calls that are launched otherwise to begin with it.
_GAIN = 0.05


class PlanInUse:
    """Follows a `Replanner` with the measurements of `timer`; logs each change of the plan in one line.

    `guesses` and `limits` apply until times are measured. From then on `priced(limits)` returns the limits as
    measured by then, once a call. `search_ms`: how long a search may take, once after every change of layer times.
    `kept`: what an earlier process has settled for, and where this one keeps it for the next.
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
        kept: NotKept = NOT_KEPT,
    ) -> None:
        self._timer = timer
        self._priced = priced
        self._problem = tuple(guesses), limits
        self._devices = devices
        self._microbatches = microbatches
        self._mode: Mode = mode
        self._kept = kept
        # The plan of an earlier process, until it is begun with or given up, and what this one has kept last.
        self._earlier = kept.plan(by_graphs=self._has_graphs)
        self._latest: KeptPlan | None = None
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
        costs, limits = self._known(layers, limits)
        return Search(
            costs, devices=self._devices, microbatches=self._microbatches, mode=self._mode, limits=limits
        ).choice

    def _known(self, layers: Sequence[LayerCost], limits: Limits) -> tuple[Sequence[LayerCost], Limits]:
        """Return what is measured in place of guesses: calls of other sizes may have been."""
        if self._timer.estimator.samples < _SAMPLES:
            return layers, limits
        return self._timer.costs(layers), self._priced(limits)

    @property
    def current(self) -> PricedPlan:
        """The plan of the latest call, priced with what was measured by now."""
        return self._replanner.price(self._priced(self._limits), self._layers)

    @property
    def looks_back(self) -> bool:
        """Whether the next plan depends on what the calls before it took, so that they should be over."""
        return self._replanner.decides_next or self._earlier is not None

    def priced_plan(self) -> PricedPlan:
        """Return the plan for the next call."""
        before = self._replanner.in_use.plan
        if self._timer.num_drifts != self._num_drifts:
            self._num_drifts = self._timer.num_drifts
            self._replanner.restart()
        begins_with_earlier = False
        if self._replanner.decides_next:
            self._earlier = None
            if self._is_outdated:
                self._layers, self._limits, _ = self._first()
                self._is_outdated = False
        elif self._earlier is not None:
            begins_with_earlier = self._try_earlier(self._earlier)
        priced = self._replanner.priced_plan(self._priced(self._limits), self._layers)
        self._tell(priced.plan, before, "earlier process" if begins_with_earlier else self._replanner.why)
        self._has_run = True
        self._tell_idle(priced)
        if self._replanner.is_settled:
            self._keep(KeptPlan(priced.plan, frozenset(self._replanner.slower)))
        return priced

    @property
    def _has_graphs(self) -> bool:
        """Whether graphs launch layers of these calls."""
        return any(layer.has_graphs for layer in self._problem[0])

    def _try_earlier(self, earlier: KeptPlan) -> bool:
        """Use the plan of an earlier process from the next call on, if it fits by now; return whether it does."""
        layers, limits = self._problem
        fitting = (
            priced
            for choice in memory_splits(layers, limits)
            if (priced := self._with(earlier.plan, layers, choice)).fits
        )
        for priced in fitting:
            self._earlier = None
            self._layers, self._limits = layers, priced.loads.limits
            self._replanner.start_with(priced, slower=earlier.slower)
            return True
        return False

    def _with(self, plan: Plan, layers: Sequence[LayerCost], limits: Limits) -> PricedPlan:
        return PricedPlan(plan, layers, mode=self._mode, microbatches=self._microbatches, limits=limits)

    def _tell_idle(self, priced: PricedPlan) -> None:
        """Tell once why a plan leaves devices idle."""
        if (because := self.idle_because) and self._told_idle != priced.plan:
            self._told_idle = priced.plan
            idle = f"{priced.idle(self._devices)} of {self._devices} devices idle"
            fits_none = "no plan that uses all of them fits"
            why = fits_none if because == "nothing fits" else f"plans that use all of them are bound by {because}"
            _LOG.info("%s: %r leaves %s, since %s", self._timer.what, priced.plan, idle, why)

    def _keep(self, settled: KeptPlan) -> None:
        """Keep a plan for the next process, unless it is kept already."""
        if settled != self._latest:
            self._latest = settled
            self._kept.keep_plan(settled, by_graphs=self._has_graphs)

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
            self._earlier, self._is_outdated = None, False
            self._replanner.restart(first)
            self._tell(first.plan, before, "memory")

    def reprice(self, guesses: Sequence[LayerCost], limits: Limits) -> None:
        """Take what calls cost that are launched otherwise from now on, and begin anew.

        With the plan in use, unless it does not fit, or another one is clearly faster by what is known.
        """
        had_graphs = self._has_graphs
        self._problem, before = (tuple(guesses), limits), self._replanner.in_use.plan
        self._layers, self._limits, first = self._first()
        self._earlier, self._is_outdated = None, False
        if self._has_graphs != had_graphs:
            self._earlier, self._latest = self._kept.plan(by_graphs=self._has_graphs), None
        begun = self._kept_on(before, first)
        self._replanner.restart(begun)
        self._tell(begun.plan, before, "launching")

    def _kept_on(self, plan: Plan, first: PricedPlan) -> PricedPlan:
        """Return `plan` as it is priced now, if it fits and `first` is not clearly faster; else `first`."""
        for choice in memory_splits(self._layers, self._problem[1]):
            priced = self._with(plan, *self._known(self._layers, choice))
            if priced.fits and self._alone_ms(first) > (1 - _GAIN) * self._alone_ms(priced):
                self._limits = choice
                return priced
        return first

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
