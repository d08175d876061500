"""Plan one model's calls: turn the user's plan or a searched one into a list of tasks with their devices."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import rp_sched
from rp_sched import (
    NOT_KEPT,
    Launching,
    Mode,
    NotKept,
    Plan,
    Task,
    counts_of,
    fastest_count,
    without_backward_below,
)
from rp_state.model_state import ModelState
from rp_telemetry.calls.call_log import CallLog
from rp_telemetry.calls.call_span import CallSpan

from rp_engine.device.memory.call_size import CallSize
from rp_engine.device.memory.graph_store import GraphWork
from rp_engine.device.memory.weight_cache import WeightCache
from rp_engine.planning.adaptive import PlanInUse
from rp_engine.planning.footprint import Footprint
from rp_engine.planning.guesses import Guesses, may_write, rounded_up
from rp_engine.planning.launch_records import LaunchRecords
from rp_engine.planning.plan_cache import kept_calls
from rp_engine.planning.pricing import Pricing
from rp_engine.planning.with_state import assign_layers, stateful_tasks
from rp_engine.runtime.runtime import Runtime
from rp_engine.settings.execute_plan import ModelExecutePlan
from rp_engine.settings.run_config import RoundPipeRunConfig

_LOG = logging.getLogger(__name__)
# A search takes at most so long: once for each kind of call, and again when layer times have changed.
_SEARCH_MS = 500.0


class Planner:
    """Plans one model's calls on a runtime, from guessed costs at first and then from measured ones.

    Plans and measurements are kept until the model's blocks change. `size`: of a call.
    `has_room_for_pairs`: whether host memory suffices if two tasks of a call add to each gradient. `graphable`:
    the layers that graphs could launch in calls of a mode, as far as was seen of them. `is_compiled`: whether
    devices run compiled layers.
    """

    def __init__(
        self,
        name: str,
        state: ModelState,
        runtime: Runtime,
        has_room_for_pairs: Callable[[], bool],
        graphable: Callable[[Mode], frozenset[int]],
        *,
        is_compiled: bool,
    ) -> None:
        self._name = name
        self._is_compiled = is_compiled
        self._has_room_for_pairs = has_room_for_pairs
        self._graphable = graphable
        self._state = state
        self._runtime = runtime
        # Numbers of microbatches by mode. Kept when layers change: what a model computes must not depend on that.
        self.chosen: dict[Mode, int] = {}
        self.forget()

    def forget(self) -> None:
        """Drop all plans and measurements, since the layers have changed."""
        self.footprint = Footprint(self._state.layers)
        self.pricing = Pricing(self._state, self._runtime, self.footprint, self._has_room_for_pairs)
        self.guesses = Guesses(self._state.layers, self.footprint, self.pricing)
        # How calls are launched: by Python, or by graphs.
        # Not on CPU devices: launching is computing there, and what they record serves tests.
        may_choose = self._runtime.backend.abilities.captures_graphs and not self.pricing.on_host
        self.launching = Launching(self._graphable, may_choose=may_choose)
        self.records = LaunchRecords(self._name, self._runtime, self.guesses, self.launching)
        self._homes: tuple[tuple[int, ...], ...] = ()
        # Each with the footprint's version and number of shortages at its last update, and with the layers of its
        # graphs and of all. It is updated when the version has changed, and told whether memory has run out since.
        self._plans: dict[object, tuple[tuple[int, int, object], PlanInUse]] = {}
        # The times of calls, and those that their plans promise.
        self.log = CallLog(self.pricing, self.launching.decision)

    def looks_back(self, config: RoundPipeRunConfig, mode: Mode, size: CallSize) -> bool:
        """Return whether the next plan depends on what earlier calls took, so that they should be over.

        Not on CPU devices: there calls may be launched while user code waits for the next one.
        """
        return config.is_planned and not self.pricing.on_host and self._plan(mode, size).looks_back

    def tasks(
        self, config: RoundPipeRunConfig, mode: Mode, size: CallSize, *, input_grads: bool
    ) -> tuple[Task, ...]:
        """Return the tasks of the next call, each with its device.

        Tasks go to the devices in turn, starting where the call before ended, or as a searched plan assigns them.
        Backward tasks leave out the layers below the lowest trained one, unless `input_grads` are wanted.

        Raises `rp_sched.SchedError` (a `ValueError`) for a user's plan that does not fit the model or the call.
        """
        launch, may_replay = config.launch or "auto", config.recompute_grain != "layer"
        timer = self.records.timer(mode, size.microbatches)
        settled = partial(self._settled, mode, size, config.execute_plan)
        self.launching.meet(launch, mode, size.microbatches, timer, settled, may_replay=may_replay)
        # Plans of the first calls count with the memory of graphs that an earlier process has settled for.
        self.footprint.graphed = self.launching.graphed
        tasks = self._dealt(config, mode, size)
        self._runtime.next_device = (tasks[-1].device + 1) % len(self._runtime.lanes)
        lowest = 0 if input_grads else self._state.first_trainable()
        kept = without_backward_below(lowest, tasks)
        missing = partial(self._missing_bytes, mode, size, kept, is_planned=config.is_planned)
        self.launching.choose(launch, mode, size.microbatches, kept, missing, may_replay=may_replay)
        self.footprint.graphed = self.launching.graphed
        self.records.predict(mode, size, kept)
        return kept

    def _missing_bytes(
        self, mode: Mode, size: CallSize, tasks: Sequence[Task], layers: frozenset[int], *, is_planned: bool
    ) -> int | None:
        """Return the device memory that graphs of these layers lack beside what tasks take; None if unknown.

        None lacks if there is another plan that has room for them. `is_planned`: whether plans are ours.
        """
        if not self.pricing.sees_memory:
            return 0
        if not self.footprint.knows_peak:
            return None
        missing = max(self.guesses.foreseen_bytes(size.rows, tasks, layers) - self.pricing.usable_bytes, 0)
        return 0 if missing and is_planned and self._has_room_under_another(mode, size, layers) else missing

    def _has_room_under_another(self, mode: Mode, size: CallSize, layers: frozenset[int]) -> bool:
        """Whether the plan that is best for graphs of these layers has room for them."""
        costs, limits = self.guesses.problem(mode, rounded_up(size.rows), layers)
        found = self._plan(mode, size).fitting(costs, limits)
        if found is None or not all(costs[layer].has_graphs for layer in layers):
            return False
        tasks = rp_sched.Assigner(len(self._runtime.lanes)).assign(found)
        return self.guesses.foreseen_bytes(size.rows, tasks, layers) <= self.pricing.usable_bytes

    def note_over(
        self, mode: Mode, size: CallSize, call: CallSpan, work: GraphWork, nbytes: Callable[[], int]
    ) -> None:
        """Use what a call took that is over. `work`: what graphs did in it; `nbytes`: asks what they keep."""
        awaits = work.is_awaited and self.launching.note_awaiting(mode, size.microbatches)
        call_ms = self.log.note(mode, call, is_usual=not (work.is_prepared or awaits))
        if call_ms is not None:
            replayed, is_measured = work.is_replayed, work.is_measured
            self.launching.note(mode, size.microbatches, call_ms, replayed=replayed, is_measured=is_measured)
        if work.is_prepared and self.pricing.sees_memory:
            self.footprint.note_graphs(nbytes())

    # Plans

    def tasks_aside(self, config: RoundPipeRunConfig, size: CallSize) -> tuple[Task, ...]:
        """Return the tasks of an inference call that is not in the log, and after which calls go on as before it.

        Raises as `tasks` does.
        """
        if config.execute_plan is not None:
            # Its groups may be of another number of microbatches.
            plan = replace(
                self._checked(config.execute_plan, "infer"), groups=(), forward_groups=(), backward_groups=()
            )
            tasks = self._turns(plan, "infer", size.microbatches)
        else:
            tasks = rp_sched.Assigner(len(self._runtime.lanes)).assign(self._plan("infer", size).current)
        self.records.predict("infer", size, tasks)
        return tasks

    def tasks_with_state(self, size: CallSize, kept: Sequence[WeightCache]) -> tuple[Task, ...]:
        """Return the tasks of an inference call in which each layer runs on its device, where its state is.

        `kept`: the weights that are there.
        """
        memory = [use.total_bytes if use.is_complete else math.inf for use in self._runtime.memory()]
        tasks = stateful_tasks(self._state.layers, size.microbatches, self.homes(), kept, memory)
        self.records.predict("infer", size, tasks)
        return tasks

    def homes(self) -> tuple[tuple[int, ...], ...]:
        """Return the layers of each device in calls whose state stays there; the same until layers change."""
        if not self._homes:
            self._homes = assign_layers(self._state.layers, self._runtime)
        return self._homes

    def _dealt(self, config: RoundPipeRunConfig, mode: Mode, size: CallSize) -> tuple[Task, ...]:
        timer = self.records.timer(mode, size.microbatches)
        layers = self.launching.layers(mode, size.microbatches)
        guesses = partial(self.guesses.costs, size.rows if self.pricing.sees_memory else 0, layers)
        number = self._runtime.num_calls + 1
        if config.execute_plan is not None:
            plan = self._checked(config.execute_plan, mode)
            self.log.follow(number, timer, mode, size.microbatches, plan, guesses)
            return self._turns(plan, mode, size.microbatches)
        in_use = self._plan(mode, size)
        if (call_ms := in_use.measured_ms) is not None:
            self.pricing.note_call(timer, in_use.current, call_ms)
        priced_plan = in_use.priced_plan()
        self.log.follow(number, timer, mode, size.microbatches, priced_plan.plan, guesses, in_use)
        if priced_plan.plan.in_turn:
            return self._turns(priced_plan.plan, mode, size.microbatches)
        return self._runtime.assigner.assign(priced_plan)

    def _checked(self, plan: Plan | ModelExecutePlan, mode: Mode) -> Plan:
        if isinstance(plan, ModelExecutePlan):
            plan.check_valid(len(self._state.layers), mode)
            return plan.to_plan(mode)
        fitting = plan.for_mode(mode)
        fitting.check(len(self._state.layers), mode)
        return fitting

    def _turns(self, plan: Plan, mode: Mode, microbatches: int) -> tuple[Task, ...]:
        count, first = len(self._runtime.lanes), self._runtime.next_device
        return rp_sched.order(plan, mode=mode, devices=count, microbatches=microbatches, first_device=first)

    def _plan(self, mode: Mode, size: CallSize) -> PlanInUse:
        # Whether a layer writes its buffers is only known after it has run.
        writers = tuple(layer.index for layer in self._state.layers if may_write(layer))
        rows = rounded_up(size.rows)
        key = (mode, size.microbatches, writers, rows if self.pricing.sees_memory else 0)
        layers = self.launching.layers(mode, size.microbatches)
        graphs = layers, self.footprint.graphed
        state = self.footprint.version, self.footprint.num_shortages, graphs
        if key not in self._plans:
            plan = self._new_plan(mode, size)
        else:
            (version, shortages, before), plan = self._plans[key]
            if version != self.footprint.version:
                plan.update(
                    *self.guesses.problem(mode, rows, layers), ran_out=shortages != self.footprint.num_shortages
                )
            if graphs != before:
                plan.reprice(*self.guesses.problem(mode, rows, layers))
        self._plans[key] = (state, plan)
        return plan

    def microbatches(self, mode: Mode, batch_size: int, rows: int) -> int:
        """Return the number of microbatches for calls of this mode; it is chosen and logged once, then kept.

        It is the least number whose plan is within 1 % of the fastest, by guessed costs. If no plan fits, it is as
        many as the batch allows.

        Args:
            batch_size: samples of the first call; a later batch that has fewer gets a microbatch for each.
            rows: rows of that call, as `rows_of` counts them.
        """
        if mode not in self.chosen:
            counts = counts_of(batch_size)
            best = fastest_count(
                counts, partial(self.guesses.real_problem, rows), devices=len(self._runtime.lanes), mode=mode
            )
            self.chosen[mode] = counts[-1] if best is None else best[0]
            _LOG.info(
                "model %r: %d microbatches in each call of mode %s, chosen for a batch of %d",
                *(self._name, self.chosen[mode], mode, batch_size),
            )
        return min(self.chosen[mode], batch_size)

    def _new_plan(self, mode: Mode, size: CallSize) -> PlanInUse:
        microbatches, rows = size.microbatches, rounded_up(size.rows)
        timer = self.records.timer(mode, microbatches)
        return PlanInUse(
            timer,
            *self.guesses.problem(mode, rows, self.launching.layers(mode, microbatches)),
            devices=len(self._runtime.lanes),
            microbatches=microbatches,
            mode=mode,
            priced=partial(self.pricing.priced, timer),
            # On CPU devices a search takes cores from calls, and their times say little of the next process.
            search_ms=0.0 if self.pricing.on_host else _SEARCH_MS,
            kept=self._settled(mode, size),
        )

    def _settled(self, mode: Mode, size: CallSize, users: Plan | ModelExecutePlan | None = None) -> NotKept:
        """Return what calls of this size have settled for, in earlier processes and in this one.

        `users`: the user's plan, with which calls take other times than with ours.
        """
        if self.pricing.on_host:
            return NOT_KEPT
        rows = rounded_up(size.rows) if self.pricing.sees_memory else 0
        more = {"rows": rows, "compiled": self._is_compiled, "plan": repr(users)}
        return kept_calls(self._name, self._state, self._runtime, mode, size.microbatches, more)
