"""Workflows, forms and the citation: valid, and running what contributors run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = [ROOT / f".github/ISSUE_TEMPLATE/{name}.yml" for name in ("bug", "feature")]
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "github-issue-forms": FORMS,
    "github-issue-config": [ROOT / ".github/ISSUE_TEMPLATE/config.yml"],
    "citation-file-format": [ROOT / "CITATION.cff"],
}


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


def check(schema: str, files: list[Path]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    return subprocess.run([*command, "--default-filetype", "yaml", *files], capture_output=True, text=True)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_file_fits_its_schema(schema: str) -> None:
    done = check(schema, SCHEMAS[schema])
    assert done.returncode == 0, done.stdout


def test_a_mistake_in_a_workflow_would_be_noticed(tmp_path: Path) -> None:
    broken = tmp_path / "ci.yml"
    broken.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "run-on:"))
    assert "runs-on" in check("github-workflows", [broken]).stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_scripts_that_are_here(path: Path) -> None:
    commands = [step["run"] for step in steps(path) if "run" in step]
    found = {word for command in commands for word in re.findall(r"(?:scripts|\.ci)/[a-z-]+", command)}
    assert found
    for name in found:
        assert os.access(ROOT / name, os.X_OK), name


def test_each_workflow_runs_for_a_limited_time_with_few_rights() -> None:
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}
        assert all(job["timeout-minutes"] <= 350 for job in workflow["jobs"].values())


def test_all_pythons_and_both_ends_of_versions_are_tried() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert jobs["versions"]["strategy"]["matrix"] == {
        "python": ["3.11", "3.12", "3.13", "3.14"],
        "versions": ["lowest", "newest"],
    }


def test_the_form_for_bugs_asks_what_roundpipe_env_prints() -> None:
    asked = [part for part in yaml.safe_load(FORMS[0].read_text())["body"] if part["id"] == "env"]
    assert "roundpipe env" in asked[0]["attributes"]["label"]
    assert asked[0]["validations"] == {"required": True}


def test_files_of_another_version_do_not_get_into_a_release(tmp_path: Path) -> None:
    made = tmp_path / "all" / "wheels-one"
    made.mkdir(parents=True)
    names = ["rp_optim-0.2.0-py3-none-any.whl", "rp_optim-0.2.0.tar.gz"]
    for name in [*names, "rp_batch-0.1.0.tar.gz"]:
        (made / name).touch()
    script = ROOT / "scripts/release-files"
    command = [str(script), "rp-optim-v0.2.0", str(tmp_path / "all"), str(tmp_path / "release")]
    assert subprocess.run(command, check=False).returncode == 0
    assert sorted(path.name for path in (tmp_path / "release").iterdir()) == names
    (made / "rp_optim-0.1.0-py3-none-any.whl").touch()
    assert subprocess.run(command, check=False, capture_output=True).returncode == 1


def test_the_draft_of_a_release_has_the_tags_lines(tmp_path: Path) -> None:
    # Given what actions/checkout leaves: the commit, under the name of the annotated tag.
    def git(folder: Path, *arguments: str) -> str:
        identity = ["-c", "user.name=tester", "-c", "user.email=tester@example.org"]
        command = ["git", *identity, "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    tag, origin, checkout = "rp-optim-v0.2.0", tmp_path / "origin", tmp_path / "checkout"
    for folder in (origin, checkout):
        folder.mkdir()
        git(folder, "init", "--quiet")
    git(origin, "commit", "--quiet", "--allow-empty", "--message", "a commit")
    git(origin, "tag", "--annotate", "--message", "what has changed", tag)
    commit = git(origin, "rev-parse", "HEAD")
    git(checkout, "remote", "add", "origin", f"file://{origin}")
    git(checkout, "fetch", "--quiet", "--no-tags", "--depth", "1", "origin", f"+{commit}:refs/tags/{tag}")
    git(checkout, "checkout", "--quiet", f"refs/tags/{tag}")
    # When the steps before the draft have run
    commands = [step.get("run", "") for step in steps(ROOT / ".github/workflows/release.yml")]
    for command in commands[: next(at for at, one in enumerate(commands) if "--notes-from-tag" in one)]:
        if command.startswith("git "):
            environment = {**os.environ, "GITHUB_REF_NAME": tag}
            subprocess.run(["bash", "-ec", command], cwd=checkout, env=environment, check=True)
    assert git(checkout, "tag", "--list", tag, "--format=%(contents)") == "what has changed"
