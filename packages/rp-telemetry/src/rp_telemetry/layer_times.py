"""Measure calls for the planner: layers and transfers by events, launching by processor time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from typing import ClassVar

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

_Interval = tuple[Event, Event]


class LayerTimes:
    """Measurements of one launch: its layers' times and launching, its transfers, and the bytes kept for backward.

    `launches`: the processor time of launching; None on CPU devices, where a layer computes while it is launched.
    `transfers`: copies of blocks, by device.

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
    ) -> None:
        self.timer = timer
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

    def is_young(self) -> bool:
        """Return whether more samples are needed."""
        return self.estimator.samples < self._wanted

    def is_watching(self) -> bool:
        """Return whether every call is measured."""
        return self.VERBOSE or self._is_suspect or self.is_young()

    def watches_next(self) -> bool:
        """Return whether to measure the call that is launched now."""
        self._launched += 1
        return self.is_watching() or self._launched % SELDOM == 0

    def take(self, times: LayerTimes) -> None:
        """Add the times of a finished launch."""
        forward, backward, launches = times.forward_ms(), times.backward_ms(), times.launch_ms()
        was_suspect = self._is_suspect
        computing = {layer: {"forward_ms": ms} for layer, ms in forward.items()}
        for layer, ms in backward.items():
            computing.setdefault(layer, {})["backward_ms"] = ms
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
            _LOG.info("%s", _table(self.what, forward, backward))

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
            if (known := self.estimator.estimate(name, layer)) is not None
        ]
        known_ms = sum(known for _, known in pairs)
        return abs(sum(ms for ms, _ in pairs) - known_ms) > _DRIFT * known_ms

    def costs(self, layers: Sequence[LayerCost]) -> tuple[LayerCost, ...]:
        """Return these costs with measured times in place of guessed ones."""
        return self.estimator.costs(layers)


def _table(what: str, forward: dict[int, float], backward: dict[int, float]) -> str:
    rows = [
        f"{layer:>5}  {_number(forward.get(layer))}  {_number(backward.get(layer))}"
        for layer in sorted({*forward, *backward})
    ]
    return "\n".join([f"{what}: milliseconds of one microbatch", "layer     forward    backward", *rows])


def _number(ms: float | None) -> str:
    return f"{'-' if ms is None else f'{ms:.3f}':>10}"
