"""Each package's changelog is one of Keep a Changelog: versions, newest first, and in each what users ask for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[2]
CHANGELOGS = sorted(ROOT.glob("packages/*/CHANGELOG.md"))
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def mistakes(text: str) -> Iterator[str]:
    """What is not as it should be in a changelog."""
    title, *versions = re.split(r"^## ", text, flags=re.MULTILINE)
    if title != "# Changelog\n\n":
        yield "the title must be followed by a version"
    names = [version.partition("\n")[0] for version in versions]
    if names[0] != "Unreleased":
        yield "the first version must be Unreleased"
    released = [Version(name) for name in names[1:]]
    if released != sorted(set(released), reverse=True):
        yield f"versions must be there once, newest first: {names}"
    for name, version in zip(names, versions, strict=True):
        yield from (f"{name}: {words}" for words in mistakes_of(version.partition("\n")[2]))


def mistakes_of(version: str) -> Iterator[str]:
    """What is not as it should be in what is said of one version."""
    before, *sections = re.split(r"^### ", version, flags=re.MULTILINE)
    if before.strip():
        yield f"{before.strip()[:40]!r} is under none of {', '.join(KINDS)}"
    kinds = [section.partition("\n")[0] for section in sections]
    if kinds != [kind for kind in KINDS if kind in kinds]:
        yield f"{kinds} must be some of {', '.join(KINDS)}, each once, in this order"
    for section in sections:
        kind, _, lines = section.partition("\n")
        if not re.fullmatch(r"\n(- \S.*\n(  \S.*\n)*)+\n?", lines):
            yield f"{kind} must be a list"
        if re.search(rf"^- ({'|'.join(KINDS)}|Mended): ", lines, re.MULTILINE):
            yield f"a line of {kind} says its kind again"


@pytest.mark.parametrize("changelog", CHANGELOGS, ids=lambda path: path.parent.name)
def test_a_changelog_says_what_was_added_changed_and_fixed(changelog: Path) -> None:
    assert list(mistakes(changelog.read_text())) == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("## 0.1.0\n\n### Added\n\n- One.\n", "must be Unreleased"),
        ("## Unreleased\n\n- One.\n", "is under none of"),
        ("## Unreleased\n\n### Fixed\n\n- One.\n\n### Added\n\n- Two.\n", "in this order"),
        ("## Unreleased\n\n### Mended\n\n- One.\n", "must be some of"),
        ("## Unreleased\n\n### Fixed\n\nOne.\n", "must be a list"),
        ("## Unreleased\n\n### Fixed\n\n- Mended: one.\n", "says its kind again"),
        ("## Unreleased\n\n## 0.1.0\n\n## 0.2.0\n", "newest first"),
    ],
)
def test_another_form_would_be_noticed(wrong: str, words: str) -> None:
    (found,) = mistakes(f"# Changelog\n\n{wrong}")

    assert words in found
