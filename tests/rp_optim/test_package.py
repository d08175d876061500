"""The package: its examples, its names, and the wheel that it becomes."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import rp_optim
from rp_optim.kernels import build
from rp_optim.kernels.native import Library

MODULES = [
    module.name for module in pkgutil.walk_packages(rp_optim.__path__, "rp_optim.") if "._" not in module.name
]
PACKAGE = Path(__file__).parents[2] / "packages" / "rp-optim"


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_the_docstrings_run(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_every_public_name_is_there_and_every_error_is_public() -> None:
    assert all(hasattr(rp_optim, name) for name in rp_optim.__all__)
    errors = {name for name in vars(rp_optim.errors) if name[0].isupper()}
    assert errors <= set(rp_optim.__all__)
    assert all(issubclass(getattr(rp_optim, name), rp_optim.OptimError) for name in errors)


def test_the_readmes_example_runs() -> None:
    text = (PACKAGE / "README.md").read_text()
    blocks = [part.split("```")[0] for part in text.split("```python\n")[1:]]
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


# scripts/try-wheels, which .ci/run starts, uses the library of a wheel.
@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("uv") is None, reason="wheels are built with uv")
def test_the_wheel_has_the_library(tmp_path: Path) -> None:
    command = ["uv", "build", "--wheel", "--out-dir", str(tmp_path), str(PACKAGE)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=110)
    if "Failed to resolve requirements from `build-system.requires`" in built.stderr:
        pytest.skip("the build's requirements cannot be had here")
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    # One platform, any Python on it.
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {"rp_optim/kernels/_kernels.so", "rp_optim/kernels/csrc/kernels.c", "rp_optim/py.typed"} <= set(
            archive.namelist()
        )
        library = Library(Path(archive.extract("rp_optim/kernels/_kernels.so", tmp_path)), build.source_hash())
    assert "scalar" in library.variants()
