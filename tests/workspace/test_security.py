"""SECURITY.md names a test for each of its lines, and these tests are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = re.compile(r"`((?:tests/)?(?:\w+/)*test_\w+\.py)`")
# After a file: words of its tests' names.
WORDS = re.compile(FILE.pattern + r"(?: \(|, )((?:`\w+`(?:, )?)+)")


def lines(text: str) -> Iterator[str]:
    """What is said of safety: each item of a list, and each row of a table but its head."""
    for block in text.split("\n\n"):
        if block.startswith("- "):
            yield from (" ".join(item.split()) for item in re.split(r"^- ", block, flags=re.MULTILINE)[1:])
        elif block.startswith("|"):
            yield from block.splitlines()[2:]


def found(name: str) -> Path | None:
    """The test file of a name: a path, or the only file with it."""
    if (ROOT / name).is_file():
        return ROOT / name
    several = list((ROOT / "tests").rglob(name))
    in_rp_dist = [path for path in several if path.parent.name == "rp_dist"]
    return several[0] if len(several) == 1 else in_rp_dist[0] if in_rp_dist else None


def wrong(text: str) -> list[str]:
    """Lines without a test, test files that are not there, and words that are in no name of a test."""
    names = {name for name, *_ in map(re.Match.groups, FILE.finditer(text))}
    faults = [f"no test: {line}" for line in lines(text) if not FILE.search(line)]
    faults += [f"no file: {name}" for name in sorted(names) if found(name) is None]
    for name, words in WORDS.findall(" ".join(text.split())):
        tests = re.findall(r"def (test_\w+)", path.read_text()) if (path := found(name)) else []
        missing = [word for word in re.findall(r"\w+", words) if not any(word in test for test in tests)]
        faults += [f"no test in {name}: {word}" for word in missing]
    return faults


def test_each_line_of_security_md_names_a_test_that_is_there() -> None:
    text = (ROOT / "SECURITY.md").read_text()

    assert wrong(text) == []
    assert len(list(lines(text))) > 20
    assert len(WORDS.findall(" ".join(text.split()))) > 5


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("- **Links** are safe.\n- Pipes are (`test_yaml.py`).", "no test: **Links** are safe."),
        ("| what | test |\n|---|---|\n| Links | none |", "no test: | Links | none |"),
        ("Links (`tests/rp_dist/test_nothing.py`)", "no file: tests/rp_dist/test_nothing.py"),
        ("Links (`test_strangers.py` (`poisoned`, `unicorns`))", "no test in test_strangers.py: unicorns"),
    ],
)
def test_a_line_that_nothing_shows_is_found(text: str, fault: str) -> None:
    assert wrong(text) == [fault]
