"""The tables of rooms in docs/architecture.md are those of the tree and of the import contracts."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
SOURCES = {path.name: path for path in ROOT.glob("packages/*/src/*") if path.is_dir()}
TABLE = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE.partition("| room of `roundpipe`")[2], re.MULTILINE))


def listed(package: str) -> list[list[str]]:
    """The rooms of a package in the page's list of them, line by line."""
    block = PAGE.partition(
        f"Those of {package}, top to bottom" if package == "rp-core" else f"Those of {package}:"
    )[2]
    lines = block.partition("```text\n")[2].partition("```")[0].splitlines()
    return [re.split(r" \| ", re.split(r"  +", line)[0]) for line in lines]


def layers(module: str) -> list[list[str]]:
    (contract,) = [each for each in CONTRACTS if each.get("containers") == [module]]
    return [layer.split(" | ") for layer in contract["layers"]]


@pytest.mark.parametrize(
    ("package", "module"),
    [
        ("rp-core", "roundpipe"),
        ("rp-calls", "rp_calls"),
        ("rp-adapters", "rp_adapters"),
        ("rp-data", "rp_data"),
        ("rp-estimate", "rp_estimate"),
        ("rp-export", "rp_export"),
        ("rp-reports", "rp_reports"),
        ("rp-sources", "rp_sources"),
        ("rp-checkpoint", "rp_checkpoint"),
        ("rp-engine", "rp_engine"),
        ("rp-machines", "rp_machines"),
        ("rp-serving", "rp_serving"),
        ("rp-stand-in", "rp_stand_in"),
        ("rp-recompute", "rp_recompute"),
        ("rp-state", "rp_state"),
        ("rp-telemetry", "rp_telemetry"),
    ],
)
def test_the_page_lists_the_rooms_of_the_contract(package: str, module: str) -> None:
    assert listed(package) == layers(module)


def test_every_file_that_the_page_names_by_its_path_is_there() -> None:
    folders = ("packages", "tests", "benchmarks", "examples", "scripts")
    files = [f"/{path.relative_to(ROOT)}" for top in folders for path in (ROOT / top).rglob("*.py")]

    named = set(re.findall(r"`([\w.-]+(?:/[\w.-]+)+\.py)`", PAGE))

    assert named
    assert {path for path in named if not any(file.endswith(f"/{path}") for file in files)} == set()


FOLDERS = sorted(
    path
    for module in ("roundpipe", "rp_calls", "rp_checkpoint", "rp_engine", "rp_state")
    for path in SOURCES[module].iterdir()
    if (path / "__init__.py").exists()
)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_the_table_names_every_file_of_a_room(folder: Path) -> None:
    named = set(re.findall(r"`([\w/]+?)(?:\.py)?`", TABLE[folder.name]))
    told = {part for name in named for part in name.split("/")}

    missing = {path.stem for path in folder.rglob("*.py")} - {"__init__"} - told

    assert missing == set()
