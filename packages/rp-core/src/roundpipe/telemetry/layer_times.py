"""Measurement of layer times: timed events around layers and uploads, averaged for the planner."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import ClassVar

from rp_sched import Estimator, LayerCost, Task
from rp_transfer import Event, Stream

_LOG = logging.getLogger(__name__)
# Measured calls of a kind after which the mean hardly changes.
YOUNG_CALLS = 8

_Interval = tuple[Event, Event]


class LayerTimes:
    """Timed events around the layers and uploads of one launch, and the bytes that layers keep for backward.

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
    ) -> None:
        self.timer = timer
        self.rows = rows
        self.tasks = tasks
        # The largest peak of any device before the launch, and what gradients of earlier tasks may take during it.
        self.peak_bytes = peak_bytes
        self.spare_bytes = spare_bytes
        self.kept: dict[int, int] = {}
        self._lock = threading.Lock()
        self._forward: dict[int, list[_Interval]] = {}
        self._backward: dict[int, list[_Interval]] = {}
        self._uploads: list[tuple[int, _Interval]] = []
        # By stream name: the layers whose backward pass has begun, in order. Backward runs on one of torch's
        # threads, but never concurrently for one device, so this needs no lock.
        self._entered: dict[str, list[tuple[int, Event]]] = {}

    @contextmanager
    def forward(self, layer: int, stream: Stream) -> Generator[None]:
        """Time a layer's forward pass or recomputation."""
        first = stream.record(timed=True)
        yield
        with self._lock:
            self._forward.setdefault(layer, []).append((first, stream.record(timed=True)))

    def keep(self, layer: int, nbytes: int) -> None:
        """Record the bytes that a layer's forward pass keeps for its backward pass; the maximum counts."""
        with self._lock:
            self.kept[layer] = max(nbytes, self.kept.get(layer, 0))

    @contextmanager
    def upload(self, nbytes: int, stream: Stream) -> Generator[None]:
        """Time the upload of a block."""
        first = stream.record(timed=True)
        yield
        with self._lock:
            self._uploads.append((nbytes, (first, stream.record(timed=True))))

    def enter_backward(self, layer: int, stream: Stream) -> None:
        """Record that a layer's backward begins: called for each output gradient, of which the first counts."""
        entered = self._entered.setdefault(stream.name, [])
        if all(layer != other for other, _ in entered):
            entered.append((layer, stream.record(timed=True)))

    def leave_backward(self, stream: Stream) -> None:
        """Record the end of a backward pass; each layer's part ends where the next layer's begins."""
        entered = self._entered.pop(stream.name, [])
        if not entered:
            return
        ends = [event for _, event in entered[1:]] + [stream.record(timed=True)]
        with self._lock:
            for (layer, begin), end in zip(entered, ends, strict=True):
                self._backward.setdefault(layer, []).append((begin, end))

    def forward_ms(self) -> dict[int, float]:
        """Median ms of a microbatch's forward pass, by layer."""
        return {layer: median(map(_ms, intervals)) for layer, intervals in self._forward.items()}

    def backward_ms(self) -> dict[int, float]:
        """Median ms of a microbatch's backward without recomputation, by layer; frozen ones may be missing."""
        return {layer: median(map(_ms, intervals)) for layer, intervals in self._backward.items()}

    def uploaded(self) -> tuple[int, float]:
        """Bytes of blocks uploaded to devices, and the ms that these uploads took."""
        return sum(nbytes for nbytes, _ in self._uploads), sum(_ms(interval) for _, interval in self._uploads)


def _ms(interval: _Interval) -> float:
    return max(interval[1].seconds_since(interval[0]), 0.0) * 1e3


class ModelTimer:
    """The measured layer times of one model's calls of one kind.

    The first nine calls are timed; the first of them, which includes warm-up, is not used. With `VERBOSE`, set on
    the class or on one object, every call is timed and logs its layers' times.
    """

    VERBOSE: ClassVar[bool] = False

    def __init__(self, what: str, num_layers: int) -> None:
        self.what = what
        self.estimator = Estimator(num_layers)
        self._bytes = 0
        self._upload_ms = 0.0

    def is_young(self) -> bool:
        """Whether more samples are wanted."""
        return self.estimator.samples < YOUNG_CALLS

    def is_watching(self) -> bool:
        """Whether to time the next call."""
        return self.VERBOSE or self.is_young()

    def take(self, times: LayerTimes) -> None:
        """Add the times of a launch that is over."""
        forward, backward = times.forward_ms(), times.backward_ms()
        if self.is_young():
            for layer in {*forward, *backward}:
                self.estimator.add(layer, forward_ms=forward.get(layer), backward_ms=backward.get(layer))
            nbytes, upload_ms = times.uploaded()
            self._bytes += nbytes
            self._upload_ms += upload_ms
        if self.VERBOSE:
            _LOG.info("%s", _table(self.what, forward, backward))

    def upload_gb_s(self) -> float | None:
        """Measured speed from host to device in GB/s (10^9 bytes); None if nothing was uploaded."""
        return self._bytes / self._upload_ms / 1e6 if self._bytes and self._upload_ms else None

    def costs(self, layers: Sequence[LayerCost]) -> tuple[LayerCost, ...]:
        """These costs with measured times in place of guessed ones."""
        return self.estimator.costs(layers)


def _table(what: str, forward: dict[int, float], backward: dict[int, float]) -> str:
    rows = [
        f"{layer:>5}  {_number(forward.get(layer))}  {_number(backward.get(layer))}"
        for layer in sorted({*forward, *backward})
    ]
    return "\n".join([f"{what}: milliseconds of one microbatch", "layer     forward    backward", *rows])


def _number(ms: float | None) -> str:
    return f"{'-' if ms is None else f'{ms:.3f}':>10}"
