"""The current plan for one kind of call: from guessed costs at first, then from measured layer times."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rp_sched import LayerCost, Limits, Mode, Plan, PricedPlan, Replanner, Search

from rp_engine.telemetry.layer_times import ModelTimer

_LOG = logging.getLogger(__name__)
# Samples needed before the first replan, besides the dropped warm-up: one may be an outlier, two show the spread.
_FIRST_SAMPLES = 2
# A search holds the GIL for a slice, which may delay a device's thread by as much. That thread keeps two
# microbatches queued on its device, so the delay costs nothing where a microbatch takes this long.
_SLICE_MS = 1.0
_PAUSE_S = 10e-3
_LONG_MICROBATCH_MS = 20.0
# Search only during this first part of a call's predicted time, so that the search never delays its results.
_PART_OF_CALL = 0.5
# Shares of the device's memory to try for prefetched weights.
_AHEAD = (0.5, 0.25, 0.125, 0.0625)


class PlanInUse:
    """Replans from the measurements of `timer`; logs each change of the plan in one line.

    `guesses` and `limits` apply until times are measured. From then on `priced(limits)` returns the limits as
    measured by then, once a call, and the plan is revised when they change.
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
        priced: Callable[[Limits], Limits] | None = None,
    ) -> None:
        self._timer = timer
        self._priced: Callable[[Limits], Limits] = (lambda limits: limits) if priced is None else priced
        self._layers = tuple(guesses)
        self._devices = devices
        self._microbatches = microbatches
        self._mode: Mode = mode
        # The search's first plan: a longer search is not worth its time while costs are only guessed.
        self._priced_plan, self._limits = min(
            ((self._first(choice), choice) for choice in memory_splits(guesses, limits)),
            key=lambda pair: pair[0].alone_ms(devices),
        )
        self._replanner: Replanner | None = None
        self._is_searched = False
        self._call_ms: tuple[PricedPlan | None, float] = (None, 0.0)

    def _first(self, limits: Limits) -> PricedPlan:
        search = Search(
            self._layers, devices=self._devices, microbatches=self._microbatches, mode=self._mode, limits=limits
        )
        return search.best

    def priced_plan(self) -> PricedPlan:
        """Return the plan for the next call, without further search."""
        before = self._priced_plan
        if self._replanner is None and self._timer.estimator.samples >= _FIRST_SAMPLES:
            self._replanner = self._from_measurements()
        if self._replanner is not None:
            self._priced_plan = self._replanner.priced_plan(self._priced(self._limits))
        if self._priced_plan is not before:
            self._is_searched = False
            self._tell(before, "times")
        return self._priced_plan

    def promised_ms(self, plan: Plan) -> float | None:
        """Return the predicted time of a call; None while costs are guessed, or if this plan is not in use."""
        replanner = self._replanner
        return replanner.promised_ms if replanner is not None and replanner.in_use.plan == plan else None

    def note(self, plan: Plan, call_ms: float) -> None:
        """Note how long calls under a plan take, if it is the one in use; see `Replanner.note`."""
        if self._replanner is not None and self._replanner.in_use.plan == plan:
            self._replanner.note(call_ms)

    def _from_measurements(self) -> Replanner:
        return Replanner(
            self._layers,
            devices=self._devices,
            microbatches=self._microbatches,
            mode=self._mode,
            limits=self._priced(self._limits),
            estimator=self._timer.estimator,
        )

    def tell(self, before: PlanInUse) -> None:
        """Log that this plan replaces `before` because memory was measured, if they differ."""
        self.priced_plan()
        self._tell(before._priced_plan, "memory")

    def _tell(self, before: PricedPlan, why: str) -> None:
        if self._priced_plan.plan != before.plan:
            _LOG.info(
                "%s: replanned from measured %s: %r, was %r",
                self._timer.what,
                why,
                self._priced_plan.plan,
                before.plan,
            )

    def improve(self, *, budget_ms: float) -> bool:
        """Search for a better plan for about `budget_ms`; return whether the search is complete."""
        if self._replanner is None:
            return True
        self._is_searched = self._replanner.improve(budget_ms=budget_ms)
        return self._is_searched

    def improve_while(self, wait: Callable[[float], bool]) -> None:
        """Search in short slices while the devices run a call, so that the call is not delayed.

        Args:
            wait: waits at most this many seconds for the call's first task; returns whether the task is over.
        """
        if self._replanner is None or self._is_searched or self._microbatch_ms() < _LONG_MICROBATCH_MS:
            return
        until = time.perf_counter() + self._predicted_ms() * _PART_OF_CALL / 1e3
        while time.perf_counter() < until and not wait(_PAUSE_S):
            if self.improve(budget_ms=_SLICE_MS):
                return

    def _microbatch_ms(self) -> float:
        return self._priced_plan.busy_ms / self._priced_plan.steps

    def _predicted_ms(self) -> float:
        if self._call_ms[0] is not self._priced_plan:
            self._call_ms = (self._priced_plan, self._priced_plan.alone_ms(self._devices))
        return self._call_ms[1]


def memory_splits(layers: Sequence[LayerCost], limits: Limits) -> Iterator[Limits]:
    """Yield the limits to try: several splits of device memory between prefetched weights and activations.

    If everything fits, `limits` alone. Otherwise large stages leave little room for activations, and small stages
    are many, so the caller compares plans for several sizes.
    """
    room = limits.device_memory_bytes
    wanted = sum(2 * layer.weight_bytes + layer.gradient_bytes + layer.kept_bytes for layer in layers)
    if room is None or wanted <= room or limits.stage_bytes is not None:
        yield limits
    else:
        for share in _AHEAD:
            yield replace(limits, ahead_bytes=max(int(room * share), 1))
