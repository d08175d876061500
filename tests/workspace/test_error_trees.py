"""The trees of exceptions in the docstrings of errors modules are those of the classes."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

MODULES = sorted(
    f"{path.parent.name}.errors"
    for path in Path(__file__).parents[2].glob("packages/*/src/*/errors.py")
    if "├──" in path.read_text()
)
LINE = re.compile(r"( *)(?:[├└]── )?([\w.]+)(?: +\((?:a )?(\w+)\))?(?: {2,}\S.*)?")


def told(docstring: str) -> dict[str, set[str]]:
    """The names of the classes in a tree, with those of the bases that it tells."""
    tree = docstring.expandtabs().partition("\n\n")[2].replace("::\n\n", "").splitlines()
    found: dict[str, set[str]] = {}
    above: list[tuple[int, str]] = []
    for line in filter(str.strip, tree):
        match = LINE.fullmatch(line)
        assert match is not None, f"no line of a tree: {line!r}"
        column, name = match.start(2), match[2].rpartition(".")[2]
        above = [each for each in above if each[0] < column]
        found[name] = {base for base in (match[3], above[-1][1] if above else None) if base}
        above.append((column, name))
    return found


def own(module: ModuleType) -> dict[str, set[str]]:
    """The classes of a module, with all their bases."""
    return {
        name: {base.__name__ for base in made.__mro__[1:]}
        for name, made in inspect.getmembers(module, inspect.isclass)
        if made.__module__ == module.__name__
    }


@pytest.mark.parametrize("name", MODULES)
def test_the_tree_has_every_class_under_its_base(name: str) -> None:
    module = importlib.import_module(name)

    tree, classes = told(module.__doc__ or ""), own(module)

    assert classes.keys() <= tree.keys()
    assert [name for name in classes if not tree[name] <= classes[name]] == []


def test_a_tree_that_was_wrapped_like_a_sentence_would_be_noticed() -> None:
    wrapped = (
        "Errors.\n\n::\n\n    One (RuntimeError)\n    └── Other   is wrong Third (ValueError)\n    of words\n"
    )

    assert len(MODULES) > 6
    with pytest.raises(AssertionError, match="no line of a tree"):
        told(wrapped)
