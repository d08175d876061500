"""Plans cover the model, keep the limits, and are the best balanced of all plans with as many stages."""

import pickle
import time
from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from rp_sched import Infeasible, LayerCost, Limits, Plan, check_order, order, plan

# Other work shares the machine, so no example has a deadline.
patient = settings(deadline=None)
thorough = settings(max_examples=200, deadline=None)

MODES = ("infer", "train", "fused")
ALMOST = 1 + 1e-6


@st.composite
def layers(draw: st.DrawFn) -> LayerCost:
    weight_bytes = draw(st.integers(0, 10))
    return LayerCost(
        draw(st.integers(0, 9)),
        draw(st.integers(0, 9)),
        weight_bytes=weight_bytes,
        trainable_bytes=draw(st.integers(0, weight_bytes)),
        kept_bytes=draw(st.integers(0, 10)),
    )


Problem = tuple[list[LayerCost], str, Limits]

models = st.integers(1, 5).flatmap(lambda count: st.lists(layers(), min_size=count, max_size=count))
speeds = st.sampled_from((None, 1e-8, 1e-7, 1e-6))
few = st.integers(1, 6)


def state(costs: list[LayerCost], stage: range, kind: str) -> int:
    chosen = [costs[layer] for layer in stage]
    gradients = 0 if kind == "F" else sum(2 * cost.trainable_bytes for cost in chosen)
    return sum(cost.weight_bytes for cost in chosen) + gradients


def resident(costs: list[LayerCost], stage: range, kind: str) -> int:
    kept = 0 if kind == "F" else sum(costs[layer].kept_bytes for layer in stage)
    return state(costs, stage, kind) + kept


@st.composite
def problems(draw: st.DrawFn, mode: str | None = None) -> Problem:
    """A model, a mode, and limits under which there is a plan; mostly too tight for the whole model."""
    costs, mode = draw(models), mode or draw(st.sampled_from((*MODES, "fused")))
    largest = max(resident(costs, range(at, at + 1), "F" if mode == "infer" else "B") for at in range(len(costs)))
    everything = resident(costs, range(len(costs)), "B")
    tight, wide = max(1, largest), max(1, largest, everything)
    device = draw(st.none() | st.integers(tight, max(tight, everything - 1)) | st.integers(tight, 2 * wide))
    most = wide if device is None else device // 2
    stage = draw(st.integers(1, most)) if most and draw(st.booleans()) else None
    up, down = draw(speeds), draw(speeds)
    limits = Limits(device_memory_bytes=device, stage_bytes=stage, upload_gb_s=up, download_gb_s=down)
    return costs, mode, limits


def takes_whole(costs: list[LayerCost], limits: Limits) -> bool:
    everything = range(len(costs))
    device, stage = limits.device_memory_bytes, limits.stage_bytes
    in_stage = stage is None or len(costs) == 1 or state(costs, everything, "B") <= stage
    return in_stage and (device is None or resident(costs, everything, "B") <= device)


def fits(costs: list[LayerCost], stage: range, kind: str, limits: Limits) -> bool:
    device = limits.device_memory_bytes
    if len(stage) == 1:
        return device is None or resident(costs, stage, kind) <= device
    ahead = limits.stage_bytes if limits.stage_bytes is not None else device // 2 if device is not None else None
    if ahead is not None and state(costs, stage, kind) > ahead:
        return False
    return device is None or resident(costs, stage, kind) + ahead <= device


def busy_ms(costs: list[LayerCost], stage: range, kind: str, microbatches: int, limits: Limits) -> float:
    chosen = [costs[layer] for layer in stage]
    compute = sum(cost.forward_ms + (0 if kind == "F" else cost.backward_ms) for cost in chosen)
    up = sum(cost.weight_bytes for cost in chosen) / (limits.upload_gb_s or float("inf")) / 1e6
    down = sum(cost.trainable_bytes for cost in chosen) / (limits.download_gb_s or float("inf")) / 1e6
    return max(microbatches * compute, up, 0 if kind == "F" else down)


def stages(made: Plan) -> list[tuple[str, range]]:
    fused = [("FB", made.fused)] if made.fused is not None else []
    return [*(("F", span) for span in made.forward), *fused, *(("B", span) for span in made.backward)]


def slowest_ms(costs: list[LayerCost], made: Plan, microbatches: int, limits: Limits) -> float:
    return max(busy_ms(costs, stage, kind, microbatches, limits) for kind, stage in stages(made))


def cuts(end: int) -> Iterator[tuple[range, ...]]:
    if end == 0:
        yield ()
    for count in range(end):
        for marks in combinations(range(1, end), count):
            edges = (0, *marks, end)
            yield tuple(range(a, b) for a, b in pairwise(edges))


