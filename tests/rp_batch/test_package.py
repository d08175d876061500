"""The package stands alone, loads little, and what its documents show is true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest
import rp_batch
from programs import TORCH, ended

PACKAGE = Path(__file__).parents[2] / "packages" / "rp-batch"
MODULES = sorted(module.name for module in pkgutil.iter_modules(rp_batch.__path__, "rp_batch."))


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_true(name: str):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_readme_is_true():
    assert doctest.testfile(str(PACKAGE / "README.md"), module_relative=False).failed == 0


def test_every_public_thing_has_an_example():
    classes = {rp_batch.SpecError, rp_batch.SizeError, rp_batch.SplitError, rp_batch.MergeError}
    silent = classes | {rp_batch.FewerParts, rp_batch.Inferred}  # shown by BatchError, split and infer
    offered = [getattr(rp_batch, name) for name in rp_batch.__all__]
    assert [thing for thing in offered if thing not in silent and ">>>" not in (thing.__doc__ or "")] == []


def test_only_one_file_knows_optree():
    knowing = [
        path.name for path in (PACKAGE / "src" / "rp_batch").glob("*.py") if "import optree" in path.read_text()
    ]
    assert knowing == ["tree.py"]


@pytest.mark.slow
def test_importing_loads_neither_siblings_nor_transformers_nor_pipelining():
    code = "import sys, rp_batch; print(*{name.partition('.')[0] for name in sys.modules}, *sys.modules)"
    status, modules, complaints = ended(code, imports=TORCH)
    unwanted = {"roundpipe", "rp_optim", "rp_presets", "rp_sched", "rp_transfer", "transformers", "cupy"}
    assert not (unwanted | {"torch.distributed.pipelining"}) & set(modules.split())
    assert (status, complaints) == (0, "")
