"""Every call that loads by a folder's configuration says whether the folder's code is trusted."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[2] / "packages"
LOADERS = frozenset({"from_pretrained", "from_config"})
# It has no code of its own: `trust_remote_code` would become one of its settings.
WITHOUT_CODE = "GenerationConfig"
# What would run code or unpickle: none of it is needed.
NEVER = frozenset({"pipeline", "load_custom_generate", "get_class_from_dynamic_module", "load_dataset"})
# The one place that refuses versions of datasets that run code (tests/rp_cli/test_names.py).
WITHOUT_SCRIPTS = {"rp-sources/src/rp_sources/data_sets.py": "load_dataset"}


def files() -> list[Path]:
    return sorted(PACKAGES.glob("*/src/**/*.py"))


def calls(source: str) -> Iterator[tuple[str, ast.Call]]:
    """The name of what is called, and the call."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            yield name, node


def untrusting(source: str) -> list[int]:
    """The lines of the calls of loaders that leave the question of trust open, or say yes."""
    found = []
    for name, call in calls(source):
        # `from_pretrained` without an object is RoundPipe's own, for which no is the default.
        if name not in LOADERS or not isinstance(call.func, ast.Attribute):
            continue
        given = [keyword.value for keyword in call.keywords if keyword.arg == "trust_remote_code"]
        is_left_open = not given or (isinstance(given[0], ast.Constant) and given[0].value is not False)
        if is_left_open and WITHOUT_CODE not in ast.unparse(call.func):
            found.append(call.lineno)
    return found


def test_every_call_of_a_loader_in_the_packages_says_that_code_is_not_trusted() -> None:
    found = {str(path.relative_to(PACKAGES)): untrusting(path.read_text()) for path in files()}

    assert {path: lines for path, lines in found.items() if lines} == {}
    assert sum(name in LOADERS for path in files() for name, _ in calls(path.read_text())) > 10


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("loader.from_pretrained(folder)", [1]),
        ("\nAutoModel.from_config(config, trust_remote_code=True)", [2]),
        ("loader.from_pretrained(folder, trust_remote_code=None)", [1]),
        ("loader.from_pretrained(folder, **options)", [1]),
        ("loader.from_pretrained(folder, trust_remote_code=False)", []),
    ],
)
def test_a_call_that_leaves_trust_open_is_found(source: str, lines: list[int]) -> None:
    assert untrusting(source) == lines


def test_nothing_in_the_packages_unpickles_or_runs_what_a_folder_names() -> None:
    found = [
        f"{path.relative_to(PACKAGES)}:{call.lineno}"
        for path in files()
        for name, call in calls(path.read_text())
        if (name in NEVER and WITHOUT_SCRIPTS.get(str(path.relative_to(PACKAGES))) != name)
        or ast.unparse(call.func) in ("torch.load", "pickle.load", "pickle.loads", "joblib.load")
    ]

    assert found == []