def all_plans(costs: list[LayerCost], mode: str, limits: Limits) -> Iterator[Plan]:
    """Every plan that keeps the limits; the whole model fused is not among them."""
    num_layers = len(costs)
    for below in range(1, num_layers) if mode == "fused" else (num_layers,):
        fused = range(below, num_layers) if below < num_layers else None
        for forward in cuts(below):
            for backward in cuts(below) if mode != "infer" else ((),):
                made = Plan(forward, fused, backward[::-1])
                if all(fits(costs, stage, kind, limits) for kind, stage in stages(made)):
                    yield made


@thorough
@given(problems(), few, few)
def test_a_plan_runs_every_layer_and_keeps_the_limits(problem: Problem, devices: int, microbatches: int):
    costs, mode, limits = problem
    made = plan(costs, devices=devices, microbatches=microbatches, mode=mode, limits=limits)
    made.check(len(costs), mode)
    made.check_microbatches(microbatches)
    listed = order(made, mode=mode, devices=devices, microbatches=microbatches)
    check_order(listed, len(costs), microbatches, mode, devices=devices)
    whole = mode == "fused" and takes_whole(costs, limits)
    event(f"{mode}, whole: {whole}")
    assert whole == (made.fused == range(len(costs)))
    if not whole:
        assert all(fits(costs, stage, kind, limits) for kind, stage in stages(made))


@thorough
@given(problems("fused"), few, few)
def test_a_model_that_fits_is_fused_and_the_microbatches_are_divided_evenly(
    problem: Problem, devices: int, microbatches: int
):
    costs, _, limits = problem
    assume(takes_whole(costs, limits))
    made = plan(costs, devices=devices, microbatches=microbatches, mode="fused", limits=limits)
    sizes = [len(group) for group in made.groups]
    assert (made.forward, made.backward, made.fused) == ((), (), range(len(costs)))
    assert len(sizes) == min(devices, microbatches)
    assert max(sizes) - min(sizes) <= 1


@thorough
@given(problems(), few, few)
def test_there_are_stages_for_all_devices_if_there_are_layers_for_them(
    problem: Problem, devices: int, microbatches: int
):
    costs, mode, limits = problem
    assume(mode != "fused" or not takes_whole(costs, limits))
    made = plan(costs, devices=devices, microbatches=microbatches, mode=mode, limits=limits)
    wanted = min(devices, len(costs))
    if mode == "fused":
        fewest = min(len(stages(other)) for other in all_plans(costs, mode, limits))
        # Below the fused stage every layer has two stages, so their number cannot always be met exactly.
        assert max(wanted, fewest) <= len(stages(made)) <= max(wanted + 1, fewest)
    else:
        fewest = min(len(other.forward) for other in all_plans(costs, "infer", limits))
        assert len(made.forward) == max(wanted, fewest)
        assert mode == "infer" or len(made.backward) >= wanted


@thorough
@given(problems(), few, few)
def test_no_plan_with_as_many_stages_has_a_faster_slowest_stage(problem: Problem, devices: int, microbatches: int):
    costs, mode, limits = problem
    assume(mode != "fused" or (devices > 1 and not takes_whole(costs, limits)))
    made = plan(costs, devices=devices, microbatches=microbatches, mode=mode, limits=limits)
    others = [
        slowest_ms(costs, other, microbatches, limits)
        for other in all_plans(costs, mode, limits)
        if len(other.forward) + len(other.backward) == len(made.forward) + len(made.backward)
        and (mode == "fused" or len(other.forward) == len(made.forward))
    ]
    assert slowest_ms(costs, made, microbatches, limits) <= min(others) * ALMOST


@thorough
@given(problems("fused"), few)
def test_one_device_fuses_as_many_layers_as_fit(problem: Problem, microbatches: int):
    costs, _, limits = problem
    made = plan(costs, devices=1, microbatches=microbatches, mode="fused", limits=limits)
    assert made.fused is not None
    if not takes_whole(costs, limits):
        longest = max(len(other.fused or ()) for other in all_plans(costs, "fused", limits))
        assert len(made.fused) == longest


