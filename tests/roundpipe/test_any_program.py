"""Random programs give plain PyTorch's numbers, or are refused in words; and the fuzzer notices if they do not."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from typing import Any

import pytest
from fuzzing import night, verdict
from fuzzing.kinds import apart, ends
from fuzzing.night import MOST_INVALID, Judged, by_kind, complaint, judge_all, judge_seed, table
from fuzzing.our_side import Ours, close_runtimes
from fuzzing.program import OPTIMIZERS, SEGMENTS, Op, Program, draw, read
from fuzzing.smaller import smallest
from fuzzing.verdict import judge

pytestmark = pytest.mark.usefixtures("small_departures")

FEW, SOME, MANY = 8, 50, 2000
# A row of two linear layers, trained once.
SMALL = Program(seed=1, family="plain", segments=("linear",), loop=(Op("fb", 4), Op("step"), Op("sync")))


@pytest.fixture(autouse=True, scope="module")
def closed() -> Iterator[None]:
    """Nothing stays open for the tests of other files."""
    yield
    close_runtimes()


def assert_right(found: list[Judged]) -> None:
    """None is wrong, and few have no truth."""
    wrong = [complaint(one) for one in found if one.outcome == "wrong"]
    assert not wrong, "\n".join([*wrong, table(found)])
    invalid = [complaint(one) for one in found if one.outcome == "invalid"]
    assert len(invalid) <= 1 + MOST_INVALID * len(found), "\n".join(invalid)


def test_programs_give_the_numbers_of_plain_pytorch_or_are_refused() -> None:
    assert_right([judge_seed(seed) for seed in range(FEW)])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fifty_programs_give_the_numbers_of_plain_pytorch_or_are_refused() -> None:
    # In this process: others would take longer to start than to judge.
    assert_right([judge_seed(seed) for seed in range(10_000, 10_000 + SOME)])


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_two_thousand_programs_give_the_numbers_of_plain_pytorch_or_are_refused() -> None:
    # Others each night: what fails prints its seed.
    first = int(os.environ.get("ROUNDPIPE_FIRST_PROGRAM", MANY * date.today().toordinal()))

    found = judge_all(range(first, first + MANY), processes=len(os.sched_getaffinity(0)))

    # Told with -s, and by a failure.
    sys.stderr.write(f"{table(found)}\n{Counter(one.outcome for one in found)}\n")
    assert_right(found)
    counts = by_kind(found)
    for kind, share in LEAST_EQUAL.items():
        assert counts[kind]["equal"] >= share * counts[kind].total(), table(found)


# Of what may be refused, how much must be equal. All that is not `refusable` must be, always: else it is wrong.
LEAST_EQUAL: dict[str, float] = {
    # In one piece.
    "label list of its own": 0.1,
}


def test_two_thousand_programs_have_all_kinds_in_them() -> None:
    seen = Counter(kind for seed in range(MANY) for kind in draw(seed).kinds())

    wanted = {f"segment {name}" for name in SEGMENTS} | {
        f"step {name}" for name in [*apart.MODULES, *apart.SWAPPED, *apart.TURNS]
    }
    wanted |= {f"start {name}" for name in ends.STARTS} | {f"end {name}" for name in ends.ENDS}
    wanted |= {f"label {name}" for name in ends.LABELS} | {f"optimizer {name}" for name in OPTIMIZERS}
    wanted |= {f"M {count}" for count in (None, 1, 2, 3, 5)}
    assert {name for name in wanted if seen[name] < 2} == set()


def test_most_programs_may_not_be_refused() -> None:
    refusable = [seed for seed in range(MANY) if draw(seed).refusable()]
    assert len(refusable) < MANY / 3


def test_a_program_prints_as_what_makes_it_again() -> None:
    for seed in range(100):
        assert read(str(draw(seed))) == draw(seed) == draw(seed)


# The fuzzer notices what it is for.


class Disturbed(Ours):
    """An engine that does something wrong in its calls."""

    def call(self, op: Op, batch: Any) -> dict[str, Any]:
        return self.disturbed(super().call(op, batch))

    def disturbed(self, values: dict[str, Any]) -> dict[str, Any]:
        return values


class WrongGradient(Disturbed):
    def disturbed(self, values: dict[str, Any]) -> dict[str, Any]:
        self.model.synchronize()
        parameter = next(self.module.parameters())
        parameter.grad[0] += 1e-5
        return values


class WrongLoss(Disturbed):
    def disturbed(self, values: dict[str, Any]) -> dict[str, Any]:
        return {**values, "losses": [loss * (1 + 1e-6) for loss in values["losses"]]}


class NotANumber(Disturbed):
    def disturbed(self, values: dict[str, Any]) -> dict[str, Any]:
        return {**values, "outputs": [output * float("nan") for output in values["outputs"]]}


class Raises(Disturbed):
    def disturbed(self, values: dict[str, Any]) -> dict[str, Any]:
        del values
        raise RuntimeError("this is not one of the library's own errors")


class Refuses(Disturbed):
    def disturbed(self, values: dict[str, Any]) -> dict[str, Any]:
        self.model.step("not a function")
        return values


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", [WrongGradient, WrongLoss, NotANumber, Raises, Refuses])
def test_a_fault_is_wrong(monkeypatch: pytest.MonkeyPatch, fault: type[Ours]) -> None:
    assert judge(SMALL).outcome == "equal"

    monkeypatch.setattr(verdict, "Ours", fault)

    assert judge(SMALL).outcome == "wrong"


def test_an_error_in_words_is_a_refusal_where_something_may_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    program = replace(SMALL, label="list of its own")
    assert judge(program).outcome == "equal"

    monkeypatch.setattr(verdict, "Ours", Refuses)
    assert judge(program).outcome == "refused"

    monkeypatch.setattr(verdict, "Ours", Raises)
    assert judge(program).outcome == "wrong"


@pytest.mark.slow
def test_a_wrong_program_shrinks_to_what_is_needed_to_go_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    large = replace(SMALL, segments=("mlp", "linear", "attention"), devices="cpu:2", microbatches=3, plan="layers")

    monkeypatch.setattr(verdict, "Ours", WrongLoss)

    assert smallest(large) == replace(SMALL, segments=(), loop=(Op("fb", 4), Op("sync")))


def test_a_program_that_hangs_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(night, "START_S", 0.01)

    (found,) = judge_all([3], processes=1)

    assert (found.outcome, found.words[:10]) == ("wrong", "no verdict")


def test_plain_pytorch_has_no_truth_for_what_it_refuses() -> None:
    torch_refuses = replace(SMALL, segments=("tanh", "in place, column major"), loop=(Op("load"), Op("sync")))
    assert judge(torch_refuses).outcome == "invalid"
