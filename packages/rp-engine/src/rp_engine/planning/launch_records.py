"""Records of a model's launches: the times of its calls' layers, and the device memory that they took."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence

from rp_sched import Launching, LayerCost, Mode, Task
from rp_telemetry.launch_times import Launches
from rp_telemetry.layer_times import LayerTimes, ModelTimer

from rp_engine.device.memory.call_size import CallSize
from rp_engine.planning.footprint import resident_bytes
from rp_engine.planning.guesses import Guesses, rounded_up
from rp_engine.runtime.runtime import Runtime

# The number of measured launches to remember: as many as may be in flight, and some that failed.
_LAUNCHES = 8


class LaunchRecords:
    """What launches of one model's calls took, of which its footprint learns, and what the next one will take.

    `predicted_bytes`: the last call's predicted peak on a device. `spare_bytes`: the usable memory that it leaves
    free.
    """

    def __init__(self, name: str, runtime: Runtime, guesses: Guesses, launching: Launching) -> None:
        self._name = name
        self._runtime = runtime
        self._guesses = guesses
        self._footprint = guesses.footprint
        self._pricing = guesses.pricing
        self._launching = launching
        self._timers: dict[tuple[Mode, int], ModelTimer] = {}
        self._latest: deque[LayerTimes] = deque(maxlen=_LAUNCHES)
        # Tasks that ran while the peak was measured, without gradients of earlier calls beside them.
        self._shown: set[object] = set()
        self.predicted_bytes: int | None = None
        self.spare_bytes = 0

    def timer(self, mode: Mode, microbatches: int) -> ModelTimer:
        """Return the timer of such calls."""
        key = (mode, microbatches)
        if key not in self._timers:
            what = f"model {self._name!r}, {mode} calls of {microbatches} microbatches"
            self._timers[key] = ModelTimer(what, len(self._guesses.layers), self._runtime.measurements)
        return self._timers[key]

    def costs(self, mode: Mode) -> list[LayerCost]:
        """Return the assumed cost of each layer: measured if calls of this mode were, otherwise guessed."""
        guesses = self._guesses.costs(0)
        timers = [timer for (kind, _), timer in self._timers.items() if kind == mode]
        measured = [timer.estimator for timer in timers if timer.estimator.samples]
        if not measured:
            return guesses
        best = max(measured, key=lambda one: one.samples)
        # On a copy: `costs` changes the estimator, which compares with the times it returned last.
        return list(copy.deepcopy(best).costs(guesses))

    def predict(self, mode: Mode, size: CallSize, tasks: Sequence[Task]) -> None:
        """Predict what the tasks of the next call take, once that is measured."""
        if self._footprint.is_measured:
            replayed = self._launching.layers_of_call(mode, size.microbatches)
            self.predicted_bytes = self._guesses.foreseen_bytes(size.rows, tasks, replayed)
            spare = self._pricing.usable_bytes - self.predicted_bytes
            self.spare_bytes = max(spare, 0) if self._knows_peak(mode, size, tasks) else 0

    def _knows_peak(self, mode: Mode, size: CallSize, tasks: Sequence[Task]) -> bool:
        # While calls are measured, a new task must show its own peak.
        is_shown = _shapes(tasks, size.rows) <= self._shown
        return self._footprint.knows_peak and (is_shown or not self.timer(mode, size.microbatches).is_watching())

    def watch(self, mode: Mode, size: CallSize, tasks: Sequence[Task], *, is_planned: bool) -> LayerTimes | None:
        """Return a recorder for the next launch's times and memory; None if no more measurements are needed.

        On CPU devices a call with a user's plan (not `is_planned`) is measured only if `ModelTimer.VERBOSE`:
        nothing depends on it.
        """
        timer, on_host = self.timer(mode, size.microbatches), self._pricing.on_host
        is_needed = is_planned or timer.VERBOSE or not on_host or self._pricing.sees_memory
        if not timer.watches_next() or not is_needed:
            return None
        self._forget_raised_peaks()
        replayed = self._launching.layers_of_call(mode, size.microbatches)
        # A CPU device computes on the thread that launches, so launching cannot be measured separately.
        launches = None if on_host or replayed else Launches()
        times = LayerTimes(
            timer, size.rows, tasks, self._peak_bytes(), self.spare_bytes, launches=launches, by_graphs=replayed
        )
        times.graphed = self._footprint.graphed
        self._latest.append(times)
        return times

    def take(self, times: LayerTimes, *, is_whole: bool = True) -> None:
        """Use the measurements of a finished launch. `is_whole`: none of its tasks was run again."""
        if is_whole:
            times.timer.take(times)
        if not self._pricing.sees_memory:
            return
        self._footprint.note_kept(times.kept, times.rows, is_whole=is_whole)
        if not is_whole:
            return
        self._shown |= _shapes(times.tasks, times.rows)
        peak = self._peak_bytes()
        if peak <= times.peak_bytes:
            peak -= self._graph_bytes(times)
            self._footprint.note_no_peak(peak, times.tasks, self._costs(times), times.rows)
        elif times in self._latest:
            launches = self._launched_since(times)
            largest = max(launches, key=self._resident_bytes)
            # Part of the peak may have been gradients that were still being downloaded, which is not workspace.
            peak -= max(launch.spare_bytes for launch in launches) + self._graph_bytes(largest)
            self._footprint.note_peak(peak, largest.tasks, self._costs(largest), largest.rows)

    def note_shortages(self, tasks: Sequence[Task], rows: int) -> None:
        """Note that these tasks of a call ran out of device memory, so that later plans use less."""
        for task in tasks if self._pricing.sees_memory else ():
            self._footprint.note_shortage(task, self._guesses.costs(rows), rows)

    def _launched_since(self, times: LayerTimes) -> list[LayerTimes]:
        # Later calls are launched before this one is over, so the peak may belong to any of these.
        launches = list(self._latest)
        return launches[launches.index(times) :]

    def _resident_bytes(self, times: LayerTimes) -> int:
        return resident_bytes(times.tasks, self._costs(times)) + self._graph_bytes(times)

    def _costs(self, times: LayerTimes) -> list[LayerCost]:
        return self._guesses.costs(times.rows, times.by_graphs)

    def _graph_bytes(self, times: LayerTimes) -> int:
        return self._footprint.graph_bytes(self._costs(times), times.rows, times.graphed)

    def _forget_raised_peaks(self) -> None:
        """Have the peak of a measured call be its own, without weights that travelled ahead of others."""
        for lane in self._runtime.lanes:
            if lane.has_raised_peak:
                lane.has_raised_peak = False
                lane.device.reset_peak_memory()

    def _peak_bytes(self) -> int:
        return max(use.peak_bytes for use in self._runtime.memory())


def _shapes(tasks: Sequence[Task], rows: int) -> set[object]:
    """Return the properties of tasks that their memory depends on, whatever their devices."""
    return {(rounded_up(rows), task.kind, task.layers, len(task.microbatches)) for task in tasks}
