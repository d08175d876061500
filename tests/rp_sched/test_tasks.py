"""Tasks read back as written, and a task list is accepted exactly if it can run."""

import pickle
from itertools import pairwise

import pytest
from examples import examples
from hypothesis import event, given, settings
from hypothesis import strategies as st
from rp_sched import InvalidOrder, InvalidPlan, InvalidTask, Plan, Task, check_order, order

# Other work shares the machine, so no example has a deadline.
patient = settings(deadline=None)
thorough = settings(max_examples=examples(200), deadline=None)

MODES = ("infer", "train", "fused")


@st.composite
def spans(draw: st.DrawFn, end: int = 10**12) -> range:
    start = draw(st.integers(0, end - 1))
    return range(start, draw(st.integers(start + 1, end)))


tasks = st.builds(Task, st.sampled_from(("F", "B", "FB")), spans(), spans(), st.integers(0, 10**6))


@patient
@given(tasks)
def test_parse_reads_what_repr_wrote(task: Task):
    assert Task.parse(repr(task)) == task
    assert pickle.loads(pickle.dumps(task)) == task
    assert hash(Task.parse(repr(task))) == hash(task)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F[0:7] m0:4",
        "f[0:7] m0:4 @2",
        "F[0:7] m0:4 @2 ",
        "BF[0:7] m0:4 @2",
        "F[-1:7] m0:4 @2",
        "F[\u0660:7] m0:4 @2",
    ],
)
def test_a_text_that_is_no_task_is_refused_with_an_example(text: str):
    with pytest.raises(InvalidTask, match=r"must be written like 'F\[0:7\] m0:4 @2', but the text is "):
        Task.parse(text)


