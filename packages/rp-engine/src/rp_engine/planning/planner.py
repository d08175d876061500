"""Plan one model's calls: turn the user's plan or a searched one into a list of tasks with their devices."""

from __future__ import annotations

import copy
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import rp_sched
from rp_sched import NOT_KEPT, Launching, LayerCost, Limits, Mode, NotKept, Plan, Task, counts_of, fastest_count
from rp_state.model_state import ModelState
from rp_telemetry.calls.call_log import CallLog
from rp_telemetry.calls.call_span import CallSpan
from rp_telemetry.launch_times import Launches
from rp_telemetry.layer_times import LayerTimes, ModelTimer

from rp_engine.device.memory.call_size import CallSize
from rp_engine.device.memory.graph_store import GraphWork
from rp_engine.device.memory.weight_cache import WeightCache
from rp_engine.planning.adaptive import PlanInUse
from rp_engine.planning.footprint import Footprint, resident_bytes
from rp_engine.planning.guesses import at_most, guessed_cost, in_real_time, may_write, slowest_gb_s
from rp_engine.planning.plan_cache import kept_calls
from rp_engine.planning.pricing import Pricing
from rp_engine.planning.with_state import assign_layers, stateful_tasks
from rp_engine.runtime.runtime import Runtime
from rp_engine.settings.execute_plan import ModelExecutePlan
from rp_engine.settings.run_config import RoundPipeRunConfig

