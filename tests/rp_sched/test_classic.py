"""The classic schedules run, keep to their devices, and take the time that their papers say."""

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import models
from rp_sched import LayerCost, check_order, simulate
from rp_sched.planners.classic import CLASSIC, even_stages, gpipe, interleaved, looped_bfs, one_f_one_b

patient = settings(max_examples=examples(60), deadline=None)


@patient
@given(st.sampled_from(sorted(CLASSIC)), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_a_classic_schedule_can_run_and_binds_stages_to_devices(name: str, devices: int, loops: int, rounds: int):
    loops = 1 if name in ("gpipe", "1f1b") else loops
    stages = [range(at, at + 1) for at in range(devices * loops)]
    microbatches = devices * rounds
    listed = CLASSIC[name](stages, devices, microbatches)
    check_order(listed, len(stages), microbatches, "fused", devices=devices)
    assert all(task.device == task.layers.start % devices for task in listed)


@patient
@given(st.integers(1, 4), st.integers(1, 9))
def test_one_forward_one_backward_takes_any_number_of_microbatches(devices: int, microbatches: int):
    stages = [range(at, at + 1) for at in range(devices)]
    listed = one_f_one_b(stages, devices, microbatches)
    check_order(listed, devices, microbatches, "fused", devices=devices)
    for device in range(devices - 1):
        kinds = "".join(task.kind for task in listed if task.device == device)
        ahead = min(devices - 1 - device, microbatches)
        assert kinds == "F" * ahead + "FB" * (microbatches - ahead) + "B" * ahead


def test_gpipe_idles_for_as_long_as_its_paper_says():
    # p stages and m microbatches: a part (p - 1) / m of the useful time.
    stages, costs = [range(at, at + 1) for at in range(4)], [LayerCost(1.0, 1.0)] * 3 + [LayerCost(2.0, 1.0)]
    timeline = simulate([gpipe(stages, 4, 6)], costs, devices=4, microbatches=6, mode="fused")
    # The last stage runs forward and backward at once, so 3 forward steps of 1 ms and 3 backward ones of 2 ms.
    assert timeline.makespan_ms == 3 * 1 + 6 * 3 + 3 * 2


def test_more_stages_a_device_idle_less():
    costs = [LayerCost(1.0)] * 16
    ms = [
        simulate(
            [make(even_stages(costs, 4 * loops), 4, 8)], costs, devices=4, microbatches=8, mode="fused"
        ).makespan_ms
        for make in (interleaved, looped_bfs)
        for loops in (1, 2)
    ]
    assert ms[1] < ms[0]
    assert ms[3] < ms[2]


@patient
@given(models(), st.integers(1, 6))
def test_even_stages_cover_the_model(costs: list[LayerCost], wanted: int):
    stages = even_stages(costs, wanted)
    assert [layer for stage in stages for layer in stage] == list(range(len(costs)))
    assert len(stages) == min(wanted, len(costs))


def test_what_cannot_be_scheduled_is_refused_in_words():
    stages = [range(0, 1), range(1, 2), range(2, 3), range(3, 4)]
    with pytest.raises(ValueError, match="1F1B needs a device for each stage, but got 4 stages for 2 devices"):
        one_f_one_b(stages, 2, 2)
    with pytest.raises(ValueError, match=r"must be multiples of devices \(2\), but are 4 and 3"):
        interleaved(stages, 2, 3)
    with pytest.raises(ValueError, match=r"forward\[1\] is 2:3, so no stage runs layer 1"):
        gpipe([range(0, 1), range(2, 3)], 2, 2)
    with pytest.raises(ValueError, match="stages must have at least one"):
        looped_bfs([], 2, 2)
