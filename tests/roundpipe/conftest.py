"""Every test of the engine runs on one, two and four CPU devices, and on CUDA devices where there are some."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from roundpipe import Runtime

# Test files are imported one by one; what they share lies beside them.
sys.path.insert(0, str(Path(__file__).parent))

DEVICES = ["cpu:1", "cpu:2", "cpu:4", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=DEVICES)
def devices(request: pytest.FixtureRequest) -> str:
    """A device string."""
    return request.param


@pytest.fixture
def runtime(devices: str) -> Iterator[Runtime]:
    """A runtime on these devices."""
    with Runtime(devices) as opened:
        yield opened


@pytest.fixture(autouse=True)
def full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared with the CPU is computed in fp32 there, too: cuDNN would use TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(autouse=True)
def small_departures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of small layers leave one by one while backward goes on, as those of large ones do."""
    monkeypatch.setattr("roundpipe.execution.stage.backpropagation._DEPARTURE_BYTES", 1)


@pytest.fixture
def two() -> Iterator[Runtime]:
    """A runtime on two CPU devices, for tests that say nothing new on other devices."""
    with Runtime("cpu:2") as opened:
        yield opened
