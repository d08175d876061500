"""The hooks and the words for contributors, against what the checks really are."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
HOOKS: list[dict[str, Any]] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
STEPS = dict(re.findall(r'^(?:step|beside) "(.+?)" (.+)$', (ROOT / ".ci/run").read_text(), re.MULTILINE))


QUICK = list(STEPS)[1 : list(STEPS).index("workspace") + 1]


@pytest.mark.parametrize("name", QUICK)
def test_a_hook_runs_the_check_of_its_name(name: str) -> None:
    (hook,) = [hook for hook in HOOKS if hook["id"] == name]
    # Before a commit files are formatted; everywhere else they are only looked at.
    assert hook["entry"] == STEPS[name].removesuffix(" --check")
    # Where a checker looks at the whole, files are not handed to it one by one.
    assert hook.get("pass_filenames", True) is (name in ("format", "lint"))


def test_before_a_push_the_quick_checks_run() -> None:
    (hook,) = [hook for hook in HOOKS if hook.get("stages") == ["pre-push"]]
    assert hook["entry"] == ".ci/run quick"
    assert QUICK == ["types", "format", "lint", "imports", "dependencies", "workspace"]


def test_the_commands_of_the_readme_are_checked() -> None:
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"On a fresh machine.*?```console\n(.*?)```", text, re.DOTALL)
    commands = [line.removeprefix("$ ").removeprefix("pip install uv && ") for line in block.splitlines()]
    assert len(commands) == 2
    for command in commands:
        assert any(step.replace(" --locked", "").startswith(command) for step in STEPS.values()), command


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").iterdir()), ids=lambda path: path.name)
def test_every_script_is_told_to_contributors_and_runs(script: Path) -> None:
    assert f"scripts/{script.name}" in (ROOT / "CONTRIBUTING.md").read_text()
    assert os.access(script, os.X_OK)


def test_hooks_use_nothing_but_what_is_here() -> None:
    assert {hook["language"] for hook in HOOKS} == {"system"}
    assert all(hook["entry"].startswith(("uv run --locked ", ".ci/")) for hook in HOOKS)


def test_every_check_is_told_to_contributors() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().replace("uv run ", "")
    commands = [step.replace("uv run ", "").replace("--locked ", "") for name, step in STEPS.items()]
    commands.remove("uv sync --locked")
    missing = [command for command in commands if command not in text]
    assert missing == []


def test_files_that_contributors_are_sent_to_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    names = re.findall(r"`([\w/.-]+\.(?:py|c|md|toml))`", text)
    assert len(names) > 10
    known = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("*/**/*.*")} | {"pyproject.toml"}
    missing = [name for name in names if not any(path == name or path.endswith(f"/{name}") for path in known)]
    assert missing == []


def test_every_file_of_mutations_is_named_where_they_run() -> None:
    files = [str(file.relative_to(ROOT)) for file in ROOT.glob("tests/**/test_*.py")]
    mark = re.compile(r"^@pytest.mark.mutation", re.MULTILINE)
    marked = [file for file in files if mark.search((ROOT / file).read_text())]

    assert sorted(marked) == sorted(re.findall(r"tests/\S+", STEPS["mutation"]))
