"""The workspace: what its members promise of each other, and of themselves."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
MEMBERS = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))


def project(member: Path) -> dict:
    return tomllib.loads((member / "pyproject.toml").read_text())["project"]


def version(member: Path) -> str:
    (source,) = member.glob("src/*/__init__.py")
    return re.search(r'^__version__ = "(.+)"$', source.read_text(), re.MULTILINE)[1]


def requirements(member: Path) -> list[Requirement]:
    found = project(member)
    extras = [line for lines in found.get("optional-dependencies", {}).values() for line in lines]
    return [Requirement(line) for line in [*found["dependencies"], *extras]]


def test_these_are_the_members() -> None:
    names = [project(member)["name"] for member in MEMBERS]
    assert names == [
        "rp-adapters",
        "rp-batch",
        "rp-calls",
        "rp-checkpoint",
        "rp-cli",
        "rp-core",
        "rp-data",
        "rp-dist",
        "rp-engine",
        "rp-errors",
        "rp-estimate",
        "rp-export",
        "rp-generate",
        "rp-machines",
        "rp-optim",
        "rp-packing",
        "rp-presets",
        "rp-recompute",
        "rp-reports",
        "rp-sched",
        "rp-serving",
        "rp-sources",
        "rp-stand-in",
        "rp-state",
        "rp-strangers",
        "rp-telemetry",
        "rp-trainer",
        "rp-transfer",
    ]


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
def test_a_member_accepts_the_versions_of_its_siblings(member: Path) -> None:
    # uv takes siblings from the workspace whatever their versions are; people who install from an index do not.
    siblings = {project(sibling)["name"]: version(sibling) for sibling in MEMBERS}
    for requirement in requirements(member):
        if requirement.name in siblings:
            assert requirement.specifier.contains(siblings[requirement.name], prereleases=True), requirement


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
def test_members_ask_for_those_siblings_alone_that_they_import(member: Path) -> None:
    siblings = {project(sibling)["name"] for sibling in MEMBERS}
    asked = {requirement.name for requirement in requirements(member)} & siblings
    leaves = {"rp-batch", "rp-dist", "rp-optim", "rp-packing", "rp-sched", "rp-transfer"}
    allowed = {
        "rp-recompute": {"rp-batch", "rp-errors", "rp-transfer"},
        "rp-state": {"rp-errors", "rp-optim", "rp-transfer"},
        "rp-telemetry": {"rp-errors", "rp-sched", "rp-transfer"},
        "rp-engine": {*leaves - {"rp-dist"}, "rp-errors", "rp-recompute", "rp-state", "rp-telemetry"},
        "rp-calls": {"rp-batch", "rp-engine", "rp-errors", "rp-sched", "rp-transfer"},
        "rp-generate": {"rp-batch"},
        "rp-machines": {"rp-batch", "rp-dist", "rp-engine", "rp-optim", "rp-transfer"},
        "rp-checkpoint": {"rp-engine", "rp-errors", "rp-optim", "rp-packing", "rp-sched"},
        "rp-serving": {"rp-errors", "rp-packing", "rp-presets"},
        "rp-stand-in": {"rp-checkpoint", "rp-engine", "rp-errors", "rp-state"},
        # rp-machines by its entry point; rp-presets by an extra, too.
        "rp-core": {
            *leaves - {"rp-dist"},
            *("rp-engine", "rp-errors", "rp-calls", "rp-checkpoint", "rp-generate", "rp-machines", "rp-presets"),
            "rp-stand-in",
        },
        "rp-trainer": {
            "rp-batch",
            "rp-checkpoint",
            "rp-core",
            "rp-dist",
            "rp-engine",
            "rp-optim",
            "rp-serving",
            "rp-transfer",
        },
        "rp-strangers": {"rp-presets", "rp-trainer"},
        "rp-data": {"rp-presets", "rp-sources", "rp-strangers", "rp-trainer"},
        "rp-adapters": {"rp-checkpoint", "rp-presets", "rp-strangers", "rp-trainer"},
        "rp-estimate": {
            *leaves - {"rp-dist"},
            *("rp-adapters", "rp-core", "rp-engine", "rp-presets", "rp-strangers", "rp-trainer"),
        },
        "rp-reports": {"rp-engine", "rp-trainer"},
        "rp-sources": {"rp-presets", "rp-strangers", "rp-trainer"},
        "rp-export": {
            *("rp-adapters", "rp-checkpoint", "rp-core", "rp-packing", "rp-presets", "rp-sources", "rp-strangers"),
            "rp-trainer",
        },
        "rp-cli": {
            *leaves - {"rp-batch", "rp-dist"},
            *("rp-engine", "rp-presets", "rp-core", "rp-trainer", "rp-strangers", "rp-data"),
            *("rp-adapters", "rp-estimate", "rp-export", "rp-reports", "rp-sources"),
        },
    }
    assert asked == allowed.get(member.name, set())


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
def test_a_member_is_complete(member: Path) -> None:
    for name in ("README.md", "CHANGELOG.md", "LICENSE"):
        assert (member / name).read_text().strip(), name
    (package,) = filter(Path.is_dir, member.glob("src/*"))
    assert (package / "py.typed").is_file()
    assert project(member)["requires-python"] == ">=3.11"
    # What changes has a place to be told before it has a version.
    headings = re.findall(r"^## (.+)$", (member / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", version(member)]
    assert importlib.import_module(package.name).__version__ == version(member)


def test_the_root_is_not_a_package() -> None:
    assert "project" not in tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_extras_for_both_cuda_versions_are_forwarded() -> None:
    for member, below in (("rp-engine", "rp-transfer"), ("rp-core", "rp-engine"), ("rp-cli", "rp-core")):
        extras = project(ROOT / "packages" / member)["optional-dependencies"]
        assert {cuda: [f"{below}[{cuda}]"] for cuda in ("cuda12", "cuda13")}.items() <= extras.items()


@pytest.mark.parametrize("path", sorted(ROOT.glob("packages/*/src/**/*.py")), ids=lambda path: path.name)
def test_a_files_first_line_says_its_purpose(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first.startswith('"""')
    assert len(first) > len('"""."""')
