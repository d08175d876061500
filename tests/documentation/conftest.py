"""Pages and examples run on two CPU devices, in an empty folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from roundpipe import Runtime

# What pages and tests share lies beside them.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Runtime]:
    """The runtime that models take by default, and the folder that files are written to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROUNDPIPE_DEVICES", "cpu:2")
    with Runtime("cpu:2") as runtime:
        monkeypatch.setattr("rp_engine.runtime.runtime._default", [runtime])
        yield runtime
