"""Trainers on two virtual CPU devices, which say nothing to the network."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from roundpipe import RoundPipeRunConfig, Runtime
from rp_trainer import RoundPipeOptions

# Test files are imported one by one; what they share lies beside them.
sys.path.insert(0, str(Path(__file__).parent))


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
def options(two: Runtime) -> RoundPipeOptions:
    """Synchronous steps, two microbatches a call."""
    return RoundPipeOptions(runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=2))
