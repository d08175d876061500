"""The package as a whole: importing it opens nothing, and its examples run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import rp_transfer
from programs import TORCH, ended

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(rp_transfer.__path__, "rp_transfer.")
    if not module.name.startswith("rp_transfer.cuda.backend")
)

IMPORT = """
import sys, threading
import torch
before = set(sys.modules)
import rp_transfer, rp_transfer.testing
assert not torch.cuda.is_initialized(), "a CUDA context is open"
assert "cupy" not in sys.modules, "CuPy is imported"
assert threading.active_count() == 1, "a thread runs"
tools = {name.split(".")[0] for name in set(sys.modules) - before} & {"pytest", "hypothesis", "numpy", "optree"}
assert not tools, f"{tools} are imported"
"""


@pytest.mark.slow
def test_importing_opens_no_device_no_thread_and_no_cupy() -> None:
    assert ended(IMPORT, imports=TORCH) == (0, "", "")


@pytest.mark.parametrize("name", ["rp_transfer", *MODULES])
def test_the_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


def test_there_are_examples() -> None:
    modules = [importlib.import_module(name) for name in MODULES]
    assert sum(doctest.testmod(module).attempted for module in modules) > 30


def test_what_the_package_exports_is_there() -> None:
    assert all(hasattr(rp_transfer, name) for name in rp_transfer.__all__)
    assert rp_transfer.__all__ == sorted(rp_transfer.__all__)
