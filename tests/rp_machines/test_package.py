"""The package: its examples, its names, and that nothing but several machines needs it."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import rp_engine.peers.opening
import rp_machines
from processes import told
from rp_engine import Runtime
from rp_engine.errors import RoundPipeError

MODULES = [module.name for module in pkgutil.walk_packages(rp_machines.__path__, "rp_machines.")]
README = Path(__file__).parents[2] / "packages" / "rp-machines" / "README.md"


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_the_docstrings_run(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS).failed == 0


def test_every_public_name_is_there() -> None:
    assert all(hasattr(rp_machines, name) for name in rp_machines.__all__)


def test_the_readmes_example_runs_on_one_machine() -> None:
    assert doctest.testfile(str(README), module_relative=False).failed == 0


def test_the_readmes_example_runs_on_two_machines() -> None:
    program = f"""
import doctest
found = doctest.testfile({str(README)!r}, module_relative=False)
tell([found.failed, found.attempted > 0, "rp_machines" in sys.modules])
"""

    assert told(program, 2) == [[0, True, True]] * 2


@pytest.mark.later
def test_one_machine_alone_brings_none_of_it() -> None:
    program = """
import sys
from roundpipe import Runtime
with Runtime("cpu") as runtime:
    print(runtime.group, runtime.peers.size, sorted({"rp_dist", "rp_machines"} & set(sys.modules)))
"""

    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert found == "None 1 []\n"


@pytest.mark.parametrize("machines", [True, None])
def test_without_it_several_machines_are_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, machines: bool | None
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rp_engine.peers.opening, "entry_points", lambda **_: ())

    with pytest.raises(RoundPipeError, match="pip install rp-machines"):
        Runtime("cpu", machines=machines)


def test_without_it_one_of_several_processes_may_work_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rp_engine.peers.opening, "entry_points", lambda **_: ())

    with Runtime("cpu", machines=False) as runtime:
        assert runtime.peers.is_alone
