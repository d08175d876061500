"""`scripts/release` on a clone: what a release changes, when there is none, and which packages are tried."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
IDENTITY = ["-c", "user.name=tester", "-c", "user.email=tester@example.org"]


def script(name: str) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "scripts" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    # Dataclasses look their module up.
    sys.modules[name] = module
    loader.exec_module(module)
    return module


RELEASE = script("release")


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *IDENTITY, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def set_address(folder: Path, name: str, address: str) -> None:
    project = folder / "pyproject.toml"
    text, times = re.subn(f'^{name} = ".*"$', f'{name} = "{address}"', project.read_text(), flags=re.MULTILINE)
    assert times == 1
    project.write_text(text)


def urls(folder: Path, package: str) -> dict[str, str]:
    return tomllib.loads((folder / "packages" / package / "pyproject.toml").read_text())["project"].get("urls", {})


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with what is in this one and an address, where every package has something to release."""
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "tester")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "tester@example.org")
    folder = tmp_path / "clone"
    git(ROOT, "clone", "--quiet", "--depth", "1", f"file://{ROOT}", str(folder))
    for changelog in folder.glob("packages/*/CHANGELOG.md"):
        text = changelog.read_text()
        if not text.partition("## Unreleased\n")[2].partition("\n## ")[0].strip():
            changelog.write_text(
                text.replace("## Unreleased\n", "## Unreleased\n\n### Added\n\n- Something.\n", 1)
            )
    set_address(folder, "repository", "https://example.org/name")
    git(folder, "commit", "--quiet", "--all", "--allow-empty", "--message", "something to release")
    return folder


def test_a_release_is_a_commit_and_a_tag(clone):
    was = RELEASE.members(clone)["rp-optim"].unreleased()
    assert RELEASE.release(clone, "rp-optim", "0.2.0") == "rp-optim-v0.2.0"
    member = RELEASE.members(clone)["rp-optim"]
    assert member.version == "0.2.0"
    assert member.unreleased() == ""
    assert "## Unreleased\n\n## 0.2.0\n\n" in member.changelog.read_text()
    assert was in git(clone, "tag", "--list", "--format=%(contents)", "rp-optim-v0.2.0").replace("\r", "")
    assert git(clone, "status", "--porcelain") == ""
    assert git(clone, "log", "-1", "--format=%s") == "rp-optim 0.2.0"


def test_those_who_need_it_ask_for_it(clone):
    RELEASE.release(clone, "rp-optim", "0.2.1")
    found = RELEASE.members(clone)
    for name in ("rp-core", "rp-trainer"):
        assert '"rp-optim>=0.2.1,<0.3"' in found[name].project.read_text()
        assert "### Changed\n\n- Needs rp-optim 0.2.1.\n" in found[name].unreleased()
    RELEASE.release(clone, "rp-batch", "0.1.1")
    # What is said of other packages stays; of the same package only the last is said.
    member = found["rp-core"]
    member.ask_for("rp-optim", RELEASE.Version("1.2.3"))
    assert "### Changed\n\n- Needs rp-optim 1.2.3.\n- Needs rp-batch 0.1.1.\n-" in member.unreleased()
    assert '"rp-optim>=1.2.3,<2"' in member.project.read_text()
    assert "0.2.1" not in member.unreleased()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ["Changed", "- Needs.", ""]),
        ("### Fixed\n\n- One.\n", ["Changed", "- Needs.", "", "Fixed", "- One.", ""]),
        ("### Added\n\n- One.\n", ["Added", "- One.", "", "Changed", "- Needs.", ""]),
        (
            "### Added\n\n- One.\n\n### Changed\n\n- Two.\n",
            ["Added", "- One.", "", "Changed", "- Needs.", "- Two.", ""],
        ),
    ],
)
def test_what_is_needed_is_told_where_changes_are(before, after):
    found = RELEASE._with_changed(f"\n{before}" if before else "", "- Needs.\n")

    assert found == "\n" + "\n".join(f"### {line}\n" if line.isalpha() else line for line in after)


def test_a_package_is_released_after_what_it_needs(clone):
    with pytest.raises(RELEASE.Refused, match=r"rp-core needs rp-batch, .* release rp-batch first"):
        RELEASE.release(clone, "rp-core", "0.2.0")
    above = (
        "rp-recompute",
        "rp-state",
        "rp-telemetry",
        "rp-engine",
        "rp-checkpoint",
        "rp-calls",
        "rp-generate",
        "rp-machines",
        "rp-stand-in",
        "rp-serving",
        "rp-core",
        "rp-trainer",
        "rp-strangers",
        "rp-sources",
        "rp-data",
        "rp-adapters",
        "rp-estimate",
        "rp-reports",
        "rp-export",
        "rp-cli",
    )
    leaves = [name for name in RELEASE.members(clone) if name not in above]
    for name in (*leaves, *above):
        RELEASE.release(clone, name, "0.2.0")
    project = RELEASE.members(clone)["rp-trainer"].project.read_text()
    assert '"rp-core[hf]>=0.2.0,<0.3"' in project
    assert len(git(clone, "tag", "--list", "*-v0.2.0").splitlines()) == len(leaves) + len(above)


