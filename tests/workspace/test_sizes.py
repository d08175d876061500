"""No package outgrows its bound: what does not fit belongs in another one, as docs/architecture.md says."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
# Lines of code, as `scripts/sizes` counts them.
MOST = {
    "rp-core": 3_000,
    "rp-engine": 14_000,
    "rp-trainer": 4_000,
    "rp-checkpoint": 3_000,
    "rp-machines": 2_000,
    "rp-cli": 5_000,
    "rp-estimate": 3_500,
    "rp-export": 1_500,
    "rp-adapters": 1_000,
    "rp-reports": 1_000,
    "rp-sources": 1_000,
}


def script(name: str) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "scripts" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    # Dataclasses look their module up.
    sys.modules[name] = module
    loader.exec_module(module)
    return module


SIZES = script("sizes")


@pytest.mark.parametrize(("package", "most"), MOST.items())
def test_a_package_is_within_its_bound(package: str, most: int) -> None:
    assert 0 < SIZES.size_of(ROOT / "packages" / package).lines <= most


def test_docstrings_are_no_lines_of_code_but_comments_and_other_texts_are() -> None:
    text = '"""Module.\n\nMore.\n"""\n\nX = """a\nb"""\n\n\ndef f():\n    """One."""\n    # Why.\n    return X\n'

    assert SIZES.lines_of_code(text) == 8
