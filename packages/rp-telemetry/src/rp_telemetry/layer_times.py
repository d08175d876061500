"""Measure calls for the planner: layers and transfers by events, launching by processor time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from statistics import median
from typing import ClassVar, Literal

from rp_sched import Estimator, LayerCost, Task
from rp_transfer import Event, Stream

from rp_telemetry.launch_times import PASSES, Launches
from rp_telemetry.measurements import DeviceSpeeds, Measurements
from rp_telemetry.tracing import NOTHING
from rp_telemetry.transfer_times import Transfers

_LOG = logging.getLogger(__name__)
# After this many measured calls of a kind the mean hardly changes.
YOUNG_CALLS = 8
# After those, one launch in this many is measured, which shows whether layers have changed. Odd, so that the two
# launches of a `train` call alternate.
SELDOM = 63
# If all layers together differ from the known times by more than this part, in that call and in the next measured
# one, the layers have changed, and the next calls are measured again.
_DRIFT = 0.15
# A smaller GIL share of launching is noted only if it is smaller by more than this part.
_NEWS = 0.05
# Once graphs launch layers, so many calls with replays are measured, if so many calls suffice for them.
_REPLAYED_CALLS, _REPLAY_TRIES = 3, 24
_DEVICE_MS = ("forward_ms", "backward_ms")

_Interval = tuple[Event, Event]
ReplayPass = Literal["forward", "backward"]


class ReplayTimes:
    """The times that devices take for replays of one launch. All threads of the launch add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._intervals: dict[tuple[ReplayPass, range], list[_Interval]] = {}

    @contextmanager
    def replay(self, which: ReplayPass, layers: range, stream: Stream) -> Generator[None]:
        """Time a replay of these layers, which is launched within the context."""
        first = stream.record(timed=True)
        yield
        with self._lock:
            self._intervals.setdefault((which, layers), []).append((first, stream.record(timed=True)))

    def __bool__(self) -> bool:
        """Whether there were any."""
        return bool(self._intervals)

    def ms(self, which: ReplayPass) -> dict[range, float]:
        """Return the median ms of a microbatch, by the layers of a graph."""
        return {
            layers: median(map(_ms, intervals))
            for (kind, layers), intervals in self._intervals.items()
            if kind == which
        }


