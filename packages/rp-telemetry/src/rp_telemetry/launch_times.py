"""Measure the processor time of the threads that launch layers, by pass and layer."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Literal

from rp_transfer import Event, Stream

Pass = Literal["forward", "recompute", "backward"]
PASSES: tuple[Pass, ...] = ("forward", "recompute", "backward")
LAYERS_AHEAD = 3
Clock = Callable[[], float]


def clock_of_this_thread() -> Clock:
    """Return a clock of the calling thread's processor time, in seconds, which any thread may read.

    >>> clock = clock_of_this_thread()
    >>> clock() <= clock()
    True

    It works while that thread lives. Systems other than Linux offer no such clock; there, it is the reader's time.
    """
    if sys.platform != "linux":
        return time.thread_time
    return partial(time.clock_gettime, time.pthread_getcpuclockid(threading.get_ident()))


@dataclass(frozen=True, slots=True)
class _Mark:
    """The time at which a thread begins to launch the backward pass of a layer."""

    layer: int
    thread: int
    clock: Clock
    seconds: float


class Launches:
    """The processor time of threads that launch layers, for one launch: ms of one microbatch, by pass and layer.

    A thread that waits for the GIL uses no processor time. So these times are an upper bound of the time that a
    pass holds the GIL, which torch's own functions release. But a thread that finds its GPU's queue full waits in
    the driver, which does take processor time: see `stay_near`.

    `clock`: makes the calling thread's clock. All threads of a launch add to it.
    """

    def __init__(self, clock: Callable[[], Clock] = clock_of_this_thread) -> None:
        self._clock_of_this_thread = clock
        self._lock = threading.Lock()
        # By stream, the events at which its latest layers begin.
        self._begun: dict[str, deque[Event]] = {}
        # By thread, the seconds spent in `stay_near`.
        self._waited: dict[int, float] = {}
        self._samples: dict[tuple[Pass, int], list[float]] = {}
        # The time of a microbatch outside its layers, such as engine code between them, in equal shares by layer.
        self._rests: dict[tuple[Pass, int], list[float]] = {}
        # By thread, the seconds attributed to layers.
        self._counted: dict[int, float] = {}
        # By stream, the backward pass under way; never concurrently for one stream.
        self._marks: dict[str, list[_Mark]] = {}

    def stay_near(self, stream: Stream) -> None:
        """Wait, before a layer is launched, until the device is at most `LAYERS_AHEAD` layers behind.

        This keeps its queue, of about a thousand operations, from filling up, while the device still has work.
        """
        begun = self._begun.setdefault(stream.name, deque(maxlen=LAYERS_AHEAD))
        if len(begun) == LAYERS_AHEAD:
            clock, thread = self._clock_of_this_thread(), threading.get_ident()
            before = clock()
            begun[0].synchronize()
            self._waited[thread] = self._waited.get(thread, 0.0) + clock() - before
        begun.append(stream.record())

    def _clock(self) -> Clock:
        """Return the calling thread's clock, which stops in `stay_near`."""
        clock, thread = self._clock_of_this_thread(), threading.get_ident()
        return lambda: clock() - self._waited.get(thread, 0.0)

    @contextmanager
    def layer(self, which: Pass, layer: int) -> Generator[None]:
        """Measure a pass of a layer that the calling thread launches."""
        clock = self._clock()
        begun = clock()
        yield
        self._add(which, layer, threading.get_ident(), clock() - begun)

    @contextmanager
    def microbatch(self, which: Pass, layers: Sequence[int]) -> Generator[None]:
        """Measure the calling thread's work for a microbatch; time outside `layers` is divided among them."""
        clock, thread = self._clock(), threading.get_ident()
        begun, counted = clock(), self._counted.get(thread, 0.0)
        yield
        rest = clock() - begun - (self._counted.get(thread, 0.0) - counted)
        with self._lock:
            for layer in layers:
                self._rests.setdefault((which, layer), []).append(max(rest, 0.0) * 1e3 / len(layers))

    def enter_backward(self, layer: int, stream: str) -> None:
        """Note that the calling thread begins a layer's backward pass; only its first call for a layer counts."""
        marks, thread = self._marks.setdefault(stream, []), threading.get_ident()
        if all((mark.layer, mark.thread) != (layer, thread) for mark in marks):
            clock = self._clock()
            marks.append(_Mark(layer, thread, clock, clock()))

    def leave_backward(self, stream: str) -> None:
        """Note the end of a backward pass; each thread's part of a layer ends where its next layer's begins."""
        marks = self._marks.pop(stream, [])
        for at, mark in enumerate(marks):
            later = (next_.seconds for next_ in marks[at + 1 :] if next_.thread == mark.thread)
            end = next(later, None)
            seconds = (mark.clock() if end is None else end) - mark.seconds
            self._add("backward", mark.layer, mark.thread, seconds, is_first=mark.layer not in _layers(marks[:at]))

    def _add(self, which: Pass, layer: int, thread: int, seconds: float, *, is_first: bool = True) -> None:
        with self._lock:
            samples = self._samples.setdefault((which, layer), [])
            if is_first:
                samples.append(0.0)
            samples[-1] += max(seconds, 0.0) * 1e3
            self._counted[thread] = self._counted.get(thread, 0.0) + max(seconds, 0.0)

    def ms(self, which: Pass) -> dict[int, float]:
        """Return the median ms of a microbatch, by layer."""
        layers = {layer for kind, layer in [*self._samples, *self._rests] if kind == which}
        return {
            layer: _median(self._samples.get((which, layer))) + _median(self._rests.get((which, layer)))
            for layer in sorted(layers)
        }


def _layers(marks: Sequence[_Mark]) -> set[int]:
    return {mark.layer for mark in marks}


def _median(values: Sequence[float] | None) -> float:
    return median(values) if values else 0.0
