"""Every test of the engine runs on one, two and four CPU devices, and on CUDA devices where there are some."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from roundpipe import Runtime
from torch import nn

# Test files are imported one by one; what they share lies beside them.
sys.path.insert(0, str(Path(__file__).parent))

DEVICES = ["cpu:1", "cpu:2", "cpu:4", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=DEVICES)
def devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device string."""
    if request.param == "cuda":
        # What is compared with the CPU is computed in fp32 there, too: cuDNN would use TF32.
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return request.param


@pytest.fixture
def runtime(devices: str) -> Iterator[Runtime]:
    """A runtime on these devices."""
    with Runtime(devices) as opened:
        yield opened


@pytest.fixture(scope="module")
def small_departures() -> Iterator[None]:
    """Gradients of small layers leave one by one while backward goes on, as those of large ones do.

    For files that compare numbers or look at gradients while they leave: `pytest.mark.usefixtures`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rp_engine.execution.stage.backpropagation._DEPARTURE_BYTES", 1)
        yield


@pytest.fixture
def two() -> Iterator[Runtime]:
    """A runtime on two CPU devices, for tests that say nothing new on other devices."""
    with Runtime("cpu:2") as opened:
        yield opened


@pytest.fixture
def samples_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models say that samples come first, as rows of rp_presets do, so a call does not try how it can be split.

    For tests that count what layers do, or let them fail, in a certain call.
    """
    monkeypatch.setattr(nn.Module, "main_arguments", ("samples",), raising=False)