class LayerTimes:
    """Measurements of one launch: its layers' times and launching, its transfers, and the bytes kept for backward.

    `launches`: the processor time of launching; None on CPU devices, where a layer computes while it is launched.
    `transfers`: copies of blocks, by device. `by_graphs`: layers that graphs launch, of which only
    replays count: Python runs them where they are examined, captured or compared. `graphed`:
    those of which devices have graphs, also for other launches.

    All threads of the launch add to it. Times may be read once the launch's tasks are over and their results and
    gradients are on the host.
    """

    def __init__(
        self,
        timer: ModelTimer,
        rows: int = 1,
        tasks: Sequence[Task] = (),
        peak_bytes: int = 0,
        spare_bytes: int = 0,
        *,
        launches: Launches | None = None,
        by_graphs: frozenset[int] = frozenset(),
    ) -> None:
        self.timer = timer
        self.by_graphs = by_graphs
        self.graphed = by_graphs
        self.replays = ReplayTimes()
        self.launches = launches
        self.transfers = Transfers()
        self.rows = rows
        self.tasks = tasks
        # The largest peak of any device before the launch, and what gradients of earlier tasks may take during it.
        self.peak_bytes = peak_bytes
        self.spare_bytes = spare_bytes
        self.kept: dict[int, int] = {}
        self._lock = threading.Lock()
        # By layer: the stream's name and the interval of each forward pass.
        self._forward: dict[int, list[tuple[str, _Interval]]] = {}
        self._backward: dict[int, list[_Interval]] = {}
        # By stream name: the layers whose backward pass has begun, in order. Backward runs on one of torch's
        # threads, but never concurrently for one device, so this needs no lock.
        self._entered: dict[str, list[tuple[int, Event]]] = {}

    @contextmanager
    def forward(self, layer: int, stream: Stream, *, recomputes: bool = False) -> Generator[None]:
        """Time a layer's forward pass, or `recomputes`, its recomputation."""
        self._stay_near(stream)
        first = stream.record(timed=True)
        with (
            NOTHING
            if self.launches is None
            else self.launches.layer("recompute" if recomputes else "forward", layer)
        ):
            yield
        with self._lock:
            self._forward.setdefault(layer, []).append((stream.name, (first, stream.record(timed=True))))

    def microbatch(self, task: Task) -> AbstractContextManager[None]:
        """Measure the work of a task's thread for a microbatch outside its layers."""
        if self.launches is None:
            return NOTHING
        return self.launches.microbatch("backward" if task.runs_backward else "forward", task.layers)

    def _stay_near(self, stream: Stream) -> None:
        if self.launches is not None:
            self.launches.stay_near(stream)

    def keep(self, layer: int, nbytes: int) -> None:
        """Record the bytes that a layer's forward pass keeps for its backward pass; the maximum counts."""
        with self._lock:
            self.kept[layer] = max(nbytes, self.kept.get(layer, 0))

    def enter_backward(self, layer: int, stream: Stream) -> None:
        """Record that a layer's backward begins. Called for each output gradient; only the first counts.

        The last layer's begins before the loss function, whose time is counted with that layer.
        """
        entered = self._entered.setdefault(stream.name, [])
        is_first = all(layer != other for other, _ in entered)
        if is_first:
            self._stay_near(stream)
        if self.launches is not None:
            self.launches.enter_backward(layer, stream.name)
        if is_first:
            entered.append((layer, stream.record(timed=True)))

    def leave_backward(self, stream: Stream) -> None:
        """Record the end of a backward pass; each layer's part ends where the next layer's begins."""
        if self.launches is not None:
            self.launches.leave_backward(stream.name)
        entered = self._entered.pop(stream.name, [])
        if not entered:
            return
        ends = [event for _, event in entered[1:]] + [stream.record(timed=True)]
        with self._lock:
            for (layer, begin), end in zip(entered, ends, strict=True):
                self._backward.setdefault(layer, []).append((begin, end))

    def forward_ms(self) -> dict[int, float]:
        """Return the median ms of a microbatch's forward pass, by layer."""
        return {layer: median(_ms(interval) for _, interval in ones) for layer, ones in self._forward.items()}

    def device_ms(self) -> dict[str, dict[int, float]]:
        """Return the median ms of a microbatch's forward pass, by device and layer."""
        by_device: dict[str, dict[int, list[float]]] = {}
        for layer, intervals in self._forward.items():
            for stream, interval in intervals:
                device = stream.rpartition("/")[0]
                by_device.setdefault(device, {}).setdefault(layer, []).append(_ms(interval))
        return {device: {layer: median(ms) for layer, ms in times.items()} for device, times in by_device.items()}

    def backward_ms(self) -> dict[int, float]:
        """Return the median ms of a microbatch's backward without recomputation, by layer, if it has one."""
        return {layer: median(map(_ms, intervals)) for layer, intervals in self._backward.items()}

    def computing(self, known: Estimator) -> dict[int, dict[str, float]]:
        """Return, by layer, the ms of computing a microbatch, named as in `rp_sched.Estimator.add`.

        `known`: divides the times of replays among their layers.
        """
        found: dict[int, dict[str, float]] = {}
        for name, by_python, replays in (
            ("forward_ms", self.forward_ms(), self.replays.ms("forward")),
            ("backward_ms", self.backward_ms(), self.replays.ms("backward")),
        ):
            own = {layer: ms for layer, ms in by_python.items() if layer not in self.by_graphs}
            for layer, ms in {**own, **divided(replays, partial(known.estimate, name))}.items():
                found.setdefault(layer, {})[name] = ms
        return found

    def launch_ms(self) -> dict[int, dict[str, float]]:
        """Return, by layer, the ms of launching a microbatch, named as in `rp_sched.Estimator.add`."""
        by_layer: dict[int, dict[str, float]] = {}
        if self.launches is not None:
            for which in PASSES:
                for layer, ms in self.launches.ms(which).items():
                    by_layer.setdefault(layer, {})[f"{which}_launch_ms"] = ms
        return by_layer


def _ms(interval: _Interval) -> float:
    return max(interval[1].seconds_since(interval[0]), 0.0) * 1e3


def divided(spans: Mapping[range, float], known: Callable[[int], float | None]) -> dict[int, float]:
    """Return each layer's part of the ms of graphs: as large as it was known to be before, of all of them.

    >>> divided({range(2): 9.0}, {0: 2.0, 1: 4.0}.get)
    {0: 3.0, 1: 6.0}
    >>> divided({range(2): 9.0}, {}.get)
    {0: 4.5, 1: 4.5}
    """
    found: dict[int, float] = {}
    for layers, ms in spans.items():
        parts = [known(layer) or 0.0 for layer in layers]
        whole = sum(parts)
        shares = [part / whole for part in parts] if whole else [1 / len(layers)] * len(layers)
        found.update((layer, ms * share) for layer, share in zip(layers, shares, strict=True))
    return found


