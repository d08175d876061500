"""What calls have settled for is kept in a folder of the user's, by all that it depends on."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from roundpipe import RoundPipe, Runtime
from rp_engine.planning import plan_cache
from rp_engine.planning.plan_cache import cache_folder, kept_calls
from rp_sched import KeptCalls, KeptPlan, Plan
from torch import nn


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
    kept = KeptCalls(cache_folder, {}, num_layers=5, mode="fused", microbatches=4)
    kept.keep_plan(KeptPlan(Plan(fused=range(5))), by_graphs=False)
    assert kept.plan(by_graphs=False) is None


def test_sources_that_are_not_installed_keep_plans_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(plan_cache, "version", missing)
    with Runtime("cpu:1") as runtime:
        model = RoundPipe(nn.Sequential(nn.Linear(2, 2)), runtime=runtime)
        (state,) = runtime.states
        assert kept_calls("m", state, runtime, "fused", 4, {}).plan(by_graphs=False) is None
        model.synchronize()
