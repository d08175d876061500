"""Tests that run once on every kernel that this machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import rp_optim


@pytest.fixture(params=rp_optim.available_kernels())
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each kernel in turn, in use."""
    before = rp_optim.kernel_in_use()
    rp_optim.use_kernel(request.param)
    yield request.param
    rp_optim.use_kernel(before)
