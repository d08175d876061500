"""A plan is accepted exactly if it runs every layer once in each direction its mode has."""

import pickle
from itertools import pairwise

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_sched import InvalidPlan, Plan

# Other work shares the machine, so no example has a deadline.
patient = settings(deadline=None)
thorough = settings(max_examples=examples(200), deadline=None)

MODES = ("infer", "train", "fused")


def counted(stages: tuple[range, ...], num_layers: int, *, downwards: bool = False) -> bool:
    """The slow truth: written out layer by layer, the stages are 0, 1, 2, ..., or stage by stage from the top."""
    if any(not stage for stage in stages):
        return False
    ordered = stages[::-1] if downwards else stages
    return [layer for stage in ordered for layer in stage] == list(range(num_layers))


def is_valid(plan: Plan, num_layers: int, mode: str) -> bool:
    if mode != "fused":
        if plan.fused is not None or plan.groups:
            return False
        backward = counted(plan.backward, num_layers if mode == "train" else 0, downwards=True)
        return counted(plan.forward, num_layers) and backward
    if plan.fused is None or not plan.fused or plan.fused.stop != num_layers:
        return False
    below = plan.fused.start
    return counted(plan.forward, below) and counted(plan.backward, below, downwards=True)


def cut(layers: int, marks: set[int]) -> tuple[range, ...]:
    edges = sorted({0, layers} | {mark for mark in marks if mark < layers})
    return tuple(range(a, b) for a, b in pairwise(edges))


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, int]:
    """Plans of which about half are valid in some mode: valid ones, some with a stage or two spoiled."""
    num_layers = draw(st.integers(1, 6))
    marks = st.sets(st.integers(1, 5))
    below = draw(st.integers(0, num_layers))
    stages = {"forward": list(cut(below, draw(marks))), "backward": list(cut(below, draw(marks)))[::-1]}
    fused = range(below, num_layers) if below < num_layers else None
    for _ in range(draw(st.integers(0, 2))):
        spoilt = stages[draw(st.sampled_from(("forward", "backward")))]
        if spoilt and draw(st.booleans()):
            spoilt.pop(draw(st.integers(0, len(spoilt) - 1)))
        else:
            span = draw(st.tuples(st.integers(0, 6), st.integers(0, 6)))
            spoilt.insert(draw(st.integers(0, len(spoilt))), range(*span))
    return Plan(tuple(stages["forward"]), fused, tuple(stages["backward"])), num_layers


@thorough
@given(plans(), st.sampled_from(MODES))
def test_check_agrees_with_counting_layers(drawn: tuple[Plan, int], mode: str):
    plan, num_layers = drawn
    if is_valid(plan, num_layers, mode):
        plan.check(num_layers, mode)
    else:
        with pytest.raises(InvalidPlan):
            plan.check(num_layers, mode)


@patient
@given(st.lists(st.integers(0, 6), max_size=7), st.integers(1, 6))
def test_check_microbatches_agrees_with_counting(edges: list[int], microbatches: int):
    groups = tuple(range(a, b) for a, b in pairwise(edges))
    plan = Plan(fused=range(0, 1), groups=groups)
    if not groups or counted(groups, microbatches):
        plan.check_microbatches(microbatches)
    else:
        with pytest.raises(InvalidPlan):
            plan.check_microbatches(microbatches)


