"""The conformance suite on every backend there is here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_transfer import Backend, CpuBackend, open_backend
from rp_transfer.testing import (
    check,
    check_caught,
    check_closing,
    check_promises,
    hazards,
    needed_waits,
    random_program,
    run_in_order,
    run_on,
    without,
)
from rp_transfer.testing.programs import Free

SEEDS = st.integers(0, 2**32 - 1)
COUNTS = pytest.mark.parametrize("count", [1, 2, 4])


@COUNTS
@settings(max_examples=examples(120), deadline=None)
@given(seed=SEEDS)
def test_random_programs_on_cpu_devices_equal_the_programs_run_in_order(count: int, seed: int) -> None:
    check(CpuBackend(count), [seed])


@COUNTS
@settings(max_examples=examples(20), deadline=None)
@given(seed=SEEDS)
def test_long_programs_on_one_backend_one_after_another_stay_right(count: int, seed: int) -> None:
    check(CpuBackend(count), range(seed, seed + 2), length=60)


@COUNTS
@settings(max_examples=examples(35), deadline=None)
@given(seed=SEEDS)
def test_no_needed_wait_can_be_taken_away_unseen(count: int, seed: int) -> None:
    check_caught(lambda: CpuBackend(count), [seed])


@settings(max_examples=examples(50), deadline=None)
@given(seed=SEEDS)
def test_programs_are_right_without_the_checks_too(seed: int) -> None:
    check(CpuBackend(2, strict=False), [seed])


@settings(max_examples=examples(20), deadline=None)
@given(seed=SEEDS, unit=st.integers(2, 5))
def test_programs_are_right_in_larger_units(seed: int, unit: int) -> None:
    check(CpuBackend(2), [seed], unit=unit)


@pytest.mark.parametrize("strict", [True, False])
@COUNTS
def test_cpu_devices_keep_every_promise(count: int, strict: bool) -> None:
    backend = CpuBackend(count, strict=strict)
    check_promises(backend)
    check_closing(backend)


@pytest.fixture
def cuda() -> Iterator[Backend]:
    backend = open_backend("cuda")
    yield backend
    backend.close()


@pytest.mark.cuda
def test_random_programs_on_cuda_devices_equal_the_programs_run_in_order(cuda: Backend) -> None:
    check(cuda, range(300))
    check(cuda, range(20), length=200)
    check(cuda, range(20), unit=1 << 20)


@pytest.mark.cuda
def test_large_units_let_a_gpu_show_that_a_wait_is_missing(cuda: Backend) -> None:
    # Else a backend that loses waits would pass: small copies are over before anybody looks.
    seen = 0
    for seed in range(8):
        program = random_program(seed, 1)
        wrong = [without(program, index) for index in needed_waits(program)]
        # What frees memory in use may bring a real device down.
        harmless = [p for p in wrong if not any(isinstance(p.steps[h.later], Free) for h in hazards(p))]
        seen += sum(run_on(cuda, program, unit=1 << 20) != run_in_order(program) for program in harmless)
    assert seen > 0


@pytest.mark.cuda
def test_cuda_devices_keep_every_promise(cuda: Backend) -> None:
    check_promises(cuda)
    check_closing(cuda)