def test_a_release_writes_where_the_repository_is(clone):
    RELEASE.release(clone, "rp-batch", "0.2.0")

    assert urls(clone, "rp-batch") == {
        "Homepage": "https://example.org/name",
        "Changelog": "https://example.org/name/blob/main/packages/rp-batch/CHANGELOG.md",
        "Issues": "https://example.org/name/issues",
    }
    assert urls(clone, "rp-optim") == {}

    # The next release says where it has gone.
    set_address(clone, "repository", "https://example.org/moved")
    set_address(clone, "documentation", "https://docs.example.org")
    member = RELEASE.members(clone)["rp-batch"]
    member.changelog.write_text(
        member.changelog.read_text().replace("## Unreleased\n", "## Unreleased\n\n- More.\n")
    )
    git(clone, "commit", "--quiet", "--all", "--message", "moved")
    RELEASE.release(clone, "rp-batch", "0.2.1")

    found = urls(clone, "rp-batch")
    assert found["Homepage"] == "https://example.org/moved"
    assert found["Documentation"] == "https://docs.example.org"
    # The last release adds or removes nothing else.
    changed = git(clone, "diff", "--unified=0", "HEAD~1", "packages/rp-batch/pyproject.toml").splitlines()
    lines = [line for line in changed if re.match(r"[-+][^-+]", line)]
    assert lines[:1] == ['-Homepage = "https://example.org/name"']
    assert all("example.org" in line for line in lines)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("", r"give its address as `repository` under \[tool.roundpipe\] in pyproject.toml"),
        ("example.org/name", "repository must be written as in https://example.org/name"),
        ("https://example.org/name/", "must be written as"),
    ],
)
def test_there_is_no_release_without_an_address(clone, address, words):
    set_address(clone, "repository", address)
    git(clone, "commit", "--quiet", "--all", "--message", "another address")

    with pytest.raises(RELEASE.Refused, match=words):
        RELEASE.release(clone, "rp-batch", "0.2.0")
    assert urls(clone, "rp-batch") == {}


def test_wheels_of_all_packages_are_tried_alone():
    tried, found = script("try-wheels"), RELEASE.members(ROOT)
    assert set(tried.PACKAGES) == set(found)
    for name, member in found.items():
        needed = {name, *(other for other in found if member.requirement(other) is not None)}
        assert needed <= tried.NEEDS.get(name, {name})
        # What it needs comes first, as in a release.
        assert tried.PACKAGES.index(name) == max(map(tried.PACKAGES.index, needed))


@pytest.mark.parametrize(
    ("package", "version", "words"),
    [
        ("rp-other", "0.2.0", "must be one of rp-adapters, rp-batch, rp-calls"),
        ("rp-optim", "0.1.0", "is 0.1.0 already"),
        ("rp-optim", "0.0.9", "must be higher"),
        ("rp-optim", "next", "must be one such as"),
        ("rp-optim", "0.2", "must be written as"),
        ("rp-optim", "v0.2.0", "must be written as"),
    ],
)
def test_other_names_and_versions_are_refused(package, version, words):
    with pytest.raises(RELEASE.Refused, match=words):
        RELEASE.check(ROOT, package, version)


def test_it_is_refused_with_changes_or_without_news(clone):
    member = RELEASE.members(clone)["rp-sched"]
    member.changelog.write_text("# Changelog\n\n## Unreleased\n\n## 0.1.0\n\n- The first.\n")
    with pytest.raises(RELEASE.Refused, match="not committed"):
        RELEASE.release(clone, "rp-sched", "0.2.0")
    git(clone, "commit", "--quiet", "--all", "--message", "no news")
    with pytest.raises(RELEASE.Refused, match="has nothing under Unreleased"):
        RELEASE.release(clone, "rp-sched", "0.2.0")
    git(clone, "tag", "rp-batch-v0.2.0")
    with pytest.raises(RELEASE.Refused, match="is there already"):
        RELEASE.release(clone, "rp-batch", "0.2.0")
    assert git(clone, "log", "-1", "--format=%s") == "no news"
