"""The package stands alone, and what its documents show is true."""

import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import rp_sched

MODULES = sorted(module.name for module in pkgutil.walk_packages(rp_sched.__path__, "rp_sched."))
README = Path(__file__).parents[2] / "packages" / "rp-sched" / "README.md"
NEW_MODULES = "import sys; before = set(sys.modules); import rp_sched; print(*set(sys.modules) - before)"


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_true(name: str):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_readme_is_true():
    assert doctest.testfile(str(README), module_relative=False).failed == 0


def test_importing_the_package_loads_the_standard_library_alone():
    ran = subprocess.run(
        [sys.executable, "-c", NEW_MODULES], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = {name.partition(".")[0] for name in ran.stdout.split()}
    assert loaded - sys.stdlib_module_names == {"rp_sched"}


def test_every_name_that_is_offered_exists():
    assert all(hasattr(rp_sched, name) for name in rp_sched.__all__)
    assert callable(rp_sched.plan), "the function, not the module of the same name"
