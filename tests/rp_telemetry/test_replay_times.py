"""Replays are timed graph by graph, and what plans know of layers stays right when graphs launch them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
from rp_telemetry.launch_times import Launches
from rp_telemetry.layer_times import YOUNG_CALLS, LayerTimes, ModelTimer
from rp_transfer import Stream

GRAPH = range(2)


@dataclass
class At:
    """An event on a stream's clock."""

    ms: float

    def seconds_since(self, other: At) -> float:
        return (self.ms - other.ms) / 1e3

    def synchronize(self) -> None:
        pass


class Clock:
    """A stream whose device works for as long as it is told."""

    name = "cuda:0/compute"

    def __init__(self) -> None:
        self.ms = 0.0

    def record(self, *, timed: bool = False) -> At:  # noqa: ARG002 - as streams have it
        return At(self.ms)


def call(timer: ModelTimer, python_ms: float, replayed_ms: float | None = None) -> None:
    """Two layers and a head; every pass of a layer takes so long, and a replay of two of them, if there is one."""
    clock = Clock()
    stream = cast("Stream", cast("Any", clock))
    by_graphs = frozenset[int]() if replayed_ms is None else frozenset(GRAPH)
    times = LayerTimes(
        timer, launches=None if by_graphs else Launches(lambda: lambda: clock.ms / 1e3), by_graphs=by_graphs
    )
    for microbatch in range(4):
        is_inner = replayed_ms is not None and replayed_ms > 0 and microbatch in (1, 2)
        if is_inner:
            with times.replays.replay("forward", GRAPH, stream):
                clock.ms += cast("float", replayed_ms)
        for layer in (2,) if is_inner else (0, 1, 2):
            with times.forward(layer, stream):
                clock.ms += python_ms
        for layer in (2, 1) if is_inner else (2, 1, 0):
            times.enter_backward(layer, stream)
            if is_inner and layer == 1:
                with times.replays.replay("backward", GRAPH, stream):
                    clock.ms += 2 * cast("float", replayed_ms)
            else:
                clock.ms += 2 * python_ms
        times.leave_backward(stream)
    timer.take(times)


def known(timer: ModelTimer) -> dict[str, list[float | None]]:
    names = ("forward_ms", "backward_ms", "forward_launch_ms")
    return {name: [timer.estimator.estimate(name, layer) for layer in range(3)] for name in names}


@pytest.fixture
def timer() -> ModelTimer:
    """One that knows the times of launching by Python, for which devices wait."""
    found = ModelTimer("calls", 3)
    for _ in range(YOUNG_CALLS + 1):
        call(found, 10.0)
    assert not found.is_young()
    return found


def test_times_of_devices_are_those_of_replays_as_soon_as_there_are_any(timer: ModelTimer) -> None:
    timer.launch_by_graphs(True)
    # Graphs are captured first, in calls that launch all by Python.
    call(timer, 10.0, 0.0)
    assert known(timer)["forward_ms"] == pytest.approx([10, 10, 10])
    call(timer, 10.0, 6.0)

    found = known(timer)
    assert found["forward_ms"] == pytest.approx([3, 3, 10])
    assert found["backward_ms"] == pytest.approx([6, 6, 20])
    # Python launches first and last microbatches as before.
    assert found["forward_launch_ms"] == pytest.approx([10, 10, 10])
    assert timer.num_drifts == 0


def test_some_calls_with_replays_are_measured_and_then_few(timer: ModelTimer) -> None:
    assert not timer.watches_next()
    timer.launch_by_graphs(True)
    measured = 0
    while timer.watches_next():
        measured += 1
        call(timer, 10.0, 6.0)

    assert measured == 3
    assert not any(timer.watches_next() for _ in range(10))


def test_calls_without_replays_are_not_measured_for_ever(timer: ModelTimer) -> None:
    timer.launch_by_graphs(True)
    measured = sum(timer.watches_next() for _ in range(40))
    assert measured == 24


def test_no_replays_are_waited_for_once_python_launches_again(timer: ModelTimer) -> None:
    timer.launch_by_graphs(True)
    timer.launch_by_graphs(False)
    assert not any(timer.watches_next() for _ in range(10))


def test_replays_that_take_other_times_are_found(timer: ModelTimer) -> None:
    timer.launch_by_graphs(True)
    for ms in (6.0, 6.0, 6.0, 9.0, 9.0):
        call(timer, 10.0, ms)
    assert timer.num_drifts == 1
    assert timer.is_young()


def test_launching_by_python_is_measured_anew_when_graphs_go(timer: ModelTimer) -> None:
    timer.launch_by_graphs(True)
    for _ in range(3):
        call(timer, 10.0, 6.0)
    timer.launch_by_graphs(False)
    assert timer.watches_next()
    call(timer, 10.0)

    assert known(timer)["forward_ms"] == pytest.approx([10, 10, 10])
    assert timer.num_drifts == 0