@pytest.mark.parametrize("text", ["F[7:7] m0:4 @2", "F[0:7] m4:0 @2"])
def test_a_text_with_an_empty_range_is_refused(text: str):
    with pytest.raises(InvalidTask, match="must not be empty"):
        Task.parse(text)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (("X", range(1), range(1), 0), InvalidTask, "kind must be one of 'F', 'B', 'FB', but is 'X'"),
        (("F", range(0), range(1), 0), InvalidTask, "layers must not be empty"),
        (("F", range(1), range(0, 4, 2), 0), InvalidTask, "microbatches must be a range with step 1"),
        (("F", range(-1, 1), range(1), 0), InvalidTask, "layers must start at 0 or above"),
        (("F", range(1), range(1), -1), InvalidTask, "device must be at least 0, but is -1"),
        (("F", (0, 1), range(1), 0), TypeError, "layers must be a range"),
        (("F", range(1), range(1), 1.0), TypeError, "device must be a whole number"),
    ],
)
def test_a_task_that_cannot_be_is_refused(fields: tuple[object, ...], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        Task(*fields)  # type: ignore[arg-type]


Step = tuple[str, int, int]


def steps(task: Task) -> list[Step]:
    """What a task does, as single (direction, layer, microbatch) steps."""
    up, down = list(task.layers), list(task.layers)[::-1]
    return [
        (direction, layer, microbatch)
        for microbatch in task.microbatches
        for direction, layers in (("F", up), ("B", down))
        if direction in task.kind
        for layer in layers
    ]


def needed(step: Step, num_layers: int) -> Step | None:
    direction, layer, microbatch = step
    if direction == "F":
        return ("F", layer - 1, microbatch) if layer else None
    return ("B", layer + 1, microbatch) if layer + 1 < num_layers else ("F", layer, microbatch)


def can_run(listed: list[Task], num_layers: int, microbatches: int, mode: str) -> bool:
    """The slow truth: write out every step, and look for each step's need among the steps before it."""
    done = [step for task in listed for step in steps(task)]
    directions = ("F",) if mode == "infer" else ("F", "B")
    wanted = {(d, layer, m) for d in directions for layer in range(num_layers) for m in range(microbatches)}
    if len(done) != len(set(done)) or set(done) != wanted:
        return False
    if any((need := needed(step, num_layers)) and need not in done[:at] for at, step in enumerate(done)):
        return False
    fused = [task for task in listed if task.kind == "FB"]
    fused_tops = {(layer, m) for task in fused for layer in task.layers for m in task.microbatches}
    if mode == "fused":
        tails = all(num_layers - 1 in task.layers for task in fused)
        return tails and all((num_layers - 1, m) in fused_tops for m in range(microbatches))
    kinds = "".join(task.kind for task in listed)
    return not fused and "BF" not in kinds


def cut(layers: range, marks: set[int]) -> list[range]:
    edges = sorted({layers.start, layers.stop} | {mark for mark in marks if mark in layers})
    return [range(a, b) for a, b in pairwise(edges)]


@st.composite
def roads(draw: st.DrawFn, num_layers: int, group: range, mode: str) -> list[Task]:
    """How one group of microbatches goes through the model and back."""
    marks, devices = st.sets(st.integers(1, 4)), st.integers(0, 3)
    below = draw(st.integers(0, num_layers - 1)) if mode == "fused" else num_layers
    road = [Task("F", span, group, draw(devices)) for span in cut(range(below), draw(marks)) if span]
    if mode == "fused":
        road.append(Task("FB", range(below, num_layers), group, draw(devices)))
    if mode != "infer":
        road += [Task("B", span, group, draw(devices)) for span in cut(range(below), draw(marks))[::-1] if span]
    return road


@st.composite
def lists(draw: st.DrawFn, spoil: bool) -> tuple[list[Task], int, int, str]:
    """Task lists in which groups of microbatches go different ways, mixed with each other, perhaps spoilt."""
    mode, num_layers, microbatches = draw(st.sampled_from(MODES)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    groups = cut(range(microbatches), draw(st.sets(st.integers(1, 2))))
    waiting = [draw(roads(num_layers, group, mode)) for group in groups]
    listed: list[Task] = []
    while any(waiting):
        ready = [road for road in waiting if road]
        if mode == "train" and any(road[0].kind == "F" for road in ready):
            ready = [road for road in ready if road[0].kind == "F"]
        listed.append(draw(st.sampled_from(ready)).pop(0))
    for _ in range(draw(st.integers(1, 2)) if spoil else 0):
        draw(spoilers(listed, num_layers, microbatches))
    return listed, num_layers, microbatches, mode


@st.composite
def spoilers(draw: st.DrawFn, listed: list[Task], num_layers: int, microbatches: int) -> None:
    at = draw(st.integers(0, len(listed) - 1)) if listed else 0
    how = draw(st.sampled_from(("drop", "move", "put"))) if listed else "put"
    task = listed.pop(at) if how in ("drop", "move") else None
    if how == "put":
        kind = draw(st.sampled_from(("F", "B", "FB")))
        task = Task(kind, draw(spans(num_layers + 1)), draw(spans(microbatches + 1)), 0)
    if task and how != "drop":
        listed.insert(draw(st.integers(0, len(listed))), task)


@thorough
@given(lists(spoil=False))
def test_any_mixture_of_ways_is_accepted(drawn: tuple[list[Task], int, int, str]):
    listed, num_layers, microbatches, mode = drawn
    assert can_run(listed, num_layers, microbatches, mode)
    check_order(listed, num_layers, microbatches, mode, devices=4)


@thorough
@given(lists(spoil=True))
def test_a_list_is_accepted_exactly_if_it_can_run(drawn: tuple[list[Task], int, int, str]):
    listed, num_layers, microbatches, mode = drawn
    runs = can_run(listed, num_layers, microbatches, mode)
    event(f"runs: {runs}")
    if runs:
        check_order(listed, num_layers, microbatches, mode)
    else:
        with pytest.raises(InvalidOrder):
            check_order(listed, num_layers, microbatches, mode)


@pytest.mark.parametrize(
    ("listed", "mode", "message"),
    [
        ("F[1:3] m0:2 @0", "infer", r"task 0, F\[1:3\] m0:2 @0: layer 0 has not run forward for microbatch 0 yet"),
        (
            "F[0:3] m0:1 @0, F[2:3] m0:1 @0",
            "infer",
            r"task 1, .*: layer 2 has run forward for microbatch 0 before",
        ),
        ("F[0:3] m0:1 @0", "infer", r"the list ends, but layer 0 never runs forward for microbatch 1"),
        ("F[0:4] m0:2 @0", "infer", r"task 0, .*: the model has 3 layers; end at 3"),
        ("F[0:3] m0:3 @0", "infer", r"task 0, .*: there are 2 microbatches; end at 2"),
        ("F[0:3] m0:2 @2", "infer", r"task 0, .*: there are 2 devices; use one below 2"),
        ("B[0:3] m0:2 @0", "infer", r"task 0, .*: mode 'infer' has no tasks of kind B"),
        ("F[0:3] m0:2 @0", "train", r"the list ends, but layer 2 never runs backward for microbatch 0"),
        ("F[0:3] m0:1 @0, B[0:3] m0:1 @0, F[0:3] m1:2 @0", "train", r"task 2, .*: in mode 'train' every forward"),
        (
            "F[0:3] m0:1 @0, B[0:3] m0:2 @0",
            "train",
            r"task 1, .*: layer 0 has not run forward for microbatch 1 yet",
        ),
        ("F[0:3] m0:2 @0, B[0:2] m0:2 @0", "train", r"task 1, .*: layer 2 has not run backward for microbatch 0"),
        (
            "FB[0:3] m0:2 @0, B[0:3] m0:2 @0",
            "fused",
            r"task 1, .*: layer 2 has run backward for microbatch 0 before",
        ),
        ("FB[0:2] m0:2 @0", "fused", r"task 0, .*: a fused task must end with the last layer, at 3"),
        ("F[0:3] m0:2 @0", "fused", r"task 0, .*: in mode 'fused' the last layer's task must be of kind FB"),
    ],
)
def test_a_refusal_names_the_task_and_what_is_wrong(listed: str, mode: str, message: str):
    with pytest.raises(InvalidOrder, match=message):
        check_order([Task.parse(text) for text in listed.split(", ")], 3, 2, mode, devices=2)


def test_what_is_not_a_task_is_refused():
    with pytest.raises(TypeError, match=r"task 0, 'F\[0:3\] m0:2 @0': must be a Task, but is a str"):
        check_order(["F[0:3] m0:2 @0"], 3, 2, "infer")  # type: ignore[list-item]


@st.composite
def calls(draw: st.DrawFn) -> tuple[Plan, str, int, int, int]:
    mode, num_layers, microbatches = draw(st.sampled_from(MODES)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    marks = st.sets(st.integers(1, 4))
    below = draw(st.integers(0, num_layers - 1)) if mode == "fused" else num_layers
    forward, backward = (cut(range(below), draw(marks)) if below else [] for _ in range(2))
    fused = range(below, num_layers) if mode == "fused" else None
    groups = cut(range(microbatches), draw(marks)) if fused and draw(st.booleans()) else []
    others = cut(range(microbatches), draw(marks)) if draw(st.booleans()) else []
    down = backward[::-1] if mode != "infer" else []
    plan = Plan(forward, fused, down, groups, others, others if down else ())
    devices = draw(st.integers(1, 4))
    return plan, mode, devices, microbatches, draw(st.integers(0, devices - 1))


@patient
@given(calls())
def test_the_order_of_a_valid_plan_can_run(call: tuple[Plan, str, int, int, int]):
    plan, mode, devices, microbatches, first = call
    listed = order(plan, mode=mode, devices=devices, microbatches=microbatches, first_device=first)
    check_order(listed, plan.num_layers, microbatches, mode, devices=devices)
    assert can_run(list(listed), plan.num_layers, microbatches, mode)


@patient
@given(calls())
def test_the_order_has_the_stages_of_the_plan_and_goes_round_the_devices(call: tuple[Plan, str, int, int, int]):
    plan, mode, devices, microbatches, first = call
    listed = order(plan, mode=mode, devices=devices, microbatches=microbatches, first_device=first)
    whole = (range(microbatches),)
    for kind, stages, groups in (
        ("F", plan.forward, plan.forward_groups),
        ("FB", () if plan.fused is None else (plan.fused,), plan.groups),
        ("B", plan.backward, plan.backward_groups),
    ):
        found = [(task.layers, task.microbatches) for task in listed if task.kind == kind]
        assert found == [(stage, group) for stage in stages for group in groups or whole]
    assert [task.device for task in listed] == [(first + turn) % devices for turn in range(len(listed))]


def test_groups_of_the_fused_stage_go_to_neighbouring_devices():
    plan = Plan((range(0, 2),), range(2, 4), (range(0, 2),), (range(0, 3), range(3, 5)))
    listed = order(plan, mode="fused", devices=3, microbatches=5, first_device=1)
    assert " ".join(map(repr, listed)) == "F[0:2] m0:5 @1 FB[2:4] m0:3 @2 FB[2:4] m3:5 @0 B[0:2] m0:5 @1"


def test_a_plan_for_fewer_devices_leaves_the_others_alone():
    plan = Plan((range(0, 2),), range(2, 4), (range(0, 2),), devices=2)
    listed = order(plan, mode="fused", devices=3, microbatches=1, first_device=2)
    assert [task.device for task in listed] == [0, 1, 0]


def test_order_refuses_what_it_cannot_place():
    plan = Plan(fused=range(0, 2), groups=(range(0, 2),))
    with pytest.raises(InvalidPlan, match="groups must cover microbatch 0:3"):
        order(plan, mode="fused", devices=1, microbatches=3)
    with pytest.raises(ValueError, match="devices must be at least 1"):
        order(plan, mode="fused", devices=0, microbatches=2)
    with pytest.raises(ValueError, match=r"first_device must be below devices \(2\), but is 2"):
        order(plan, mode="fused", devices=2, microbatches=2, first_device=2)
    with pytest.raises(InvalidPlan, match="forward must cover layer 0:1"):
        order(Plan(), mode="infer", devices=1, microbatches=2)
