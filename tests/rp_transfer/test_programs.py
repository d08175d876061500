"""The suite itself: what it takes for an order, and whether it sees a backend that is wrong."""

from __future__ import annotations

import threading

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_transfer import CpuBackend, NotConforming
from rp_transfer.cpu.streams import CpuEvent, CpuStream
from rp_transfer.testing import (
    check,
    check_caught,
    check_closing,
    check_program,
    check_promises,
    hazards,
    needed_waits,
    random_program,
    run_in_order,
    run_on,
    without,
)
from rp_transfer.testing.contract import PROMISES
from rp_transfer.testing.programs import (
    Allocate,
    Copy,
    Free,
    MemoryRange,
    Program,
    Read,
    Record,
    Step,
    StreamName,
    Wait,
    Write,
)
from rp_transfer.testing.timeout import bounded

SEEDS = st.integers(0, 2**32 - 1)
IN, OUT = StreamName(0, "weights_in"), StreamName(0, "results_out")
HERE, THERE, BACK = MemoryRange("h", 0, 4), MemoryRange("d", 0, 4), MemoryRange("r", 0, 4)

UP_AND_DOWN = Program(
    1,
    torch.float32,
    (
        Allocate("h", 4, None),
        Allocate("r", 4, None),
        Allocate("d", 4, IN),
        Write(HERE, 5),
        Copy(IN, THERE, HERE),
        Record(IN, "e"),
        Wait(OUT, "e"),
        Copy(OUT, BACK, THERE),
        Record(OUT, "f"),
        Wait(None, "f"),
        Read(BACK),
        Free("d"),
    ),
)
WAITS = (6, 9)


def test_a_program_means_what_its_steps_do_in_order() -> None:
    assert run_in_order(UP_AND_DOWN) == [[5, 6, 7, 8]]
    check_program(CpuBackend(1), UP_AND_DOWN)


def test_both_waits_of_a_round_trip_are_needed() -> None:
    assert hazards(UP_AND_DOWN) == []
    assert needed_waits(UP_AND_DOWN) == list(WAITS)


def test_a_wait_that_another_implies_is_not_needed() -> None:
    twice = Program(1, torch.float32, UP_AND_DOWN.steps[:7] + UP_AND_DOWN.steps[6:])
    assert needed_waits(twice) == [10]


@given(seed=SEEDS, devices=st.integers(1, 3))
@settings(max_examples=examples(60), deadline=None)
def test_random_programs_have_no_hazard_and_some_needed_waits(seed: int, devices: int) -> None:
    program = random_program(seed, devices)
    assert hazards(program) == []
    assert all(isinstance(program.steps[index], Wait) for index in needed_waits(program))


def test_random_programs_are_rich_enough_to_catch_much() -> None:
    programs = [random_program(seed, 2) for seed in range(30)]
    assert sum(len(needed_waits(program)) for program in programs) > 8 * len(programs)
    assert sum(len(needed_waits(program)) < _waits(program) for program in programs) > 5


def _waits(program: Program) -> int:
    return sum(isinstance(step, Wait) for step in program.steps)


@given(seed=SEEDS, data=st.data())
@settings(max_examples=examples(30), deadline=None)
def test_hazards_agree_with_a_search_for_paths(seed: int, data: st.DataObject) -> None:
    # The slow truth: a graph of steps, searched again for each two uses that conflict.
    program = random_program(seed, 2, length=12)
    waits = [index for index, step in enumerate(program.steps) if isinstance(step, Wait)]
    program = without(program, data.draw(st.sampled_from(waits)))
    conflicts = _conflicts(program)
    found = {(hazard.earlier, hazard.later) for hazard in hazards(program)}
    assert found & conflicts == {pair for pair in conflicts if not _leads(_edges(program), *pair)}


def _conflicts(program: Program) -> set[tuple[int, int]]:
    uses = [(index, use) for index, step in enumerate(program.steps) for use in _uses(step)]
    return {
        (one, two)
        for one, (piece, write) in uses
        for two, (other, writes) in uses
        if one < two and piece.overlaps(other) and (write or writes)
    }


def _uses(step: Step) -> list[tuple[MemoryRange, bool]]:
    reads = [getattr(step, "source", None), *getattr(step, "sources", ())]
    writes = [getattr(step, "destination", None)]
    (writes if isinstance(step, Write) else reads).append(getattr(step, "piece", None))
    return [(piece, False) for piece in reads if piece] + [(piece, True) for piece in writes if piece]


def _edges(program: Program) -> dict[int, set[int]]:
    after: dict[int, set[int]] = {index: set() for index in range(len(program.steps))}
    lanes = [getattr(step, "lane", None) for step in program.steps]
    records = {step.event: index for index, step in enumerate(program.steps) if isinstance(step, Record)}
    for index, step in enumerate(program.steps):
        # What the host has done or seen is over for everything it puts on any stream after that.
        after[index] |= {later for later in after if later > index and lanes[index] in (None, lanes[later])}
        if isinstance(step, Wait):
            after[records[step.event]].add(index)
    return after


def _leads(after: dict[int, set[int]], one: int, two: int) -> bool:
    seen: set[int] = set()
    todo = [one]
    while todo:
        todo += after[todo.pop()] - seen
        seen |= {*todo}
    return two in seen


@pytest.mark.parametrize("index", WAITS)
def test_a_program_with_a_hazard_is_no_program_for_the_suite(index: int) -> None:
    with pytest.raises(NotConforming, match="Unordered"):
        check_program(CpuBackend(1), without(UP_AND_DOWN, index))


def test_a_failure_prints_the_seed_and_the_program() -> None:
    backend = CpuBackend(1)
    backend.close()
    with pytest.raises(NotConforming, match=r"seed 3 .*\n(.*\n)*  0  "):
        check(backend, [3])


def test_a_program_for_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 2 devices, but the backend has 1"):
        run_on(CpuBackend(1), random_program(0, 2))


def nothing(*_: object) -> None:
    """What a backend does that forgot."""


def test_a_backend_that_forgets_waits_is_found_by_running_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuStream, "wait", nothing)
    with pytest.raises(NotConforming):
        check(CpuBackend(2, strict=False), range(20))


def test_a_backend_whose_events_end_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuEvent, "synchronize", nothing)
    with pytest.raises(NotConforming):
        check_promises(CpuBackend(1))


def test_a_backend_that_checks_nothing_does_not_catch_everything() -> None:
    with pytest.raises(NotConforming, match="without step"):
        check_caught(lambda: CpuBackend(2, strict=False), range(20))


def test_a_backend_that_stays_open_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "close", nothing)
    with pytest.raises(NotConforming, match="must raise Closed, but raised nothing"):
        check_closing(CpuBackend(1))


def test_a_call_that_hangs_is_given_up() -> None:
    never = threading.Event()
    with pytest.raises(NotConforming, match="still hangs"):
        bounded(never.wait, seconds=0.05)
    never.set()


def test_every_promise_says_what_it_is() -> None:
    assert all(promise.__doc__ for promise in PROMISES)
