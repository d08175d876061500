"""The lock under which memory may end: whoever leaves it by whatever way leaves it open."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from rp_transfer.memory.guard import Guard

INTERRUPTS = 300


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGVTALRM interrupts the main thread as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        del number, frame
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


@pytest.mark.slow
@pytest.mark.untraced
@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_leaves_it_open() -> None:
    guard, chance = Guard(), random.Random(0)

    def is_open() -> bool:
        found = guard.acquire(timeout=30)
        if found:
            guard.release()
        return found

    def use_it(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        while True:
            with guard:
                guard.afterwards(int)
            guard.catch_up()

    with ThreadPoolExecutor(1) as another:
        for _ in range(INTERRUPTS):
            with pytest.raises(KeyboardInterrupt):
                use_it(chance.uniform(1e-5, 1e-3))
            assert another.submit(is_open).result()


def test_what_ends_is_seen_to_when_somebody_asks_who_is_not_inside() -> None:
    guard, seen = Guard(), list[str]()
    with guard, guard:
        guard.afterwards(lambda: seen.append("freed"))
        guard.catch_up()
        assert seen == []
    guard.catch_up()
    assert seen == ["freed"]


def test_memory_may_end_under_any_lock() -> None:
    first, second, ready, done = Guard(), Guard(), threading.Event(), threading.Event()

    def finalize_inside_the_second() -> None:
        with second:
            ready.set()
            first.afterwards(int)
            done.set()

    thread = threading.Thread(target=finalize_inside_the_second)
    with first:
        thread.start()
        assert ready.wait(10)
        # Whoever is inside the first needs the second one now.
        assert done.wait(10)
    thread.join()
