"""The hooks and the words for contributors, against what the checks really are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
HOOKS: list[dict[str, Any]] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
STEPS = dict(re.findall(r'^step "(.+?)" (.+)$', (ROOT / ".ci/run").read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", ["format", "lint", "types", "imports"])
def test_a_hook_runs_the_check_of_its_name(name: str) -> None:
    (hook,) = [hook for hook in HOOKS if hook["id"] == name]
    assert hook["entry"] == STEPS[name]
    # Where a checker looks at the whole, files are not handed to it one by one.
    assert hook.get("pass_filenames", True) is (name in ("format", "lint"))


def test_before_a_push_all_checks_run() -> None:
    (hook,) = [hook for hook in HOOKS if hook.get("stages") == ["pre-push"]]
    assert hook["entry"] == ".ci/run"


def test_hooks_use_nothing_but_what_is_here() -> None:
    assert {hook["language"] for hook in HOOKS} == {"system"}
    assert all(hook["entry"].startswith(("uv run --locked ", ".ci/")) for hook in HOOKS)


def test_every_check_is_told_to_contributors() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().replace("uv run ", "")
    commands = [step.replace("uv run ", "").replace("--locked ", "") for name, step in STEPS.items()]
    commands.remove("uv sync --locked")
    missing = [command for command in commands if command.split(" --output")[0] not in text]
    assert missing == []


def test_files_that_contributors_are_sent_to_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    names = re.findall(r"`([\w/.-]+\.(?:py|c|md|toml))`", text)
    assert len(names) > 10
    known = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("*/**/*.*")} | {"pyproject.toml"}
    missing = [name for name in names if not any(path == name or path.endswith(f"/{name}") for path in known)]
    assert missing == []
