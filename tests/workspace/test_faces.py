"""The faces of rp-engine: no other package imports past them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FACES = {
    "rp_engine",
    "rp_engine.connecting",
    "rp_engine.context",
    "rp_engine.errors",
    "rp_engine.estimates",
    "rp_engine.saving",
    "rp_engine.wrapping",
}


def imported(file: Path) -> Iterator[tuple[str, str]]:
    """The pairs of module and name that a file imports of rp-engine."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "rp_engine":
            yield from ((node.module or "", each.name) for each in node.names)
        if isinstance(node, ast.Import):
            yield from ((each.name, "") for each in node.names if each.name.startswith("rp_engine."))


def past_the_faces(package: Path) -> dict[str, set[str]]:
    """The names by module that a package imports from inside of rp-engine."""
    found: dict[str, set[str]] = {}
    for file in package.glob("src/**/*.py"):
        for module, name in imported(file):
            if module not in FACES:
                found.setdefault(module, set()).add(name)
    return found


def test_packages_import_the_faces_of_the_engine() -> None:
    packages = [path for path in ROOT.glob("packages/*") if path.name != "rp-engine"]

    found = {package.name: past_the_faces(package) for package in packages}

    assert len(found) > 9
    assert {name: past for name, past in found.items() if past} == {}


def test_an_import_past_the_faces_would_be_noticed(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/one.py").write_text("from rp_engine import Engine\nfrom rp_engine.engine.runs import Runs\n")
    (tmp_path / "src/two.py").write_text("import rp_engine.engine.runs\n")

    found = past_the_faces(tmp_path)

    assert found == {"rp_engine.engine.runs": {"Runs", ""}}
