"""The plans that calls have settled for are kept whole or not at all, and only read for the same calls."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from roundpipe import RoundPipe, Runtime
from rp_engine.planning import plan_cache
from rp_engine.planning.plan_cache import MOST_FILES, CachedPlan, PlanCache, cache_folder
from rp_sched import Plan
from torch import nn

FACTS = {"mode": "fused", "microbatches": 4, "model": "m"}
PLANS = [
    Plan(fused=range(5)),
    Plan((range(2),), range(2, 5), (range(1, 2), range(1)), groups=(range(3), range(3, 4)), in_turn=False),
    Plan(fused=range(5), groups=(range(2), range(2, 4)), in_turn=False, devices=3),
]
KEPT = CachedPlan(PLANS[1], frozenset([PLANS[0], PLANS[2]]))


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("RP_ENGINE_CACHE", str(tmp_path))
    return tmp_path / "plans"


def load(facts: dict[str, Any] = FACTS) -> CachedPlan | None:
    return PlanCache(facts).load(5, "fused", 4)


@pytest.mark.parametrize("plan", PLANS)
def test_what_was_kept_is_loaded_in_another_process(folder: Path, plan: Plan) -> None:
    settled = CachedPlan(plan, frozenset(PLANS) - {plan})
    PlanCache(FACTS).save(settled)
    assert load() == settled
    assert [file.suffix for file in folder.iterdir()] == [".json"]
    PlanCache(FACTS).save(CachedPlan(PLANS[0]))
    assert load() == CachedPlan(PLANS[0])


@pytest.mark.parametrize("fact", FACTS)
@pytest.mark.usefixtures("folder")
def test_other_calls_do_not_load_it(fact: str) -> None:
    PlanCache(FACTS).save(KEPT)
    assert load({**FACTS, fact: "other"}) is None


def no_plan(kept: dict[str, Any]) -> Any:
    return {name: value for name, value in kept.items() if name != "plan"}


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "truncated": lambda kept: json.dumps(kept)[:-20],
    "empty": lambda _: "",
    "no JSON": lambda _: "\0" * 100,
    "nested deeply": lambda _: "[" * 100_000,
    "large": lambda kept: json.dumps({**kept, "more": "x" * (1 << 21)}),
    "a list": lambda kept: [kept],
    "of another format": lambda kept: {**kept, "format": 2},
    "of other calls": lambda kept: {**kept, "facts": {**FACTS, "model": "n"}},
    "without a plan": no_plan,
    "of fewer layers": lambda kept: {**kept, "plan": {**kept["plan"], "fused": [2, 4]}},
    "of other microbatches": lambda kept: {**kept, "plan": {**kept["plan"], "groups": [[0, 3], [3, 9]]}},
    "of huge layers": lambda kept: {**kept, "plan": {**kept["plan"], "fused": [2, 10**40]}},
    "of halves": lambda kept: {**kept, "plan": {**kept["plan"], "fused": [2, 4.5]}},
    "of no devices": lambda kept: {**kept, "plan": {**kept["plan"], "devices": 0}},
    "slower than nothing": lambda kept: {**kept, "slower": 3},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_and_foreign_files_are_ignored_with_a_line_and_replaced(
    folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    PlanCache(FACTS).save(KEPT)
    (file,) = folder.iterdir()
    made = DAMAGES[damage](json.loads(file.read_text()))
    file.write_text(made if isinstance(made, str) else json.dumps(made))
    with caplog.at_level(logging.WARNING, logger="rp_engine.planning.plan_cache"):
        assert load() is None
    (record,) = caplog.records
    assert str(file) in record.getMessage()
    PlanCache(FACTS).save(KEPT)
    assert load() == KEPT


@settings(deadline=None)
@given(st.data())
def test_any_change_of_the_text_is_refused_or_is_a_plan(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RP_ENGINE_CACHE", str(tmp_path_factory.getbasetemp() / "any"))
        PlanCache(FACTS).save(KEPT)
        folder = cache_folder()
        assert folder is not None
        (file,) = folder.iterdir()
        text = file.read_bytes()
        at = data.draw(st.integers(0, len(text) - 1))
        file.write_bytes(text[:at] + data.draw(st.binary(max_size=3)) + text[at + 1 :])
        found = load()
        if found is not None:
            for plan in (found.plan, *found.slower):
                plan.check(5, "fused")
                plan.check_microbatches(4)
        file.unlink()


def test_the_oldest_files_go_first(folder: Path) -> None:
    folder.mkdir(parents=True)
    for age in range(MOST_FILES + 3):
        (folder / f"{age}.json").touch()
        os.utime(folder / f"{age}.json", (10**9 - age, 10**9 - age))
    PlanCache(FACTS).save(KEPT)
    names = {file.name for file in folder.iterdir()}
    assert len(names) == MOST_FILES
    assert "0.json" in names
    assert f"{MOST_FILES + 2}.json" not in names
    assert load() == KEPT


def test_a_folder_that_cannot_be_written_is_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RP_ENGINE_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, logger="rp_engine.planning.plan_cache"):
        PlanCache(FACTS).save(KEPT)
        assert load() is None
    assert any("the next process searches again" in record.getMessage() for record in caplog.records)


def test_a_write_that_fails_leaves_what_was_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PlanCache(FACTS).save(KEPT)

    def refuse(*_: object) -> None:
        raise OSError("as arranged")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        PlanCache(FACTS).save(CachedPlan(PLANS[0]))
    assert load() == KEPT
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"RP_ENGINE_CACHE": "/here", "XDG_CACHE_HOME": "/there", "HOME": "/home/me"}, "/here/plans"),
        ({"XDG_CACHE_HOME": "/there", "HOME": "/home/me"}, "/there/rp-engine/plans"),
        ({"XDG_CACHE_HOME": "there", "HOME": "/home/me"}, "/home/me/.cache/rp-engine/plans"),
        ({"HOME": "/home/me"}, "/home/me/.cache/rp-engine/plans"),
        ({"HOME": "me"}, None),
        ({"RP_ENGINE_CACHE": "off", "HOME": "/home/me"}, None),
    ],
)
def test_the_folder_is_where_caches_of_the_user_are(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], wanted: str | None
) -> None:
    for name in ("RP_ENGINE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == (None if wanted is None else Path(wanted))


@pytest.mark.slow
def test_tests_and_the_programs_that_they_start_keep_no_plans() -> None:
    assert cache_folder() is None
    program = "from rp_engine.planning.plan_cache import cache_folder; print(cache_folder())"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    assert ended.stdout.strip() == "None"
    PlanCache(FACTS).save(KEPT)
    assert load() is None


def test_sources_that_are_not_installed_keep_plans_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(plan_cache, "version", missing)
    with Runtime("cpu:1") as runtime:
        model = RoundPipe(nn.Sequential(nn.Linear(2, 2)), runtime=runtime)
        (state,) = runtime.states
        assert PlanCache.of("m", state, runtime, FACTS).load(1, "fused", 4) is None
        model.synchronize()
