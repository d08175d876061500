"""A recording shows what streams did, what was ordered, and what could overlap."""

from __future__ import annotations

import pytest
import torch
from rp_transfer import CpuBackend
from rp_transfer.testing import Recording, check, check_promises


@pytest.fixture
def recording() -> Recording:
    return Recording(CpuBackend(2))


def test_a_recording_is_a_backend(recording: Recording) -> None:
    check_promises(recording)
    check(recording, range(5))


def test_a_round_trip_is_in_order_and_two_uploads_are_not(recording: Recording) -> None:
    device, source = recording.devices[0], torch.ones(1000)
    first = device.empty((1000,), torch.float32, stream=device.weights_in)
    second = device.empty((1000,), torch.float32, stream=device.activations_in)
    result = recording.host_empty((1000,), torch.float32)
    device.weights_in.copy(first, source)
    device.activations_in.copy(second, source)
    device.results_out.wait(device.weights_in.record())
    device.results_out.copy(result, first)
    weights, activations, back = recording.operations()
    assert [found.stream.split("/")[1] for found in (weights, activations, back)] == [
        "weights_in",
        "activations_in",
        "results_out",
    ]
    assert weights.may_overlap(activations)
    assert activations.may_overlap(back)
    assert not weights.may_overlap(back)
    assert weights.start_s < weights.end_s < back.end_s
    assert not weights.overlapped(back)
    assert recording.chart(40).count("|") == 6


def test_what_the_host_waited_for_comes_before_what_is_put_on_streams_later(recording: Recording) -> None:
    source, there = torch.ones(10), []
    for device in recording.devices:
        there.append(device.empty((10,), torch.float32, stream=device.weights_in))
        device.weights_in.copy(there[-1], source)
        device.weights_in.record().synchronize()
    first, second = recording.operations()
    assert not first.may_overlap(second)


def test_computing_and_declared_uses_are_recorded(recording: Recording) -> None:
    device = recording.devices[1]
    with device.computing():
        memory = device.empty((10,), torch.float32, stream=device.compute).zero_()
        device.compute.touch(write=[memory], what="zeros")
    zeros, work = recording.operations()
    assert (zeros.what, work.what, work.device) == ("zeros", "work", 1)
    assert work.start_s <= zeros.start_s <= zeros.end_s <= work.end_s


def test_conversions_are_recorded(recording: Recording) -> None:
    device = recording.devices[0]
    wide = device.empty((10,), torch.float32, stream=device.compute).zero_()
    narrow = device.empty((10,), torch.bfloat16, stream=device.compute)
    device.compute.cast(narrow, wide)
    (rounding,) = recording.operations()
    assert (rounding.what, rounding.nbytes) == ("rounding", 40)
