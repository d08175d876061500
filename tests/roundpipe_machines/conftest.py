"""Several processes of one machine stand for several machines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Test files are imported one by one; what they share lies beside them.
sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Four processes on two busy cores take their time; what hangs ends by the machines' own limits."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(300))
