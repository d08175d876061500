"""Trainers on two virtual CPU devices, which say nothing to the network."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from roundpipe import RoundPipeRunConfig, Runtime

# Test files are imported one by one; what they share lies beside them.
sys.path.insert(0, str(Path(__file__).parent))


def _are_here(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)


# A machine that only runs the engine may lack these.
collect_ignore: list[str] = []
if not _are_here("trl", "datasets", "peft"):
    collect_ignore += ["test_trl.py", "test_refusals.py", "test_without_the_adapter.py"]
if not _are_here("lightning"):
    collect_ignore += ["test_lightning.py", "test_lightning_hooks.py"]
if not _are_here("accelerate"):
    collect_ignore += [path.name for path in Path(__file__).parent.glob("test_*.py")]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL reports what is trained, unless it is told not to."""
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "TQDM_DISABLE", "CI"):
        monkeypatch.setenv(name, "1")


@pytest.fixture
def two() -> Iterator[Runtime]:
    """A runtime on two CPU devices."""
    with Runtime("cpu:2") as opened:
        yield opened


@pytest.fixture
def options(two: Runtime) -> Any:
    """Synchronous steps, two microbatches a call."""
    from rp_trainer import RoundPipeOptions

    return RoundPipeOptions(runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=2))
