"""Measured launching: what the threads that launch layers compute themselves, by pass and layer."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Literal

Pass = Literal["forward", "recompute", "backward"]
PASSES: tuple[Pass, ...] = ("forward", "recompute", "backward")
Clock = Callable[[], float]


def clock_of_this_thread() -> Clock:
    """The processor time of the calling thread, in seconds; while that thread lives, any thread may read it.

    >>> clock = clock_of_this_thread()
    >>> clock() <= clock()
    True

    Other systems than Linux do not let another thread read it; there it is the reader's own.
    """
    if sys.platform != "linux":
        return time.thread_time
    return partial(time.clock_gettime, time.pthread_getcpuclockid(threading.get_ident()))


@dataclass(frozen=True, slots=True)
class _Mark:
    """From here on a thread launches the backward pass of a layer."""

    layer: int
    thread: int
    clock: Clock
    seconds: float


class Launches:
    """The processor time of threads that launch the layers of one launch: ms of one microbatch, by pass and layer.

    A thread that waits, for the GIL or for a device, uses no processor time. So these are the times that a pass
    would hold the GIL if nothing that it calls released it: an upper bound, since torch's own functions do.

    `clock`: makes the calling thread's clock. All threads of a launch add to it.
    """

    def __init__(self, clock: Callable[[], Clock] = clock_of_this_thread) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._found: dict[tuple[Pass, int], list[float]] = {}
        # What a microbatch takes besides its layers, such as engine code between them, as a share of each layer.
        self._rests: dict[tuple[Pass, int], list[float]] = {}
        # By thread, the seconds that belong to layers.
        self._counted: dict[int, float] = {}
        # By stream, the backward pass under way; never concurrently for one stream.
        self._marks: dict[str, list[_Mark]] = {}

    @contextmanager
    def layer(self, which: Pass, layer: int) -> Generator[None]:
        """Measure a pass of a layer that the calling thread launches."""
        clock = self._clock()
        begun = clock()
        yield
        self._add(which, layer, threading.get_ident(), clock() - begun)

    @contextmanager
    def microbatch(self, which: Pass, layers: Sequence[int]) -> Generator[None]:
        """Measure all that the calling thread does for a microbatch; `layers` share what is not theirs."""
        clock, thread = self._clock(), threading.get_ident()
        begun, counted = clock(), self._counted.get(thread, 0.0)
        yield
        rest = clock() - begun - (self._counted.get(thread, 0.0) - counted)
        with self._lock:
            for layer in layers:
                self._rests.setdefault((which, layer), []).append(max(rest, 0.0) * 1e3 / len(layers))

    def enter_backward(self, layer: int, stream: str) -> None:
        """The calling thread begins to launch a layer's backward pass; only its first call for a layer counts."""
        marks, thread = self._marks.setdefault(stream, []), threading.get_ident()
        if all((mark.layer, mark.thread) != (layer, thread) for mark in marks):
            clock = self._clock()
            marks.append(_Mark(layer, thread, clock, clock()))

    def leave_backward(self, stream: str) -> None:
        """The backward pass is over: each thread's part of a layer ends where its part of the next one begins."""
        marks = self._marks.pop(stream, [])
        for at, mark in enumerate(marks):
            later = (next_.seconds for next_ in marks[at + 1 :] if next_.thread == mark.thread)
            end = next(later, None)
            seconds = (mark.clock() if end is None else end) - mark.seconds
            self._add("backward", mark.layer, mark.thread, seconds, is_first=mark.layer not in _layers(marks[:at]))

    def _add(self, which: Pass, layer: int, thread: int, seconds: float, *, is_first: bool = True) -> None:
        with self._lock:
            found = self._found.setdefault((which, layer), [])
            if is_first:
                found.append(0.0)
            found[-1] += max(seconds, 0.0) * 1e3
            self._counted[thread] = self._counted.get(thread, 0.0) + max(seconds, 0.0)

    def ms(self, which: Pass) -> dict[int, float]:
        """Median ms of a microbatch, by layer."""
        layers = {layer for kind, layer in [*self._found, *self._rests] if kind == which}
        return {
            layer: _median(self._found.get((which, layer))) + _median(self._rests.get((which, layer)))
            for layer in sorted(layers)
        }


def _layers(marks: Sequence[_Mark]) -> set[int]:
    return {mark.layer for mark in marks}


def _median(values: Sequence[float] | None) -> float:
    return median(values) if values else 0.0
