"""A wait that is missing from the engine makes a test fail: each of them, removed one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lull import later, pause
from mutants import started
from paired import on_both
from remove_waits import COPIED, WAITS, Wait

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def ended() -> Iterator[Callable[[int], str]]:
    """How the scenarios end without the wait of a number."""
    with started(Path(__file__).with_name("remove_waits.py")) as how_it_ends:
        yield how_it_ends


@pytest.mark.parametrize("wait", WAITS, ids=[wait.what for wait in WAITS])
def test_the_engine_has_each_of_them(wait: Wait) -> None:
    wait.removed_from(wait.path_in(COPIED).read_text())


def test_two_machines_in_one_process_meet() -> None:
    # The scenarios of several machines go by these.
    assert on_both(lambda runtime: None if runtime.group is None else runtime.group.size) == [2, 2]


def test_what_is_put_off_comes_after_all_that_other_threads_can_do() -> None:
    order: list[str] = []

    def work() -> None:
        while not order:
            pass
        order.append("begun")
        sum(range(1_000_000))
        order.append("ended")

    thread = threading.Thread(target=work)
    thread.start()
    later(lambda: order.append("second"), 2)
    later(lambda: order.append("first"), 1)
    order.append("put off")
    pause(3)

    assert order == ["put off", "begun", "ended", "first", "second"]
    thread.join()


@pytest.mark.mutation
def test_the_scenarios_pass_with_every_wait_in_place(ended: Callable[[int], str]) -> None:
    assert ended(-1) == "passed"


@pytest.mark.mutation
@pytest.mark.parametrize("number", range(len(WAITS)), ids=[wait.what for wait in WAITS])
def test_the_scenarios_fail_without_any_one_wait(ended: Callable[[int], str], number: int) -> None:
    assert ended(number) in ("failed", "hung")
