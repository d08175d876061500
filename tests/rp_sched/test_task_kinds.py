"""What is true of a kind of task is said for every kind, in one file."""

import ast
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import rp_sched
from rp_sched import Kind, LayerCost, Mode, Plan, Task, TaskKind, simulate
from rp_sched.problem import task_kinds
from rp_sched.report.render import gantt, look, svg

F, B, FB = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.FUSED
QUESTIONS = sorted(name for name, value in vars(TaskKind).items() if value is False)
YES = {
    "runs_forward": {F, FB},
    "recomputes": {B},
    "runs_backward": {B, FB},
    "computes_loss": {FB},
    "saves_inputs": {F},
    "keeps_activations": {B, FB},
    "adds_gradients": {B, FB},
    "sends_outputs": {F},
    "takes_gradients": {B},
    "sends_gradients": {B, FB},
    "may_exceed_room_ahead": {FB},
}
ROW = task_kinds._Row("X", "example", (), set())
KINDS = {"infer": [F], "train": [F, B], "fused": [F, B, FB]}
FILES = [path for path in Path(rp_sched.__file__).parent.rglob("*.py") if path != Path(task_kinds.__file__)]


def test_each_question_has_an_answer_for_each_kind():
    assert sorted(YES) == QUESTIONS
    assert {mode: [kind for kind in TaskKind if mode in kind.modes] for mode in get_args(Mode)} == KINDS
    for question, kinds in YES.items():
        assert {kind for kind in TaskKind if getattr(kind, question)} == kinds, question


def test_an_answer_to_what_is_not_a_question_is_refused():
    row = replace(ROW, yes={"runs_forwards"})
    with pytest.raises(TypeError, match="X answers 'runs_forwards', which is not a question"):
        TaskKind.__new_member__(TaskKind, row)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("kind", TaskKind)
@pytest.mark.parametrize("question", sorted(YES.keys() - {"may_exceed_room_ahead"}))
def test_a_task_answers_as_its_kind_does(kind: TaskKind, question: str):
    assert getattr(Task(kind, range(1), range(1), 0), question) is getattr(kind, question)


@pytest.mark.parametrize("kind", TaskKind)
def test_a_kind_is_also_its_letters(kind: TaskKind):
    task = Task(kind.value, range(0, 2), range(1, 3), 4)
    assert type(task.kind) is TaskKind
    assert task == Task(kind, range(0, 2), range(1, 3), 4)
    assert task.kind == kind.value
    assert {kind.value: 1}[task.kind] == 1
    assert repr(task) == f"{kind.value}[0:2] m1:3 @4"
    assert Task.parse(repr(task)).kind is kind
    assert pickle.loads(pickle.dumps(task)).kind is kind


def test_the_first_name_of_the_class_still_leads_to_it():
    assert Kind is TaskKind


def test_the_phases_of_a_plan_are_in_the_order_of_launch():
    plan = Plan((range(0, 3),), range(3, 5), (range(0, 3),), groups=(range(0, 1), range(1, 2)))
    assert plan.phases() == (
        (F, (range(0, 3),), ()),
        (FB, (range(3, 5),), (range(0, 1), range(1, 2))),
        (B, (range(0, 3),), ()),
    )


def test_charts_show_each_kind_in_its_own_way():
    looks = [look(kind) for kind in TaskKind]
    for field in ("letter", "colour", "colour_name"):
        assert len({getattr(each, field).lower() for each in looks}) == len(TaskKind)
    assert len({kind.word for kind in TaskKind}) == len(TaskKind)
    tasks = [Task(F, range(1), range(1), 0), Task(FB, range(1, 2), range(1), 0), Task(B, range(1), range(1), 0)]
    played = simulate([tasks, tasks], [LayerCost(1.0)] * 2, devices=1, microbatches=1, mode="fused")
    text, picture = gantt(played), svg(played)
    for kind in TaskKind:
        letter, colour, colour_name = look(kind)
        line = text.splitlines()[0].removeprefix("device 0")
        assert letter in line
        assert letter.swapcase() in line
        assert f"{letter} {kind.word}" in text.splitlines()[-1]
        assert f"{kind} {colour_name}" in picture
        assert picture.count(f'fill="{colour}"') == 2


def compared(path: Path) -> Iterator[str]:
    """What a file compares with, and the keys of its dicts, that is a kind or its letters."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and node.value in set(TaskKind):
            yield f"{path.name}:{node.lineno}"
        parts = [node.left, *node.comparators] if isinstance(node, ast.Compare) else getattr(node, "keys", ())
        for part in parts:
            if part is not None and any(f"TaskKind.{kind.name}" in ast.unparse(part) for kind in TaskKind):
                yield f"{path.name}:{node.lineno}"


def test_other_files_ask_a_kind_a_question_rather_than_which_it_is():
    assert len(FILES) > 20
    assert [place for path in FILES for place in compared(path)] == []


CODES = ['task.kind == "F"', "kind in (TaskKind.FUSED, 1)", "{TaskKind.BACKWARD: 1}[kind]", '{"FB": 1}[kind]']


@pytest.mark.parametrize("code", CODES)
def test_a_file_that_compares_kinds_is_noticed(tmp_path: Path, code: str):
    (tmp_path / "code.py").write_text(code)
    assert list(compared(tmp_path / "code.py"))
