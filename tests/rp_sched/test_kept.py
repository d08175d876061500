"""What calls have settled for is kept whole or not at all, and only read for the same calls."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_sched import NOT_KEPT, KeptCalls, KeptLaunch, KeptPlan, Mode, Plan
from rp_sched.replanning.kept import MOST_FILES

LAYERS, MICROBATCHES = 5, 4
PLANS = [
    Plan(fused=range(5)),
    Plan((range(2),), range(2, 5), (range(1, 2), range(1)), groups=(range(3), range(3, 4)), in_turn=False),
    Plan(fused=range(5), groups=(range(2), range(2, 4)), in_turn=False, devices=3),
]
KEPT = KeptPlan(PLANS[1], frozenset([PLANS[0], PLANS[2]]))
BY_GRAPHS = KeptLaunch(frozenset({0, 2, 3}), graphs_ms=240.0, eager_ms=400.5)
BY_PYTHON = KeptLaunch(frozenset(), graphs_ms=401.0, eager_ms=400.5)


def calls(
    folder: Path | None, *, model: str = "m", mode: Mode = "fused", microbatches: int = MICROBATCHES
) -> KeptCalls:
    return KeptCalls(lambda: folder, {"model": model}, num_layers=LAYERS, mode=mode, microbatches=microbatches)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("by_graphs", [False, True])
def test_a_plan_that_was_kept_is_loaded_by_the_next_process(tmp_path: Path, plan: Plan, by_graphs: bool):
    settled = KeptPlan(plan, frozenset(PLANS) - {plan})
    calls(tmp_path).keep_plan(settled, by_graphs=by_graphs)

    assert calls(tmp_path).plan(by_graphs=by_graphs) == settled
    # Calls that are launched otherwise have plans of their own.
    assert calls(tmp_path).plan(by_graphs=not by_graphs) is None
    assert [file.suffix for file in tmp_path.iterdir()] == [".json"]
    calls(tmp_path).keep_plan(KeptPlan(PLANS[0]), by_graphs=by_graphs)
    assert calls(tmp_path).plan(by_graphs=by_graphs) == KeptPlan(PLANS[0])


@pytest.mark.parametrize("settled", [BY_GRAPHS, BY_PYTHON])
def test_what_launches_calls_is_kept_with_the_times_of_both(tmp_path: Path, settled: KeptLaunch):
    calls(tmp_path).keep_launch(settled)
    assert calls(tmp_path).launch() == settled
    assert calls(tmp_path).plan(by_graphs=settled.by_graphs) is None
    assert settled.ms == min(settled.graphs_ms, settled.eager_ms)


@pytest.mark.parametrize("other", [{"model": "n"}, {"mode": "train"}, {"microbatches": 3}])
def test_other_calls_do_not_load_it(tmp_path: Path, other: dict[str, Any]):
    calls(tmp_path).keep_plan(KEPT, by_graphs=False)
    calls(tmp_path).keep_launch(BY_GRAPHS)
    assert calls(tmp_path, **other).plan(by_graphs=False) is None
    assert calls(tmp_path, **other).launch() is None


def test_nothing_is_kept_where_there_is_no_folder():
    for kept in (NOT_KEPT, calls(None)):
        kept.keep_plan(KEPT, by_graphs=False)
        kept.keep_launch(BY_GRAPHS)
        assert kept.plan(by_graphs=False) is None
        assert kept.launch() is None


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda kept: {key: value for key, value in kept.items() if key != name}


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "truncated": lambda kept: json.dumps(kept)[:-20],
    "empty": lambda _: "",
    "no JSON": lambda _: "\0" * 100,
    "nested deeply": lambda _: "[" * 100_000,
    "large": lambda kept: json.dumps({**kept, "more": "x" * (1 << 21)}),
    "a list": lambda kept: [kept],
    "of another format": lambda kept: {**kept, "format": 1},
    "of other calls": lambda kept: {**kept, "facts": {**kept["facts"], "model": "n"}},
    "without a plan": without("plan"),
    "of fewer layers": lambda kept: {**kept, "plan": {**kept["plan"], "fused": [2, 4]}},
    "of other microbatches": lambda kept: {**kept, "plan": {**kept["plan"], "groups": [[0, 3], [3, 9]]}},
    "of huge layers": lambda kept: {**kept, "plan": {**kept["plan"], "fused": [2, 10**40]}},
    "of halves": lambda kept: {**kept, "plan": {**kept["plan"], "fused": [2, 4.5]}},
    "of no devices": lambda kept: {**kept, "plan": {**kept["plan"], "devices": 0}},
    "slower than nothing": lambda kept: {**kept, "slower": 3},
}


def damaged(file: Path, damage: Callable[[dict[str, Any]], Any]) -> None:
    made = damage(json.loads(file.read_text()))
    file.write_text(made if isinstance(made, str) else json.dumps(made))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_and_foreign_files_are_ignored_with_a_line_and_replaced(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
):
    calls(tmp_path).keep_plan(KEPT, by_graphs=False)
    (file,) = tmp_path.iterdir()
    damaged(file, DAMAGES[damage])

    with caplog.at_level(logging.WARNING, logger="rp_sched"):
        assert calls(tmp_path).plan(by_graphs=False) is None

    (record,) = caplog.records
    assert str(file) in record.getMessage()
    calls(tmp_path).keep_plan(KEPT, by_graphs=False)
    assert calls(tmp_path).plan(by_graphs=False) == KEPT


LAUNCH_DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "without layers": without("layers"),
    "of more layers": lambda kept: {**kept, "layers": [0, LAYERS]},
    "of layers before the first": lambda kept: {**kept, "layers": [-1]},
    "of layers that are no numbers": lambda kept: {**kept, "layers": ["0"]},
    "in no time": lambda kept: {**kept, "eager_ms": None},
    "never": lambda kept: {**kept, "graphs_ms": float("nan")},
}


@pytest.mark.parametrize("damage", LAUNCH_DAMAGES)
def test_what_launches_calls_is_checked_too(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture):
    calls(tmp_path).keep_launch(BY_GRAPHS)
    (file,) = tmp_path.iterdir()
    damaged(file, LAUNCH_DAMAGES[damage])

    with caplog.at_level(logging.WARNING, logger="rp_sched"):
        assert calls(tmp_path).launch() is None

    assert len(caplog.records) == 1


@settings(deadline=None)
@given(st.data())
def test_any_change_of_the_text_is_refused_or_is_a_plan(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    folder = tmp_path_factory.getbasetemp() / "any"
    calls(folder).keep_plan(KEPT, by_graphs=False)
    (file,) = folder.iterdir()
    text = file.read_bytes()
    at = data.draw(st.integers(0, len(text) - 1))
    file.write_bytes(text[:at] + data.draw(st.binary(max_size=3)) + text[at + 1 :])

    found = calls(folder).plan(by_graphs=False)

    for plan in () if found is None else (found.plan, *found.slower):
        plan.check(LAYERS, "fused")
        plan.check_microbatches(MICROBATCHES)
    file.unlink()


def test_the_oldest_files_go_first(tmp_path: Path):
    for age in range(MOST_FILES + 3):
        (tmp_path / f"{age}.json").touch()
        os.utime(tmp_path / f"{age}.json", (10**9 - age, 10**9 - age))

    calls(tmp_path).keep_plan(KEPT, by_graphs=False)

    names = {file.name for file in tmp_path.iterdir()}
    assert len(names) == MOST_FILES
    assert "0.json" in names
    assert f"{MOST_FILES + 2}.json" not in names
    assert calls(tmp_path).plan(by_graphs=False) == KEPT


def test_a_folder_that_cannot_be_written_is_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").touch()
    kept = calls(tmp_path / "file" / "plans")
    with caplog.at_level(logging.WARNING, logger="rp_sched"):
        kept.keep_plan(KEPT, by_graphs=False)
        assert kept.plan(by_graphs=False) is None
    assert any("the next process begins anew" in record.getMessage() for record in caplog.records)


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls(tmp_path).keep_plan(KEPT, by_graphs=False)

    def refuse(*_: object) -> None:
        raise OSError("as arranged")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        calls(tmp_path).keep_plan(KeptPlan(PLANS[0]), by_graphs=False)

    assert calls(tmp_path).plan(by_graphs=False) == KEPT
    assert len(list(tmp_path.iterdir())) == 1