_LOG = logging.getLogger(__name__)
# Until layers are measured, plans allow for this many times the guessed bytes of kept activations, which are
# guessed from the widths of weights alone.
_UNMEASURED = 4
# Calls of up to this many times the measured rows count as measured: of one step of `_rounded_up`, which is 19 %.
_MORE_ROWS = 1.2
# A search takes at most so long: once for each kind of call, and again when layer times have changed.
_SEARCH_MS = 500.0
# The number of measured launches to remember: as many as may be in flight, and some that failed.
_LAUNCHES = 8


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
        self._on_host = runtime.backend.abilities.computes_on_host
        # Numbers of microbatches by mode. Kept when layers change: what a model computes must not depend on that.
        self.chosen: dict[Mode, int] = {}
        # CPU devices without a limit use host memory, where activations are not counted.
        self._sees_memory = all(use.is_complete for use in runtime.memory())
        self.forget()

    def forget(self) -> None:
        """Drop all plans and measurements, since the layers have changed."""
        self._timers: dict[tuple[Mode, int], ModelTimer] = {}
        # How calls are launched: by Python, or by graphs.
        # Not on CPU devices: launching is computing there, and what they record serves tests.
        may_choose = self._runtime.backend.abilities.captures_graphs and not self._on_host
        self.launching = Launching(self._graphable, may_choose=may_choose)
        self._homes: tuple[tuple[int, ...], ...] = ()
        # Each with the footprint's version and number of shortages at its last update, and with the layers of its
        # graphs and of all. It is updated when the version has changed, and told whether memory has run out since.
        self._plans: dict[object, tuple[tuple[int, int, object], PlanInUse]] = {}
        self.footprint = Footprint(self._state.layers)
        self._launches: deque[LayerTimes] = deque(maxlen=_LAUNCHES)
        self.pricing = Pricing(self._state, self._runtime, self.footprint, self._has_room_for_pairs)
        # The times of calls, and those that their plans promise.
        self.log = CallLog(self.pricing, self.launching.decision)
        # Tasks that ran while the peak was measured, without gradients of earlier calls beside them.
        self._shown: set[object] = set()
        # The last call's predicted peak on a device, and the usable memory that it leaves free.
        self.predicted_bytes: int | None = None
        self.spare_bytes = 0

    def watch(
        self, config: RoundPipeRunConfig, mode: Mode, size: CallSize, tasks: Sequence[Task]
    ) -> LayerTimes | None:
        """Return a recorder for the next launch's times and memory; None if no more measurements are needed.

        On CPU devices a call with a user's plan is measured only if `ModelTimer.VERBOSE`: nothing depends on it.
        """
        timer = self._timer(mode, size.microbatches)
        is_given = not config.is_planned and self._on_host and not self._sees_memory
        if not timer.watches_next() or (is_given and not timer.VERBOSE):
            return None
        self._forget_raised_peaks()
        replayed = self.launching.layers_of_call(mode, size.microbatches)
        # A CPU device computes on the thread that launches, so launching cannot be measured separately.
        launches = None if self._on_host or replayed else Launches()
        times = LayerTimes(
            timer, size.rows, tasks, self._peak_bytes(), self.spare_bytes, launches=launches, by_graphs=replayed
        )
        times.graphed = self.footprint.graphed
        self._launches.append(times)
        return times

    def take(self, times: LayerTimes, *, is_whole: bool = True) -> None:
        """Use the measurements of a finished launch. `is_whole`: none of its tasks was run again."""
        if is_whole:
            times.timer.take(times)
        if not self._sees_memory:
            return
        self.footprint.note_kept(times.kept, times.rows, is_whole=is_whole)
        if not is_whole:
            return
        self._shown |= _shapes(times.tasks, times.rows)
        peak = self._peak_bytes()
        if peak <= times.peak_bytes:
            self.footprint.note_no_peak(
                peak - self._graph_bytes(times), times.tasks, self._costs(times), times.rows
            )
        elif times in self._launches:
            launches = self._launched_since(times)
            largest = max(launches, key=self._resident_bytes)
            # Part of the peak may have been gradients that were still being downloaded, which is not workspace.
            peak -= max(launch.spare_bytes for launch in launches) + self._graph_bytes(largest)
            self.footprint.note_peak(peak, largest.tasks, self._costs(largest), largest.rows)

    def note_shortages(self, tasks: Sequence[Task], size: CallSize) -> None:
        """Note that these tasks of a call ran out of device memory, so that later plans use less."""
        for task in tasks if self._sees_memory else ():
            self.footprint.note_shortage(task, self._guesses(size.rows), size.rows)

    def _launched_since(self, times: LayerTimes) -> list[LayerTimes]:
        # Later calls are launched before this one is over, so the peak may belong to any of these.
        launches = list(self._launches)
        return launches[launches.index(times) :]

    def _resident_bytes(self, times: LayerTimes) -> int:
        return resident_bytes(times.tasks, self._costs(times)) + self._graph_bytes(times)

    def _costs(self, times: LayerTimes) -> list[LayerCost]:
        return self._guesses(times.rows, times.by_graphs)

    def _graph_bytes(self, times: LayerTimes) -> int:
        return self.footprint.graph_bytes(self._costs(times), times.rows, times.graphed)

    def _forget_raised_peaks(self) -> None:
        """Have the peak of a measured call be its own, without weights that travelled ahead of others."""
        for lane in self._runtime.lanes:
            if lane.has_raised_peak:
                lane.has_raised_peak = False
                lane.device.reset_peak_memory()

    def _peak_bytes(self) -> int:
        return max(use.peak_bytes for use in self._runtime.memory())

    def looks_back(self, config: RoundPipeRunConfig, mode: Mode, size: CallSize) -> bool:
        """Return whether the next plan depends on what earlier calls took, so that they should be over.

        Not on CPU devices: there calls may be launched while user code waits for the next one.
        """
        return config.is_planned and not self._on_host and self._plan(mode, size).looks_back

    def _timer(self, mode: Mode, microbatches: int) -> ModelTimer:
        key = (mode, microbatches)
        if key not in self._timers:
            what = f"model {self._name!r}, {mode} calls of {microbatches} microbatches"
            self._timers[key] = ModelTimer(what, len(self._state.layers), self._runtime.measurements)
        return self._timers[key]

    def tasks(
        self, config: RoundPipeRunConfig, mode: Mode, size: CallSize, *, input_grads: bool
    ) -> tuple[Task, ...]:
        """Return the tasks of the next call, each with its device.

        Tasks go to the devices in turn, starting where the call before ended, or as a searched plan assigns them.
        Backward tasks leave out the layers below the lowest trained one, unless `input_grads` are wanted.

        Raises `rp_sched.SchedError` (a `ValueError`) for a user's plan that does not fit the model or the call.
        """
        launch, may_replay = config.launch or "auto", config.recompute_grain != "layer"
        timer, settled = self._timer(mode, size.microbatches), partial(self._settled, mode, size)
        self.launching.meet(launch, mode, size.microbatches, timer, settled, may_replay=may_replay)
        tasks = self._dealt(config, mode, size)
        self._runtime.next_device = (tasks[-1].device + 1) % len(self._runtime.lanes)
        # Below the lowest trained layer nothing needs gradients.
        lowest = 0 if input_grads else self._state.first_trainable()
        kept = tuple(_from(lowest, task) for task in tasks if not task.recomputes or task.layers.stop > lowest)
        missing = partial(self._missing_bytes, mode, size, kept, is_planned=config.is_planned)
        self.launching.choose(launch, mode, size.microbatches, kept, missing, may_replay=may_replay)
        self.footprint.graphed = self.launching.graphed
        self._predict(mode, size, kept)
        return kept

    def _missing_bytes(
        self, mode: Mode, size: CallSize, tasks: Sequence[Task], layers: frozenset[int], *, is_planned: bool
    ) -> int | None:
        """Return the device memory that graphs of these layers lack beside what tasks take; None if unknown.

        None lacks if there is another plan that has room for them. `is_planned`: whether plans are ours.
        """
        if not self._sees_memory:
            return 0
        if not self.footprint.knows_peak:
            return None
        missing = max(self._foreseen_bytes(size.rows, tasks, layers) - self.pricing.usable_bytes, 0)
        return 0 if missing and is_planned and self._has_room_under_another(mode, size, layers) else missing

    def _has_room_under_another(self, mode: Mode, size: CallSize, layers: frozenset[int]) -> bool:
        """Whether the plan that is best for graphs of these layers has room for them."""
        costs, limits = self._problem(mode, _rounded_up(size.rows), layers)
        found = self._plan(mode, size).fitting(costs, limits)
        if found is None or not all(costs[layer].has_graphs for layer in layers):
            return False
        tasks = rp_sched.Assigner(len(self._runtime.lanes)).assign(found)
        return self._foreseen_bytes(size.rows, tasks, layers) <= self.pricing.usable_bytes

    def _foreseen_bytes(self, rows: int, tasks: Sequence[Task], layers: frozenset[int]) -> int:
        costs = self._guesses(rows, layers)
        taken = self.footprint.working_at(rows) + self.footprint.graph_bytes(costs, rows)
        return resident_bytes(tasks, costs) + taken

    def note_over(
        self, mode: Mode, size: CallSize, call: CallSpan, work: GraphWork, nbytes: Callable[[], int]
    ) -> None:
        """Use what a call took that is over. `work`: what graphs did in it; `nbytes`: asks what they keep."""
        awaits = work.is_awaited and self.launching.note_awaiting(mode, size.microbatches)
        call_ms = self.log.note(mode, call, is_usual=not (work.is_prepared or awaits))
        if call_ms is not None:
            replayed, is_measured = work.is_replayed, work.is_measured
            self.launching.note(mode, size.microbatches, call_ms, replayed=replayed, is_measured=is_measured)
        if work.is_prepared and self._sees_memory:
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
        self._predict("infer", size, tasks)
        return tasks

    def tasks_with_state(self, size: CallSize, kept: Sequence[WeightCache]) -> tuple[Task, ...]:
        """Return the tasks of an inference call in which each layer runs on its device, where its state is.

        `kept`: the weights that are there.
        """
        memory = [use.total_bytes if use.is_complete else math.inf for use in self._runtime.memory()]
        tasks = stateful_tasks(self._state.layers, size.microbatches, self.homes(), kept, memory)
        self._predict("infer", size, tasks)
        return tasks

    def homes(self) -> tuple[tuple[int, ...], ...]:
        """Return the layers of each device in calls whose state stays there; the same until layers change."""
        if not self._homes:
            self._homes = assign_layers(self._state.layers, self._runtime)
        return self._homes

    def _predict(self, mode: Mode, size: CallSize, tasks: tuple[Task, ...]) -> None:
        if self.footprint.is_measured:
            replayed = self.launching.layers_of_call(mode, size.microbatches)
            self.predicted_bytes = self._foreseen_bytes(size.rows, tasks, replayed)
            spare = self.pricing.usable_bytes - self.predicted_bytes
            self.spare_bytes = max(spare, 0) if self._knows_peak(mode, size, tasks) else 0

    def _knows_peak(self, mode: Mode, size: CallSize, tasks: Sequence[Task]) -> bool:
        # While calls are measured, a new task must show its own peak.
        is_shown = _shapes(tasks, size.rows) <= self._shown
        return self.footprint.knows_peak and (is_shown or not self._timer(mode, size.microbatches).is_watching())

    def _dealt(self, config: RoundPipeRunConfig, mode: Mode, size: CallSize) -> tuple[Task, ...]:
        timer = self._timer(mode, size.microbatches)
        layers = self.launching.layers(mode, size.microbatches)
        guesses = partial(self._guesses, size.rows if self._sees_memory else 0, layers)
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
        fitting = _for_mode(plan, mode)
        fitting.check(len(self._state.layers), mode)
        return fitting

    def _turns(self, plan: Plan, mode: Mode, microbatches: int) -> tuple[Task, ...]:
        count, first = len(self._runtime.lanes), self._runtime.next_device
        return rp_sched.order(plan, mode=mode, devices=count, microbatches=microbatches, first_device=first)

    def _plan(self, mode: Mode, size: CallSize) -> PlanInUse:
        # Whether a layer writes its buffers is only known after it has run.
        writers = tuple(layer.index for layer in self._state.layers if may_write(layer))
        rows = _rounded_up(size.rows)
        key = (mode, size.microbatches, writers, rows if self._sees_memory else 0)
        layers = self.launching.layers(mode, size.microbatches)
        graphs = layers, self.footprint.graphed
        state = self.footprint.version, self.footprint.num_shortages, graphs
        if key not in self._plans:
            plan = self._new_plan(mode, size)
        else:
            (version, shortages, before), plan = self._plans[key]
            if version != self.footprint.version:
                plan.update(*self._problem(mode, rows, layers), ran_out=shortages != self.footprint.num_shortages)
            if graphs != before:
                plan.reprice(*self._problem(mode, rows, layers))
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
                counts, partial(self._real_problem, rows), devices=len(self._runtime.lanes), mode=mode
            )
            self.chosen[mode] = counts[-1] if best is None else best[0]
            _LOG.info(
                "model %r: %d microbatches in each call of mode %s, chosen for a batch of %d",
                *(self._name, self.chosen[mode], mode, batch_size),
            )
        return min(self.chosen[mode], batch_size)

    def _real_problem(self, rows: int, count: int) -> tuple[list[LayerCost], Limits]:
        """Return guessed costs and limits, in real time, if `rows` are split into `count` microbatches."""
        part = -(-rows // count)
        costs, rates = (
            [in_real_time(cost, part) for cost in self._guesses(part)],
            self._runtime.measurements.rates(),
        )
        up_gb_s, down_gb_s = slowest_gb_s(rates.up_gb_s), slowest_gb_s(rates.down_gb_s)
        return costs, replace(self.pricing.limits(costs), upload_gb_s=up_gb_s, download_gb_s=down_gb_s)

    def costs(self, mode: Mode) -> list[LayerCost]:
        """Return the assumed cost of each layer: measured if calls of this mode were, otherwise guessed."""
        guesses = self._guesses(0)
        timers = [timer for (kind, _), timer in self._timers.items() if kind == mode]
        measured = [timer.estimator for timer in timers if timer.estimator.samples]
        if not measured:
            return guesses
        best = max(measured, key=lambda one: one.samples)
        # On a copy: `costs` changes the estimator, which compares with the times it returned last.
        return list(copy.deepcopy(best).costs(guesses))

    def _guesses(self, rows: int, by_graphs: frozenset[int] = frozenset()) -> list[LayerCost]:
        return [guessed_cost(layer, self.footprint, rows, by_graphs) for layer in self._state.layers]

    def _problem(
        self, mode: Mode, rows: int, by_graphs: frozenset[int] = frozenset()
    ) -> tuple[list[LayerCost], Limits]:
        """Return the guessed costs and the limits of calls whose microbatches have so many rows."""
        rows = rows if self._sees_memory else 0
        caution = self._caution(mode, rows)
        costs = [
            replace(cost, kept_bytes=int(cost.kept_bytes * caution)) for cost in self._guesses(rows, by_graphs)
        ]
        limits = self.pricing.limits(costs, rows, is_known=caution == 1)
        budget = limits.device_memory_bytes
        assert budget is not None
        return [at_most(cost, budget) for cost in costs], limits

    def _new_plan(self, mode: Mode, size: CallSize) -> PlanInUse:
        microbatches, rows = size.microbatches, _rounded_up(size.rows)
        timer = self._timer(mode, microbatches)
        return PlanInUse(
            timer,
            *self._problem(mode, rows, self.launching.layers(mode, microbatches)),
            devices=len(self._runtime.lanes),
            microbatches=microbatches,
            mode=mode,
            priced=partial(self.pricing.priced, timer),
            # On CPU devices a search takes cores from calls, and their times say little of the next process.
            search_ms=0.0 if self._on_host else _SEARCH_MS,
            kept=self._settled(mode, size),
        )

    def _settled(self, mode: Mode, size: CallSize) -> NotKept:
        """Return what calls of this size have settled for, in earlier processes and in this one."""
        if self._on_host:
            return NOT_KEPT
        rows = _rounded_up(size.rows) if self._sees_memory else 0
        more = {"rows": rows, "compiled": self._is_compiled}
        return kept_calls(self._name, self._state, self._runtime, mode, size.microbatches, more)

    def _caution(self, mode: Mode, rows: int) -> float:
        """Return the factor by which layers may keep more than estimated of a microbatch of `rows`."""
        if not self._sees_memory or (mode == "infer" and self.footprint.knows_peak):
            return 1
        if not self.footprint.is_measured:
            return _UNMEASURED
        # What layers keep may grow with the square of the rows, as attention's scores do.
        return max(rows / (_rounded_up(self.footprint.most_rows) * _MORE_ROWS), 1)


def _shapes(tasks: Sequence[Task], rows: int) -> set[object]:
    """Return the properties of tasks that their memory depends on, whatever their devices."""
    return {(_rounded_up(rows), task.kind, task.layers, len(task.microbatches)) for task in tasks}


def _rounded_up(rows: int) -> int:
    # To a quarter power of two, so that batches of similar length share a plan.
    return math.ceil(2 ** (math.ceil(4 * math.log2(rows)) / 4))


def _for_mode(plan: Plan, mode: Mode) -> Plan:
    # A plan for fused calls also serves other calls, where its fused stage becomes an ordinary stage.
    if mode == "fused":
        return plan
    tail = () if plan.fused is None else (plan.fused,)
    up = replace(plan, forward=(*plan.forward, *tail), fused=None, groups=())
    if mode == "infer":
        return replace(up, backward=(), backward_groups=())
    return replace(up, backward=(*tail, *plan.backward))


def _from(lowest: int, task: Task) -> Task:
    """Return a backward task without the layers below `lowest`, which need neither recomputation nor weights."""
    start, stop = task.layers.start, task.layers.stop
    return replace(task, layers=range(lowest, stop)) if task.recomputes and start < lowest else task