def rounds(made: Plan, devices: int) -> tuple[int, int]:
    """How often the turns go round the devices, forward and backward."""
    return -(-len(made.forward) // devices), -(-len(made.backward) // devices)


@thorough
@given(problems(), few, few)
def test_adding_a_device_adds_no_round_and_slows_no_stage(problem: Problem, devices: int, microbatches: int):
    costs, mode, limits = problem
    before, after = (
        plan(costs, devices=count, microbatches=microbatches, mode=mode, limits=limits)
        for count in (devices, devices + 1)
    )
    times = [slowest_ms(costs, made, microbatches, limits) for made in (before, after)]
    assert times[1] <= times[0] * ALMOST
    if mode != "fused":
        assert rounds(after, devices + 1) <= rounds(before, devices)
        assert all(a <= b for a, b in zip(rounds(after, devices + 1), rounds(before, devices), strict=True))
    if before.groups:
        assert max(map(len, after.groups)) <= max(map(len, before.groups))


@patient
@given(st.integers(2, 40), st.integers(1, 9), st.integers(1, 20))
def test_equal_layers_make_equal_stages(num_layers: int, devices: int, stage_layers: int):
    costs = [LayerCost(1.0, weight_bytes=1)] * num_layers
    made = plan(costs, devices=devices, microbatches=4, mode="train", limits=Limits(stage_bytes=3 * stage_layers))
    for phase in (made.forward, made.backward):
        sizes = [len(stage) for stage in phase]
        assert max(sizes) - min(sizes) <= 1


def test_layers_that_take_no_time_are_divided_by_number():
    made = plan([LayerCost(0)] * 6, devices=3, microbatches=4, mode="infer")
    assert made.forward == (range(0, 2), range(2, 4), range(4, 6))


def test_the_fused_stage_leaves_enough_layers_for_stages_on_all_devices():
    costs = [LayerCost(ms, weight_bytes=1) for ms in (100, 1, 1, 1)]
    made = plan(costs, devices=4, microbatches=4, mode="fused", limits=Limits(stage_bytes=9))
    assert repr(made) == "Plan(F[0:2] FB[2:4] B[1:2] B[0:1])"


def test_stages_to_spare_go_to_the_slower_direction():
    costs = [LayerCost(ms, weight_bytes=1) for ms in (100, 1, 90, 1, 100)]
    made = plan(costs, devices=5, microbatches=4, mode="fused", limits=Limits(stage_bytes=9))
    assert repr(made) == "Plan(F[0:4] FB[4:5] B[2:4] B[1:2] B[0:1])"


def test_a_slow_link_counts_where_microbatches_are_few():
    costs = [LayerCost(1.0, 1.0, weight_bytes=size) for size in (30, 10, 10, 10)]
    by_link = plan(costs, devices=2, microbatches=1, mode="infer", limits=Limits(upload_gb_s=1e-6))
    by_time = plan(costs, devices=2, microbatches=50, mode="infer", limits=Limits(upload_gb_s=1e-6))
    assert by_link.forward == (range(0, 1), range(1, 4))
    assert by_time.forward == (range(0, 2), range(2, 4))


def test_a_single_layer_may_take_the_room_of_the_next_one():
    costs = [LayerCost(1.0, weight_bytes=size, trainable_bytes=0) for size in (1, 9, 1)]
    made = plan(costs, devices=1, microbatches=1, mode="infer", limits=Limits(device_memory_bytes=10))
    assert made.forward == (range(0, 1), range(1, 2), range(2, 3))


def test_a_layer_larger_than_a_device_is_named_with_need_and_limit():
    costs = [LayerCost(1.0), LayerCost(1.0, weight_bytes=100, trainable_bytes=50, kept_bytes=7)]
    limits = Limits(device_memory_bytes=206)
    with pytest.raises(Infeasible, match=r"layer 1 needs 207 bytes .*device_memory_bytes is 206; split") as caught:
        plan(costs, devices=2, microbatches=2, mode="fused", limits=limits)
    assert (caught.value.layer, caught.value.need_bytes, caught.value.limit_bytes) == (1, 207, 206)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    plan(costs, devices=2, microbatches=2, mode="infer", limits=limits)


def test_bad_arguments_are_refused_in_words():
    costs = [LayerCost(1.0)]
    with pytest.raises(ValueError, match="devices must be at least 1, but is 0"):
        plan(costs, devices=0, microbatches=1, mode="infer")
    with pytest.raises(ValueError, match="microbatches must be at least 1, but is 0"):
        plan(costs, devices=1, microbatches=0, mode="infer")
    with pytest.raises(ValueError, match="mode must be one of 'infer', 'train', 'fused', but is 'eval'"):
        plan(costs, devices=1, microbatches=1, mode="eval")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="strategy must be 'greedy', but is 'best'"):
        plan(costs, devices=1, microbatches=1, mode="infer", strategy="best")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="costs must name at least one layer"):
        plan([], devices=1, microbatches=1, mode="infer")
    with pytest.raises(TypeError, match=r"costs\[1\] must be a LayerCost, but is 3"):
        plan([*costs, 3], devices=1, microbatches=1, mode="infer")  # type: ignore[list-item]


def test_ninety_four_layers_for_eight_devices_are_planned_in_under_a_second():
    costs = [LayerCost(43.0 + layer % 7, weight_bytes=10**9) for layer in range(94)]
    limits = Limits(device_memory_bytes=40 * 10**9, upload_gb_s=55, download_gb_s=55)
    begin = time.process_time()
    made = plan(costs, devices=8, microbatches=16, mode="fused", limits=limits)
    assert time.process_time() - begin < 1
    made.check(94, "fused")
