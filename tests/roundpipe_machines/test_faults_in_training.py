"""A machine dies, stops or is late at any moment of a training: what the others see, and how training goes on."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from machine_faults import AT, PHASES, TIMEOUT_S
from on_machines import IMPORTS
from processes import Ranks, ranks

# Of machines that are busy with other tests.
LATE_S = 4.0
PLAIN = {"is_async": False, "double_buffer": False}
OVERLAPPED = {"is_async": True, "double_buffer": True}
_PROGRAM = "from machine_faults import take_part\ntake_part(tell, **OPTIONS)\n"


def _ranks(size: int, **options: Any) -> Any:
    return ranks(_PROGRAM.replace("OPTIONS", repr(options)), size, imports=IMPORTS)


def _trained(size: int, **options: Any) -> list[dict[str, Any]]:
    """What each machine tells of a training without faults."""
    with _ranks(size, **options) as running:
        found = running.hear_all()
        assert [status for status, _ in running.ended()] == [0] * size
    assert [each["error"] for each in found] == [None] * size
    return found


@cache
def _truth(size: int, is_async: bool, double_buffer: bool) -> dict[str, Any]:
    """A training that nothing disturbs."""
    with TemporaryDirectory() as folder:
        return _trained(size, folder=folder, is_async=is_async, double_buffer=double_buffer)[0]


def _check_survivor(found: dict[str, Any], lost: int, truth: dict[str, Any]) -> None:
    kind, _, text = found["error"]
    # A call that comes while the step is failing tells of the step's error.
    assert kind in ("MachineLost", "StepFailed"), text
    # Where machines open, nobody can tell who of those that live is late.
    assert f"rank {lost} is lost" in text or "it did not open within" in text
    assert found["losses"] == truth["losses"][: len(found["losses"])]
    # Weights are those that some step has left, or cannot be read.
    for said in found["left"]:
        assert said in (*truth["read"], *truth["results"]) or str(said).startswith(
            ("MachineLost", "StepFailed")
        ), said


def check_fault(
    folder: Path, phase: str, fault: str, lost: int, size: int = 2, after: int = 0, **how: bool
) -> None:
    truth = _truth(size, **how)
    # Who is late has its time, except where machines open.
    is_lost = fault != "late" or phase == "opening"
    others = [rank for rank in range(size) if rank != lost]
    with _ranks(size, folder=str(folder), phase=phase, fault=fault, lost=lost, **how) as running:
        assert running.hear(lost) == "now"
        begin = time.monotonic()
        for rank in others:
            found = running.hear(rank)
            if is_lost:
                assert time.monotonic() - begin < TIMEOUT_S + LATE_S
                _check_survivor(found, lost, truth)
            else:
                assert found == truth
        if is_lost and fault != "killed":
            _check_given_up(running, lost, truth)
        _check_ends(running, others if fault == "killed" else range(size))
    if is_lost:
        _check_resumed(folder, truth, 0 if phase == "opening" else AT, size, after or size, how)


def _check_given_up(running: Ranks, lost: int, truth: dict[str, Any]) -> None:
    """One that was stopped learns that it was given up."""
    running.send(lost, signal.SIGCONT)
    found = running.hear(lost)
    if found["error"] is None:
        # Only where there was nothing to wait for any more.
        assert found["read"] == truth["read"]
    else:
        _check_survivor(found, lost, truth)


def _check_ends(running: Ranks, chosen: Iterable[int]) -> None:
    for rank in chosen:
        status, _, complaints = running.programs[rank].end()
        assert status == 0, complaints


def _check_resumed(
    folder: Path, truth: dict[str, Any], least: int, before: int, after: int, how: dict[str, bool]
) -> None:
    """Training goes on from the last whole checkpoint as if nothing had happened."""
    for found in _trained(after, folder=str(folder), **how):
        first = found["first"]
        assert first >= least
        if after == before:
            assert found["losses"] == truth["losses"][first:]
            assert found["weights"] == truth["weights"]
        else:
            torch.testing.assert_close(found["losses"], truth["losses"][first:], rtol=1e-4, atol=1e-5)
            for weight, true in zip(found["weights"], truth["weights"], strict=True):
                torch.testing.assert_close(torch.tensor(weight), torch.tensor(true), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "fault", "lost"), [("reduction", "killed", 0), ("publication", "stopped", 1)])
def test_the_others_have_a_named_error_and_training_resumes(
    tmp_path: Path, phase: str, fault: str, lost: int
) -> None:
    check_fault(tmp_path, phase, fault, lost, **OVERLAPPED)


@pytest.mark.nightly
@pytest.mark.pairwise
@pytest.mark.parametrize("how", [PLAIN, OVERLAPPED], ids=["plain", "overlapped"])
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("fault", ["killed", "stopped", "late"])
@pytest.mark.parametrize("phase", PHASES)
def test_whatever_the_machines_do(tmp_path: Path, phase: str, fault: str, lost: int, how: dict[str, bool]) -> None:
    check_fault(tmp_path, phase, fault, lost, **how)


@pytest.mark.nightly
@pytest.mark.parametrize("how", [PLAIN, OVERLAPPED], ids=["plain", "overlapped"])
@pytest.mark.parametrize("phase", ["backward", "reduction", "update", "gathering", "checkpoint, the files"])
def test_three_machines_go_on_where_four_have_ended(tmp_path: Path, phase: str, how: dict[str, bool]) -> None:
    check_fault(tmp_path, phase, "killed", 2, size=4, after=3, **how)
