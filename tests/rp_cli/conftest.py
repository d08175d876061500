"""Guards that the tests of the command line share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from roundpipe import Runtime
from rp_cli.finetune import forecast, run
from rp_estimate.machine.hardware import Machine, measured

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail as soon as a model would be made: whatever is refused must be refused before that."""

    def refuse(*_: object) -> NoReturn:
        pytest.fail("a model was about to be made")

    monkeypatch.setattr(run, "wrapped", refuse)


@pytest.fixture(scope="session")
def machines() -> dict[str, Machine]:
    return {}


@pytest.fixture
def measured_once(monkeypatch: pytest.MonkeyPatch, machines: dict[str, Machine]) -> None:
    """Measure the machine once, for all fine-tunings: that takes a second."""

    def known(runtime: Runtime, dtype: torch.dtype) -> Machine:
        devices = f"{len(runtime.lanes)} {dtype}"
        if devices not in machines:
            machines[devices] = measured(runtime, dtype)
        return machines[devices]

    monkeypatch.setattr(forecast, "measured", known)
