"""What the tests of all packages share: those that need a GPU skip themselves where there is none."""

from __future__ import annotations

import importlib.util

import pytest


def cuda_is_here() -> bool:
    """Whether torch sees a CUDA device; asked only when a test needs one, since some packages do without torch."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``cuda`` without a CUDA device."""
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if marked and not cuda_is_here():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
