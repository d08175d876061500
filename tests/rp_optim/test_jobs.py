"""Worker threads and the outcomes of their jobs, whatever interrupts whoever asks."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from queue import SimpleQueue

import pytest
from programs import ended
from rp_optim.jobs import Outcome, Worker, wait_for_all, wait_for_any

pytestmark = pytest.mark.timeout(60)


@contextmanager
def open_worker() -> Iterator[Worker]:
    worker = Worker("test")
    yield worker
    worker.close()


def test_outcomes_are_waited_for_together_or_for_the_first() -> None:
    with open_worker() as worker, open_worker() as other:
        gates = [threading.Event(), threading.Event()]
        first, second = worker.submit(gates[0].wait, 10), other.submit(gates[1].wait, 10)
        assert not wait_for_any((first, second), 0.01)
        gates[1].set()
        assert wait_for_any((first, second), 10)
        assert (first.done(), second.done()) == (False, True)
        with pytest.raises(TimeoutError):
            first.result(0.01)
        gates[0].set()
        wait_for_all((first, second))
        assert first.result() is second.result() is True


def test_any_number_of_threads_wait_for_one_outcome() -> None:
    with open_worker() as worker:
        gate, seen = threading.Event(), list[bool]()
        outcome = worker.submit(gate.wait, 10)
        threads = [threading.Thread(target=lambda: seen.append(outcome.result(10))) for _ in range(8)]
        for thread in threads:
            thread.start()
        gate.set()
        for thread in threads:
            thread.join(10)
        assert seen == [True] * 8


def test_a_job_that_has_not_begun_can_be_cancelled() -> None:
    with open_worker() as worker:
        gate, ran = threading.Event(), list[int]()
        running, queued = worker.submit(gate.wait, 10), worker.submit(ran.append, 1)
        assert queued.cancel()
        assert queued.cancel()
        gate.set()
        assert running.result(10)
        assert not running.cancel()
        with pytest.raises(CancelledError):
            queued.result(10)
    assert ran == []


def test_what_prepares_a_worker_and_fails_fails_its_jobs() -> None:
    error = ValueError("no device")

    def refuse() -> None:
        raise error

    worker = Worker("test", refuse)
    assert worker.submit(int).exception(10) is error
    with pytest.raises(RuntimeError, match="takes no jobs"):
        worker.submit(int)
    worker.close()


def test_a_worker_that_is_dropped_ends_its_thread_and_what_a_job_held_is_gone_when_it_is_over() -> None:
    class Thing:
        def __call__(self) -> threading.Thread:
            return threading.current_thread()

    worker, thing = Worker("test"), Thing()
    gone = weakref.ref(thing)
    outcome = worker.submit(thing)
    del thing
    thread = outcome.result(10)
    assert gone() is None
    del worker
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_an_error_keeps_no_outcome_alive() -> None:
    class No(Exception):
        pass

    def fail() -> None:
        raise No

    with open_worker() as worker:
        outcome = worker.submit(fail)
        with pytest.raises(No) as caught:
            outcome.result(10)
        gc.disable()
        try:
            gone = weakref.ref(caught.value)
            assert gone() is not None
            del outcome, caught
            worker.submit(int).result(10)
            assert gone() is None
        finally:
            gc.enable()


@pytest.mark.slow
@pytest.mark.untraced
def test_interrupts_of_whoever_submits_and_waits_stop_no_worker() -> None:
    chance = random.Random(0)

    def interrupt(number: int, frame: object) -> None:
        del number, frame
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)

    def ask(worker: Worker, seconds: float) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        while True:
            outcomes = [worker.submit(int) for _ in range(3)]
            outcomes[0].result()
            wait_for_any(outcomes[1:], 1)
            wait_for_all(outcomes)

    try:
        for number in range(300):
            if number % 10 == 0:
                # Closing and starting are interrupted, too.
                worker = Worker("test")
            with pytest.raises(KeyboardInterrupt):
                ask(worker, chance.uniform(1e-5, 2e-3))
            assert worker.submit(max, 1, 2).result(10) == 2
            if number % 10 == 9:
                worker.close()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_to_make_its_own() -> None:
    code = """
import os, sys, threading, warnings
warnings.simplefilter("ignore")
from rp_optim.jobs import Worker
worker = Worker("test")
worker.submit(int).result()
if os.fork() == 0:
    try:
        worker.submit(int)
    except RuntimeError as error:
        sys.stdout.write(f"{error}\\n")
    worker.close()
    sys.stdout.write(f"{Worker('own').submit(max, 1, 2).result()}\\n")
    sys.exit()
os.wait()
"""
    _, told, complaints = ended(code, whole_end=True)
    assert complaints == ""
    assert "spawn" in told
    assert told.endswith("\n2\n")


def test_an_outcome_runs_its_job_once() -> None:
    ran: list[int] = []
    outcome = Outcome(lambda: ran.append(1))
    outcome.carry_out()
    outcome.carry_out()
    assert ran == [1]
    assert outcome.result() is None


class _Deserted(deque[SimpleQueue[None]]):
    """The last one leaves as soon as somebody has looked."""

    def __bool__(self) -> bool:
        found = len(self) > 0
        self.clear()
        return found


def test_a_thread_that_gives_up_waiting_as_the_job_ends_leaves_the_worker_whole() -> None:
    with open_worker() as worker:
        gate = threading.Event()
        outcome = worker.submit(gate.wait, 10)
        outcome._waiting = _Deserted()
        outcome.listen(SimpleQueue())
        gate.set()
        assert worker.submit(max, 1, 2).result(10) == 2
