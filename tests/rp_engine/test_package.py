"""The package: its examples, its names, and what it does without."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import rp_engine

MODULES = [module.name for module in pkgutil.walk_packages(rp_engine.__path__, "rp_engine.")]
PACKAGE = Path(__file__).parents[2] / "packages" / "rp-engine"


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_the_docstrings_run(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS).failed == 0


def test_every_public_name_is_there() -> None:
    assert all(hasattr(rp_engine, name) for name in rp_engine.__all__)


def test_the_readmes_example_runs() -> None:
    assert doctest.testfile(str(PACKAGE / "README.md"), module_relative=False).failed == 0


@pytest.mark.slow
def test_importing_it_brings_neither_the_core_nor_presets_nor_a_thread() -> None:
    program = """
import sys, threading, rp_engine
found = {name.partition(".")[0] for name in sys.modules}
print(sorted(found & {"roundpipe", "rp_presets", "transformers", "cupy"}), threading.active_count())
"""

    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert told == "[] 1\n"