class ModelTimer:
    """The measured layer times of one model's calls of one kind.

    The first nine calls are measured; the first is not used, since it includes warm-up. From then on one call in
    `SELDOM` is measured. If it shows that layer times have changed, the next calls are measured like the first
    ones. `measurements` records the transfers; `speeds` has the devices' relative speeds. With `VERBOSE`, set on
    the class or on one object, every call is measured and logs its layers' times.
    """

    VERBOSE: ClassVar[bool] = False

    def __init__(self, what: str, num_layers: int, measurements: Measurements | None = None) -> None:
        self.what = what
        self.estimator = Estimator(num_layers)
        self.speeds = DeviceSpeeds()
        self._measurements = measurements
        self._launched = 0
        self._taken = 0
        # The number of samples before calls are measured seldom.
        self._wanted = YOUNG_CALLS
        # How often the layers' times have changed.
        self.num_drifts = 0
        # The largest share of launching that can hold the GIL, according to the measured calls.
        self.launch_gil_share = 1.0
        # Whether the latest measured call took a different time than expected.
        self._is_suspect = False
        # Whether graphs launch layers; how many calls with replays are still to be measured, and in how many
        # calls; whether the times of devices are those of replays.
        self._by_graphs = False
        self._wanted_replays = self._replay_tries = 0
        self._has_replays = False

    def is_young(self) -> bool:
        """Return whether more samples are needed."""
        return self.estimator.samples < self._wanted

    def is_watching(self) -> bool:
        """Return whether every call is measured."""
        return self.VERBOSE or self._is_suspect or self.is_young()

    def watches_next(self) -> bool:
        """Return whether to measure the call that is launched now."""
        self._launched += 1
        wants_replays = self._wanted_replays > 0 and self._replay_tries > 0
        self._replay_tries -= wants_replays
        return self.is_watching() or wants_replays or self._launched % SELDOM == 0

    def launch_by_graphs(self, by_graphs: bool) -> None:
        """Graphs launch layers from now on, or Python again: the times of devices are measured anew.

        Where launching bounds, devices wait within layers that Python launches, which counts as computing.
        """
        if by_graphs == self._by_graphs:
            return
        self._by_graphs = by_graphs
        if by_graphs:
            # Also where an earlier process knows that graphs are faster, and Python was not measured in this one.
            self._wanted = min(self._wanted, self.estimator.samples)
            self._await_replays()
            return
        self._wanted_replays = 0
        known = self.estimator.samples if self._has_replays else 0
        self._wanted = max(self._wanted, known + YOUNG_CALLS)

    def _await_replays(self) -> None:
        self._wanted_replays, self._replay_tries = _REPLAYED_CALLS, _REPLAY_TRIES

    def take(self, times: LayerTimes) -> None:
        """Add the times of a finished launch."""
        computing, launches = times.computing(self.estimator), times.launch_ms()
        self._note_replays(times)
        was_suspect = self._is_suspect
        self._is_suspect = not self.is_young() and (self._has_drifted(computing) or self._has_drifted(launches))
        if self._is_suspect and was_suspect:
            self._measure_again()
        elif not self._is_suspect:
            for layer, times_ms in computing.items():
                self.estimator.add(layer, **times_ms, **launches.get(layer, {}))
        # The first call includes warm-up.
        if self._taken:
            self._note_devices(times)
        self._taken += 1
        if self.VERBOSE:
            _LOG.info("%s", _table(self.what, computing))

    def _note_replays(self, times: LayerTimes) -> None:
        """Let the next times of computing replace those before, if they are of replays, and these were not."""
        self._wanted_replays -= bool(times.replays)
        if (times.replays or not times.by_graphs) and bool(times.replays) != self._has_replays:
            self._has_replays = bool(times.replays)
            self.estimator.restart(_DEVICE_MS)

    def note_gil(self, call_ms: float, launch_ms: float, other_ms: float) -> None:
        """Note the time of a call, which bounds the time for which launching holds the GIL.

        `launch_ms`: the processor time of all launching in the call. `other_ms`: that of all else that holds the
        GIL, during which launching cannot.
        """
        share = max(call_ms - other_ms, 0.0) / launch_ms if launch_ms else 1.0
        # Small improvements are ignored, since plans are searched again when it changes.
        if share < (1 - _NEWS) * self.launch_gil_share:
            self.launch_gil_share = share

    def _measure_again(self) -> None:
        self.launch_gil_share = 1.0
        self.num_drifts += 1
        self._is_suspect = False
        self.estimator.restart()
        self._wanted = self.estimator.samples + YOUNG_CALLS
        if self._by_graphs:
            self._await_replays()
        _LOG.info("%s: layer times have changed, so the next calls are measured again", self.what)

    def _note_devices(self, times: LayerTimes) -> None:
        self.speeds.add(times.device_ms())
        if self._measurements is not None:
            self._measurements.note_call(times.transfers)

    def _has_drifted(self, measured: dict[int, dict[str, float]]) -> bool:
        pairs = [
            (ms, known)
            for layer, times in measured.items()
            for name, ms in times.items()
            # What is to be replaced is another's time, such as that of a launch by Python.
            if not self.estimator.is_fresh(name, layer)
            and (known := self.estimator.estimate(name, layer)) is not None
        ]
        known_ms = sum(known for _, known in pairs)
        return abs(sum(ms for ms, _ in pairs) - known_ms) > _DRIFT * known_ms

    def costs(self, layers: Sequence[LayerCost]) -> tuple[LayerCost, ...]:
        """Return these costs with measured times in place of guessed ones."""
        return self.estimator.costs(layers)


def _table(what: str, computing: Mapping[int, Mapping[str, float]]) -> str:
    rows = [
        f"{layer:>5}  " + "  ".join(_number(computing[layer].get(name)) for name in _DEVICE_MS)
        for layer in sorted(computing)
    ]
    return "\n".join([f"{what}: milliseconds of one microbatch", "layer     forward    backward", *rows])


def _number(ms: float | None) -> str:
    return f"{'-' if ms is None else f'{ms:.3f}':>10}"
