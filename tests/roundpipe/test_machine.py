"""What a machine was measured to do: rates of the latest calls and steps, by device."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_sched import Switch
from rp_telemetry.measurements import RECENT, DeviceSpeeds, Measurements, Rates
from rp_telemetry.transfer_times import Transfers

patient = settings(deadline=None)
GB = 10**9
rates = st.floats(0.1, 1000)
DEVICES = ("cuda:0", "cuda:1")


class Mark:
    """A timed event: a point of a stream's clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def seconds_since(self, earlier: Mark) -> float:
        return self.seconds - earlier.seconds


class Stream:
    """A stream on which copies take the time that `copy` is told."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def record(self, *, timed: bool) -> Mark:
        assert timed
        return Mark(self._seconds)

    def copy(self, seconds: float) -> None:
        self._seconds += seconds


def call(way: Any, device: str, gb_s: list[float], processor_ms: float = 0.0, **how: bool) -> Transfers:
    """A launch in which blocks of one GB moved at these rates."""
    seconds = [0.0]
    transfers, stream = Transfers(lambda: seconds[0]), Stream()
    for rate in gb_s:
        moving = transfers.begin(device, cast("Any", stream))
        stream.copy(1 / rate)
        seconds[0] += processor_ms / 1e3
        moving.end(way, GB, **how)
    return transfers


@patient
@given(st.lists(rates, min_size=1, max_size=20), st.sampled_from(["up", "down"]))
def test_a_link_is_as_fast_as_in_the_fastest_of_the_latest_calls(found: list[float], way: str):
    machine = Measurements(DEVICES)
    for rate in found:
        machine.note_call(call(way, "cuda:1", [rate]))
    up, down = machine.rates().up_gb_s, machine.rates().down_gb_s
    known, other = (up, down) if way == "up" else (down, up)
    assert known[0] is None
    assert known[1] == pytest.approx(max(found[-RECENT:]))
    assert other == (None, None)


def test_a_calls_rate_is_that_of_all_its_bytes():
    machine = Measurements(DEVICES)
    machine.note_call(call("up", "cuda:0", [10.0, 30.0]))
    assert machine.rates().up_gb_s[0] == pytest.approx(15.0)


@patient
@given(st.lists(st.floats(0, 100), min_size=1, max_size=20))
def test_porters_take_the_median_of_the_latest_calls(found: list[float]):
    machine = Measurements(DEVICES)
    for ms in found:
        machine.note_call(call("up", "cuda:0", [50.0, 50.0], processor_ms=ms))
    assert machine.rates().gil_ms_per_gb == pytest.approx(median(found[-RECENT:]), abs=1e-6)


@pytest.mark.parametrize(("way", "how"), [("add", {}), ("up", {"is_staged": True})])
def test_what_the_host_copies_or_adds_says_nothing_of_carrying(way: str, how: dict[str, bool]):
    machine = Measurements(DEVICES)
    machine.note_call(call(way, "cuda:0", [12.5], processor_ms=80.0, **how))
    found = machine.rates()
    assert found.gil_ms_per_gb is None
    assert found.add_gb_s == (pytest.approx(12.5) if way == "add" else None)


@patient
@given(st.lists(rates, min_size=1, max_size=20), rates)
def test_steps_are_as_fast_as_the_fastest_of_the_latest_and_host_memory_at_least_that(
    steps: list[float], memory: float
):
    machine = Measurements(DEVICES)
    machine.note_probe(Rates(up_gb_s=(1.0, 1.0), down_gb_s=(1.0, 1.0), memory_gb_s=memory))
    for rate in steps:
        machine.note_step(rate * GB, 1.0)
    found = machine.rates()
    assert found.optimizer_gb_s == pytest.approx(max(steps[-RECENT:]))
    assert found.memory_gb_s == pytest.approx(max(memory, *steps[-RECENT:]))


@pytest.mark.parametrize(("nbytes", "seconds"), [(0, 1.0), (GB, 0.0), (GB, -1.0)])
def test_a_step_that_did_nothing_or_took_no_time_tells_nothing(nbytes: int, seconds: float):
    machine = Measurements(DEVICES)
    machine.note_step(nbytes, seconds)
    assert machine.rates().optimizer_gb_s is None


def test_a_probe_counts_until_calls_have_replaced_it_and_one_that_failed_counts_for_nothing():
    machine = Measurements(DEVICES)
    switches = (Switch(devices=(0, 1), upload_gb_s=60.0, download_gb_s=60.0),)
    machine.note_probe(Rates(up_gb_s=(50.0, 50.0), down_gb_s=(40.0, 40.0), switches=switches))
    assert machine.rates().up_gb_s == (50.0, 50.0)
    assert machine.rates().switches == switches
    for _ in range(RECENT):
        machine.note_call(call("up", "cuda:0", [25.0]))
    assert machine.rates().up_gb_s == pytest.approx((25.0, 50.0))
    failed = Measurements(DEVICES)
    failed.note_probe(Rates())
    assert failed.is_probed
    assert failed.rates() == Rates(up_gb_s=(None, None), down_gb_s=(None, None))


@patient
@given(rates, st.floats(0.5, 2.0))
def test_rates_are_those_given_last_while_they_hardly_change(rate: float, factor: float):
    machine = Measurements(DEVICES[:1])
    for _ in range(RECENT):
        machine.note_call(call("up", "cuda:0", [rate]))
    before = machine.rates()
    for _ in range(RECENT):
        machine.note_call(call("up", "cuda:0", [rate * factor]))
    after = machine.rates()
    change = abs(factor - 1) / max(factor, 1)
    if change < 0.0999:
        assert after is before
    if change > 0.1001:
        assert after.up_gb_s == pytest.approx((rate * factor,))


# Devices that differ


@patient
@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=6),
    st.floats(0.2, 5),
)
def test_speeds_are_relative_to_the_mean_of_layers_that_ran_on_all(
    layers: list[tuple[float, float]], factor: float
):
    speeds = DeviceSpeeds()
    first = {layer: ms for layer, (ms, _) in enumerate(layers)}
    speeds.add({"cuda:0": {**first, 99: 1e6}, "cuda:1": {layer: ms * factor for layer, ms in first.items()}})
    found = speeds.of(DEVICES)
    if abs(factor - 1) / max(factor, 1) < 0.0999:
        assert found is None
    if abs(factor - 1) / max(factor, 1) > 0.1001:
        mean = fmean((1.0, factor))
        assert found == pytest.approx((mean, mean / factor))


@pytest.mark.parametrize("factor", [1.12, 2.0])
def test_speeds_are_those_given_last_while_they_hardly_change(factor: float):
    speeds = DeviceSpeeds()
    given = []
    for slower in (factor, 0.95 * factor, 1.05 * factor, factor, 1.5 * factor):
        for _ in range(RECENT):
            speeds.add({"cuda:0": {0: 1.0}, "cuda:1": {0: slower}})
        given.append(speeds.of(DEVICES))
    assert given[0] == pytest.approx(((1 + factor) / 2, (1 + factor) / 2 / factor))
    assert given[:4] == [given[0]] * 4
    assert given[4] == pytest.approx(((1 + 1.5 * factor) / 2, (1 + 1.5 * factor) / 3 / factor))


def test_devices_that_share_no_layer_are_taken_for_alike():
    speeds = DeviceSpeeds()
    assert speeds.of(DEVICES) is None
    speeds.add({"cuda:0": {0: 1.0}, "cuda:1": {1: 9.0}})
    assert speeds.of(DEVICES) is None
