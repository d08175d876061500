"""A call that runs out of device memory goes on in smaller parts, with the same numbers, or says that nothing fits."""

from __future__ import annotations

import warnings

import pytest
import torch
from plain import assert_near
from roundpipe import DeviceMemoryWarning, Runtime
from shortages import KINDS, PLENTY, Kind, Trap, held, trapped, training

pytestmark = pytest.mark.timeout(600)


def open_runtime(kind: Kind, limit: int = PLENTY) -> Runtime:
    return Runtime(f"cpu:{kind.devices}", device_memory_bytes=limit)


def check_points(monkeypatch: pytest.MonkeyPatch, kind: Kind, first: int, step: int) -> int:
    """Fail at every `step`th allocation of a second call; returns how many calls ran out."""
    with open_runtime(kind) as runtime:
        _, wanted = training(kind, runtime)
    nth, shortages = first, 0
    while True:
        with open_runtime(kind) as runtime, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", DeviceMemoryWarning)
            calls = training(kind, runtime)
            next(calls)
            before = held(runtime)
            trap = Trap(nth)
            with trapped(monkeypatch, trap):
                found = next(calls)
            assert held(runtime) == before
        assert_near(found, wanted, kind.tolerance, f"allocation {nth}")
        told = [one for one in told if one.category is DeviceMemoryWarning]
        assert len(told) <= 1, "one warning says what happened"
        shortages += len(told)
        if trap.seen < nth:
            return shortages
        nth += step


@pytest.mark.parametrize("name", KINDS)
def test_a_call_whose_allocations_fail_twice_in_a_row_has_the_numbers_of_an_undisturbed_one(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert check_points(monkeypatch, KINDS[name], 2, 23) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", KINDS)
def test_any_allocation_of_any_kind_of_call_may_fail_twice_in_a_row(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert check_points(monkeypatch, KINDS[name], 1, 1) > 10
