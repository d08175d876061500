"""Costs and limits accept what can be and refuse the rest in words."""

import math
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest
from rp_sched import InvalidCost, LayerCost, Limits


def test_fields_that_are_left_out_follow_from_the_others():
    cost = LayerCost(3.0, weight_bytes=100)
    assert cost == LayerCost(3.0, 6.0, weight_bytes=100, trainable_bytes=100, boundary_bytes=0, kept_bytes=0)
    assert cost.gradient_bytes == 200


def test_frozen_weights_have_no_gradients():
    assert LayerCost(1.0, weight_bytes=100, trainable_bytes=0).gradient_bytes == 0


def test_a_cost_is_frozen_hashable_replaceable_and_picklable():
    cost = LayerCost(1.5, 2.5, weight_bytes=10, trainable_bytes=4, boundary_bytes=3, kept_bytes=2)
    with pytest.raises(FrozenInstanceError):
        cost.forward_ms = 2.0  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(cost)) == cost
    assert hash(replace(cost)) == hash(cost)
    assert replace(cost, kept_bytes=7).kept_bytes == 7


@pytest.mark.parametrize("name", ["forward_ms", "backward_ms"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, -math.inf])
def test_a_time_that_cannot_be_is_refused_by_name(name: str, value: float):
    with pytest.raises(InvalidCost, match=rf"{name} must be a finite time in ms, zero or more, but is {value}"):
        LayerCost(**{"forward_ms": 1.0, name: value})


@pytest.mark.parametrize("name", ["weight_bytes", "trainable_bytes", "boundary_bytes", "kept_bytes"])
def test_bytes_that_cannot_be_are_refused_by_name(name: str):
    with pytest.raises(InvalidCost, match=rf"{name} must be at least 0, but is -1 instead"):
        LayerCost(1.0, **{name: -1})
    for value in (1.5, True, "12", None if name != "trainable_bytes" else 2.0):
        with pytest.raises(TypeError, match=rf"{name} must be a whole number"):
            LayerCost(1.0, **{name: value})


@pytest.mark.parametrize("value", ["1", True, [1.0], 1j])
def test_a_time_must_be_a_number(value: object):
    with pytest.raises(TypeError, match="forward_ms must be a number, but is"):
        LayerCost(value)  # type: ignore[arg-type]


def test_more_trainable_bytes_than_weights_have_in_16_bits_are_refused():
    with pytest.raises(InvalidCost, match=r"trainable_bytes .* at most 20, but is 21 instead"):
        LayerCost(1.0, weight_bytes=10, trainable_bytes=21)


def test_limits_are_all_optional():
    assert Limits().stage_limit_bytes is None
    assert Limits(stage_bytes=7).stage_limit_bytes == 7
    assert Limits(device_memory_bytes=9).stage_limit_bytes == 4
    assert Limits(device_memory_bytes=20, stage_bytes=7).stage_limit_bytes == 7


@pytest.mark.parametrize("name", ["device_memory_bytes", "stage_bytes", "host_memory_bytes"])
def test_a_memory_limit_must_be_a_whole_number_above_zero(name: str):
    with pytest.raises(InvalidCost, match=rf"{name} must be at least 1, but is 0 instead"):
        Limits(**{name: 0})
    with pytest.raises(TypeError, match=rf"{name} must be a whole number"):
        Limits(**{name: 8e9})


@pytest.mark.parametrize("name", ["upload_gb_s", "download_gb_s"])
@pytest.mark.parametrize("value", [0, -3.0, math.nan, math.inf])
def test_a_link_speed_must_be_finite_and_above_zero(name: str, value: float):
    with pytest.raises(InvalidCost, match=rf"{name} must be a finite speed in GB/s, above zero"):
        Limits(**{name: value})


def test_transfers_and_hops_take_time():
    limits = Limits(hop_ms=2, upload_gb_s=4, download_gb_s=None)
    assert limits.hop_ms == 2.0
    assert limits.upload_ms_per_byte * 4e9 == pytest.approx(1000)
    assert limits.download_ms_per_byte == 0
    with pytest.raises(InvalidCost, match="hop_ms must be a finite time"):
        Limits(hop_ms=-1)


def test_a_layer_says_whether_it_writes_buffers():
    assert not LayerCost(1.0).writes_buffers
    assert LayerCost(1.0, writes_buffers=True).writes_buffers
    with pytest.raises(TypeError, match="writes_buffers must be True or False, but is None"):
        LayerCost(1.0, writes_buffers=None)  # type: ignore[arg-type]


def test_stages_are_limited_in_one_of_two_ways():
    assert Limits(device_memory_bytes=100, ahead_bytes=30).room_ahead_bytes == 30
    assert Limits(device_memory_bytes=100, ahead_bytes=30).stage_limit_bytes is None
    assert Limits(device_memory_bytes=100).room_ahead_bytes == 50
    with pytest.raises(InvalidCost, match="give one of them"):
        Limits(stage_bytes=3, ahead_bytes=3)


def test_a_stage_limit_must_leave_room_for_the_stage_fetched_ahead():
    assert Limits(device_memory_bytes=100, stage_bytes=50).stage_limit_bytes == 50
    with pytest.raises(InvalidCost, match="stage_bytes must be at most half of device_memory_bytes"):
        Limits(device_memory_bytes=100, stage_bytes=51)
