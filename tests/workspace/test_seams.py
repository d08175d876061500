"""A usual change touches few files: those of its table in docs/architecture.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
KINDS = ["an optimizer", "a task kind", "a kind of accelerator", "a subcommand", "an option"]
# More, and the idea has no home of its own.
MOST_FILES = 5
# Where the names of files of a table may be relative to.
SOURCES = [ROOT, *(package / "src" for package in sorted((ROOT / "packages").iterdir()))]
SOURCES += [ROOT / "packages" / "rp-engine" / "src" / "rp_engine"]


def rows(kind: str) -> list[str]:
    """The first cells of the table of this kind of change."""
    section = PAGE.split(f"### To add {kind}\n", 1)[1].split("\n### ", 1)[0]
    return [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")][2:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_usual_change_touches_at_most_five_files_which_are_there(kind: str) -> None:
    named = [re.findall(r"`(\w+/[\w/.-]*)`", row) for row in rows(kind)]

    assert 1 < len(named) <= MOST_FILES
    for row in named:
        assert row
        for path in row:
            assert any((source / path).exists() for source in SOURCES), path


def test_lion_is_named_by_what_the_table_of_optimizers_says() -> None:
    """Beside its kernels, and beside advice that names it as one with a small state."""
    advice = {"rp_estimate/advice.py", "rp_engine/engine/memory/forecast.py"}
    naming = {
        file.relative_to(source).as_posix()
        for source in SOURCES[1:-1]
        for file in source.rglob("*.py")
        if re.search(r'\bLion\b|"lion"', file.read_text(encoding="utf-8"))
    }

    assert {path for path in naming - advice if "/kernels/" not in path} == {
        "rp_optim/optimizers/lion.py",
        "rp_optim/optimizers/named.py",
        "rp_optim/__init__.py",
        "roundpipe/optim.py",
        "rp_cli/options/shared.py",
    }
