"""The package: its examples, and its names."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest
import rp_reports

MODULES = [module.name for module in pkgutil.walk_packages(rp_reports.__path__, "rp_reports.")]
PACKAGE = Path(__file__).parents[2] / "packages" / "rp-reports"


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_the_docstrings_run(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS).failed == 0


def test_every_public_name_is_there() -> None:
    assert all(hasattr(rp_reports, name) for name in rp_reports.__all__)


def test_the_readmes_example_runs() -> None:
    assert doctest.testfile(str(PACKAGE / "README.md"), module_relative=False).failed == 0
