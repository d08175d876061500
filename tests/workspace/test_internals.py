"""docs/internals.md names real places in the code: every file and every name in it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/internals.md").read_text()
PACKAGES = {path.name: path for path in ROOT.glob("packages/*/src/*") if path.is_dir()}
NAMES = sorted(
    {name for name in re.findall(r"`([\w.]+)`", TEXT) if name.split(".")[0] in PACKAGES and "." in name}
)
LINKED = [path for path in (ROOT / "README.md", ROOT / "docs/architecture.md") if path.is_file()]


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def defined(scope: ast.AST, name: str) -> ast.AST | None:
    """What a module or class calls so: a function, a class, or something assigned, in a class by any method."""
    for node in ast.walk(scope) if isinstance(scope, ast.ClassDef) else ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if name in [ast.unparse(target).removeprefix("self.") for target in targets]:
                return node
    return None


def exists(name: str) -> bool:
    package, *path = name.split(".")
    place = PACKAGES[package]
    while path and (place / path[0]).is_dir():
        place /= path.pop(0)
    file = place / f"{path.pop(0)}.py"
    found: ast.AST | None = tree(file) if file.is_file() else None
    for part in path:
        found = None if found is None else defined(found, part)
    return found is not None


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_in_the_code(name: str) -> None:
    assert exists(name)


def test_a_name_that_is_not_there_would_be_noticed() -> None:
    wrong = [
        "roundpipe.stages.Stage",
        "rp_engine.execution.stage.stage.Stages",
        "rp_engine.execution.stage.stage.Stage.runs",
    ]
    assert [name for name in wrong if exists(name)] == []
    assert len(NAMES) > 100


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)", TEXT)
    assert links
    assert all((ROOT / "docs" / link).is_file() for link in links)


@pytest.mark.parametrize("file", LINKED, ids=lambda file: file.name)
def test_the_page_is_linked(file: Path) -> None:
    assert "internals.md" in file.read_text()
