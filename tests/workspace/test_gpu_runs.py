"""The commands that `scripts/gpu-runs` keeps for machines with GPUs name files and options that there are."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RUNS: dict[str, Any] = runpy.run_path(str(ROOT / "scripts/gpu-runs"))["RUNS"]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_names_files_and_options_that_there_are(name: str) -> None:
    words = RUNS[name].command.split()
    files = [word for word in words if "/" in word]
    assert files
    assert all((ROOT / word).exists() for word in files)
    if files[0].startswith("benchmarks/"):
        source = (ROOT / files[0]).read_text()
        options = [word for word in words[words.index(files[0]) :] if word.startswith("--")]
        assert [option for option in options if f'"{option}"' not in source] == []


def test_the_documents_name_runs_that_there_are() -> None:
    folders = (ROOT / "docs", ROOT / "benchmarks/results")
    pages = " ".join(page.read_text() for folder in folders for page in folder.glob("*.md"))
    named = {name for names in re.findall(r"`scripts/gpu-runs ([a-z0-9. -]+)`", pages) for name in names.split()}
    assert named
    assert named - {"--list"} <= RUNS.keys()


def test_the_links_of_the_results_lead_somewhere() -> None:
    results = ROOT / "benchmarks/results"
    links = [
        link
        for page in results.glob("*.md")
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    ]
    assert links
    assert [link for link in links if not (results / link).is_file()] == []
