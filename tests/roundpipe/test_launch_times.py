"""Launching is measured by the processor time of the threads that launch, pass by pass and layer by layer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_telemetry.launch_times import LAYERS_AHEAD, Clock, Launches, Pass, clock_of_this_thread

patient = settings(deadline=None)
durations = st.integers(0, 1000)


class Clocks:
    """A clock for each thread, which only `work` advances."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def __call__(self) -> Clock:
        thread = threading.get_ident()
        self._seconds.setdefault(thread, 0.0)
        return lambda: self._seconds[thread]

    def work(self, ms: float) -> None:
        thread = threading.get_ident()
        self._seconds[thread] = self._seconds.get(thread, 0.0) + ms / 1e3


class Thread:
    """A thread that lives as long as a device's autograd thread does, and does one thing after another."""

    def __init__(self) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._body: Callable[[], Any] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            assert self._go.acquire(timeout=60)
            if self._body is None:
                return
            self._body()
            self._done.release()

    def do(self, body: Callable[[], Any]) -> None:
        self._body = body
        self._go.release()
        assert self._done.acquire(timeout=60)

    def end(self) -> None:
        self._body = None
        self._go.release()
        self._thread.join(60)


@patient
@given(st.lists(st.tuples(durations, durations, durations), min_size=1, max_size=5))
def test_a_pass_takes_its_median_and_layers_share_what_is_between_them(microbatches: list[tuple[int, int, int]]):
    clocks = Clocks()
    launches = Launches(clocks)
    for first, second, between in microbatches:
        with launches.microbatch("forward", range(2)):
            clocks.work(between)
            for layer, ms in enumerate((first, second)):
                with launches.layer("forward", layer):
                    clocks.work(ms)
    rest = median(between for *_, between in microbatches) / 2
    wanted = {layer: median(found[layer] for found in microbatches) + rest for layer in range(2)}
    assert launches.ms("forward") == pytest.approx(wanted, abs=1e-6)
    assert launches.ms("recompute") == launches.ms("backward") == {}


@patient
@given(st.lists(st.tuples(durations, durations, durations, durations), min_size=1, max_size=4))
def test_backward_is_what_the_autograd_thread_does_and_the_loss_what_the_lane_does_before(
    microbatches: list[tuple[int, int, int, int]],
):
    clocks, autograd = Clocks(), Thread()
    launches = Launches(clocks)

    def backward(top: int, bottom: int) -> None:
        launches.enter_backward(1, "cuda:0/compute")
        clocks.work(top)
        launches.enter_backward(1, "cuda:0/compute")
        launches.enter_backward(0, "cuda:0/compute")
        clocks.work(bottom)

    for loss, top, bottom, between in microbatches:
        with launches.microbatch("backward", range(2)):
            launches.enter_backward(1, "cuda:0/compute")
            clocks.work(loss)
            autograd.do(lambda top=top, bottom=bottom: backward(top, bottom))
            launches.leave_backward("cuda:0/compute")
            clocks.work(between)
    autograd.end()
    rest = median(found[3] for found in microbatches) / 2
    wanted = {0: median(found[2] for found in microbatches), 1: median(sum(found[:2]) for found in microbatches)}
    assert launches.ms("backward") == pytest.approx({layer: ms + rest for layer, ms in wanted.items()}, abs=1e-6)


def test_a_layer_that_gets_another_gradient_later_has_begun_already():
    clocks = Clocks()
    launches = Launches(clocks)
    for layer, ms in ((1, 3), (0, 5), (1, 7)):
        launches.enter_backward(layer, "cuda:0/compute")
        clocks.work(ms)
    launches.leave_backward("cuda:0/compute")
    assert launches.ms("backward") == pytest.approx({1: 3.0, 0: 12.0})


class Queue:
    """A stream on which nothing happens until somebody waits for it."""

    name = "cuda:0/compute"

    def __init__(self, clocks: Clocks) -> None:
        self.recorded, self.reached, self._clocks = 0, 0, clocks

    def record(self, *, timed: bool = False) -> Any:
        del timed
        self.recorded += 1
        return SimpleNamespace(synchronize=partial(self._reach, self.recorded))

    def _reach(self, place: int) -> None:
        self.reached = place
        # The driver asks the device again and again.
        self._clocks.work(100)


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_a_thread_never_fills_its_devices_queue_and_its_waiting_is_no_launching(which: Pass):
    clocks = Clocks()
    launches, queue = Launches(clocks), Queue(clocks)
    with launches.microbatch(which, range(8)):
        for layer in range(8):
            launches.stay_near(queue)
            assert queue.recorded - queue.reached <= LAYERS_AHEAD
            if which == "forward":
                with launches.layer("forward", layer):
                    clocks.work(3)
            else:
                launches.enter_backward(layer, queue.name)
                clocks.work(3)
        launches.leave_backward(queue.name)
    assert queue.reached == 8 - LAYERS_AHEAD
    assert launches.ms(which) == pytest.approx(dict.fromkeys(range(8), 3.0))


def test_devices_do_not_mix():
    clocks = Clocks()
    launches = Launches(clocks)
    launches.enter_backward(0, "cuda:0/compute")
    clocks.work(3)
    launches.enter_backward(0, "cuda:1/compute")
    launches.leave_backward("cuda:0/compute")
    clocks.work(5)
    launches.leave_backward("cuda:1/compute")
    assert launches.ms("backward") == pytest.approx({0: 4.0})


def test_another_thread_reads_what_a_waiting_thread_has_computed():
    clocks: list[Clock] = []
    autograd = Thread()

    def work() -> None:
        clocks.append(clock_of_this_thread())
        assert sum(range(100_000)) > 0

    autograd.do(work)
    mine, before = clock_of_this_thread(), clocks[0]()
    start = mine()
    assert sum(range(10_000_000)) > 0
    worked, slept = mine() - start, clocks[0]() - before
    autograd.end()
    # Falling asleep takes that thread next to nothing.
    assert before > 0
    assert slept < worked / 2