@pytest.mark.parametrize(
    ("plan", "mode", "message"),
    [
        (
            Plan((range(0, 2), range(3, 5))),
            "infer",
            r"forward\[1\] is 3:5, so no stage runs layer 2; start it at 2",
        ),
        (
            Plan((range(0, 3), range(2, 5))),
            "infer",
            r"forward\[1\] is 2:5, so layer 2 appears twice; start it at 3",
        ),
        (Plan((range(0, 3), range(3, 3))), "infer", r"forward\[1\] must not be empty"),
        (Plan((range(0, 3),)), "infer", r"forward must cover layer 0:5, but cover 0:3 instead; add 3:5"),
        (Plan((range(0, 6),)), "infer", r"forward must cover layer 0:5, but cover 0:6 instead; remove 5:6"),
        (Plan((range(0, 5, 2),)), "infer", r"forward\[0\] must be a range with step 1"),
        (Plan((range(-1, 5),)), "infer", r"forward\[0\] must start at 0 or above"),
        (Plan((range(0, 5),), None, (range(0, 5),)), "infer", r"mode 'infer' has no backward stages"),
        (Plan((range(0, 5),), None, (range(0, 2), range(2, 5))), "train", r"from the last stage to the first"),
        (Plan((range(0, 5),), groups=(range(0, 2),)), "infer", r"mode 'infer' has no fused stage and no groups"),
        (Plan((range(0, 3),), range(3, 5), (range(0, 3),)), "train", r"mode 'train' has no fused stage"),
        (Plan((range(0, 5),), None, (range(0, 5),)), "fused", r"mode 'fused' needs a fused stage"),
        (Plan((range(0, 3),), range(3, 4), (range(0, 3),)), "fused", r"fused is 3:4, but must end .* at 5"),
        (Plan((range(0, 3),), range(5, 5), (range(0, 3),)), "fused", r"fused must not be empty"),
        (Plan((range(0, 3),), range(3, 5)), "fused", r"backward must cover layer 0:3, but cover 0:0 instead"),
        (Plan((range(0, 3),), range(0, 5)), "fused", r"forward must cover layer 0:0, but .*; remove 0:3"),
    ],
)
def test_a_refusal_says_what_and_where(plan: Plan, mode: str, message: str):
    with pytest.raises(InvalidPlan, match=message):
        plan.check(5, mode)


def test_forward_and_backward_may_be_cut_differently():
    Plan((range(0, 4),), range(4, 6), (range(3, 4), range(1, 3), range(0, 1))).check(6, "fused")
    Plan((range(0, 6),), None, (range(3, 6), range(0, 3))).check(6, "train")


def test_a_plan_hashes_pickles_and_takes_lists():
    plan = Plan([range(0, 3)], range(3, 5), [range(0, 3)])  # type: ignore[arg-type]
    assert {plan: 1}[Plan((range(0, 3),), range(3, 5), (range(0, 3),))] == 1
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_repr_shows_stages_in_the_order_in_which_they_run():
    plan = Plan((range(0, 3),), range(3, 5), (range(2, 3), range(0, 2)), (range(0, 2), range(2, 3)))
    assert repr(plan) == "Plan(F[0:3] FB[3:5] m0:2 m2:3 B[2:3] B[0:2])"


def test_what_is_not_a_range_is_refused_at_once():
    with pytest.raises(TypeError, match=r"forward must be made of ranges .* but has \(0, 3\)"):
        Plan(((0, 3),))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="fused must be made of ranges"):
        Plan(fused=3)  # type: ignore[arg-type]


def test_an_unknown_mode_and_a_model_without_layers_are_refused():
    with pytest.raises(ValueError, match="mode must be one of 'infer', 'train', 'fused', but is 'eval'"):
        Plan().check(1, "eval")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_layers must be at least 1, but is 0"):
        Plan().check(0, "infer")


@pytest.mark.parametrize("name", ["groups", "forward_groups", "backward_groups"])
def test_groups_of_every_kind_must_hold_each_microbatch_once(name: str):
    halves = {name: (range(0, 2), range(2, 4))}
    plan = Plan((range(0, 2),), range(2, 3), (range(0, 2),), **halves)
    plan.check(3, "fused")
    plan.check_microbatches(4)
    with pytest.raises(InvalidPlan, match=rf"{name} must cover microbatch 0:5, but cover 0:4 instead; add 4:5"):
        plan.check_microbatches(5)


def test_forward_stages_may_be_divided_in_every_mode_and_backward_ones_where_there_are_any():
    halves = (range(0, 1), range(1, 2))
    Plan((range(0, 5),), forward_groups=halves).check(5, "infer")
    Plan((range(0, 5),), None, (range(0, 5),), forward_groups=halves, backward_groups=halves).check(5, "train")
    with pytest.raises(InvalidPlan, match="mode 'infer' has no backward stages"):
        Plan((range(0, 5),), backward_groups=halves).check(5, "infer")


def test_repr_shows_who_gets_the_tasks():
    halves = (range(0, 1), range(1, 2))
    plan = Plan((range(0, 2),), range(2, 3), (range(0, 2),), (), halves, halves, in_turn=False, devices=2)
    assert repr(plan) == "Plan(F[0:2] m0:1 m1:2 FB[2:3] B[0:2] m0:1 m1:2, first free, 2 devices)"


def test_a_plan_uses_one_device_at_least():
    with pytest.raises(ValueError, match="devices must be at least 1, but is 0"):
        Plan(devices=0)
