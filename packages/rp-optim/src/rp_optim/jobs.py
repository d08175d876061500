"""Worker threads and the outcomes of their jobs, safe against Ctrl-C in the threads that submit or wait.

Python raises KeyboardInterrupt anywhere in the main thread's code, even between taking a condition's lock and the
``with`` that would release it. So `threading.Condition`, and all that is built on it, can stay locked forever.
Here submitters change state only by single operations of the interpreter, and each waiter has its own queue.
"""

from __future__ import annotations

import atexit
import os
import threading
from _thread import allocate_lock, start_new_thread
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar, cast
from weakref import finalize

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Outcome(Generic[_Result]):
    """A job and its result or exception, with a part of the interface of `concurrent.futures.Future`."""

    __slots__ = ("_claim", "_error", "_is_done", "_job", "_value", "_waiting")

    def __init__(self, job: Callable[[], _Result]) -> None:
        self._job: Callable[[], _Result] | None = job
        # Never released. The thread that acquires it settles the outcome: the worker, or a thread that cancels the
        # job.
        self._claim = allocate_lock()
        self._waiting: deque[SimpleQueue[None]] = deque()
        self._is_done = False
        self._value: _Result | None = None
        self._error: BaseException | None = None

    def carry_out(self) -> None:
        """Run the job in the calling thread, unless it was cancelled or run before."""
        try:
            if self._claim.acquire(blocking=False) and self._job is not None:
                try:
                    self._value = self._job()
                except BaseException as error:
                    self._error = error
                self._settle()
        finally:
            # The exception's traceback references this frame; without `self` the frame does not reference it back.
            del self

    def cancel(self, error: BaseException | None = None) -> bool:
        """Settle the outcome with `error` (default `CancelledError`), unless the job has begun.

        Return whether the job is cancelled. Do not call it on the main thread, where Ctrl-C could interrupt it
        halfway.
        """
        if not self._claim.acquire(blocking=False):
            return type(self._error) is CancelledError
        self._error = error or CancelledError()
        self._settle()
        return True

    def _settle(self) -> None:
        # Drop the job before waiters wake, so that they can rely on its arguments being freed.
        self._job = None
        self._is_done = True
        # A waiter that has timed out may remove itself between a check of the queue and the next operation on it.
        with suppress(IndexError):
            while True:
                self._waiting.popleft().put(None)

    def done(self) -> bool:
        """Return whether the job has finished or was cancelled."""
        return self._is_done

    def wait(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds` (None: without limit) for the job; return whether it is done."""
        return wait_for_any((self,), seconds)

    def result(self, timeout: float | None = None) -> _Result:
        """Wait for the job's result. Raises the job's exception, or `TimeoutError` after `timeout` seconds."""
        error = self.exception(timeout)
        try:
            if error is not None:
                raise error
            return cast("_Result", self._value)
        finally:
            del error, self

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the job's exception; None if it returned. Raises `TimeoutError` after `timeout` seconds."""
        if not self.wait(timeout):
            raise TimeoutError(f"a job should end within {timeout} s, but is still queued or running")
        return self._error

    def listen(self, woken: SimpleQueue[None]) -> None:
        """Put an item into `woken` when the outcome is settled after this call."""
        self._waiting.append(woken)

    def forget(self, woken: SimpleQueue[None]) -> None:
        """Undo `listen`."""
        with suppress(ValueError):
            self._waiting.remove(woken)


def wait_for_any(outcomes: Iterable[Outcome[Any]], seconds: float | None = None) -> bool:
    """Wait at most `seconds` (None: without limit) until one outcome is done; return whether one is."""
    chosen = tuple(outcomes)
    if any(outcome.done() for outcome in chosen):
        return True
    woken: SimpleQueue[None] = SimpleQueue()
    for outcome in chosen:
        outcome.listen(woken)
    # Check again: an outcome that was settled before `listen` puts nothing into the queue.
    if not any(outcome.done() for outcome in chosen):
        with suppress(Empty):
            woken.get(timeout=seconds)
    for outcome in chosen:
        outcome.forget(woken)
    return any(outcome.done() for outcome in chosen)


def wait_for_all(outcomes: Iterable[Outcome[Any]]) -> None:
    """Wait until all outcomes are done."""
    for outcome in outcomes:
        outcome.wait()


class _Loop:
    """The state of a worker's thread. It does not reference the `Worker`, whose deletion ends the thread."""

    def __init__(self, name: str, prepare: Callable[[], object]) -> None:
        self.jobs: SimpleQueue[Outcome[Any] | None] = SimpleQueue()
        self.over: Outcome[None] = Outcome(_nothing)
        self.process = _PROCESS.number
        self.is_wanted = False
        self.is_closing = False
        self.is_over = False
        self.ident: int | None = None
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.name = name
        self._prepare = prepare
        self._claim = allocate_lock()

    def start(self) -> None:
        """Start the thread, if it has not started.

        `Thread.start` waits on a condition, which Ctrl-C could break. So a low-level thread, which no Ctrl-C
        interrupts, calls it.
        """
        if self.thread is None:
            try:
                start_new_thread(self._begin, ())
            except RuntimeError as error:
                raise RuntimeError(
                    f"{self.name} cannot start: {error}. If the main thread has ended already, let it join the "
                    "training threads first"
                ) from error

    def _begin(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        self.thread = threading.Thread(target=self._work, name=self.name, daemon=True)
        try:
            self.thread.start()
        except BaseException as error:
            self._end(error)

    def _work(self) -> None:
        self.ident = threading.get_ident()
        try:
            self._prepare()
        except BaseException as error:
            self._end(error)
            return
        while (outcome := self.jobs.get()) is not None:
            outcome.carry_out()
            del outcome
        self._end(None)

    def _end(self, failure: BaseException | None) -> None:
        self.failure = failure
        self.is_over = True
        _LOOPS.pop(self, None)
        with suppress(Empty):
            while True:
                if (left := self.jobs.get_nowait()) is not None:
                    left.cancel(failure)
        self.over.carry_out()

    def finish(self) -> None:
        """Wait until all jobs are done and the thread has ended. May be called again after an interrupt."""
        if not self.is_wanted or self.process != _PROCESS.number:
            return
        self.jobs.put(None)
        self.start()
        self.over.wait()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()


class Worker:
    """A thread that runs jobs in the order of their submission; it starts with the first job.

    Args:
        name: the thread's name.
        prepare: called first on the thread. If it raises, all jobs raise that error. It must not reference the
            worker.

    Jobs that are still queued at exit are run. The thread ends when its worker is garbage-collected.

    >>> worker = Worker("example")
    >>> worker.submit(max, 1, 2).result()
    2
    >>> worker.close()
    """

    def __init__(self, name: str, prepare: Callable[[], object] | None = None) -> None:
        self._loop = _Loop(name, prepare or _nothing)
        finalize(self, self._loop.jobs.put, None).atexit = False

    def submit(
        self, job: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Outcome[_Result]:
        """Queue a job; return its outcome.

        Raises `RuntimeError` if the worker was closed, and in a forked child, which does not have the thread.
        """
        loop = self._loop
        if loop.process != _PROCESS.number:
            raise RuntimeError(
                f"{loop.name} runs only in the process that this one was forked from; start processes with "
                "multiprocessing's 'spawn', or create models and optimizers in the child"
            )
        if loop.is_closing or loop.is_over:
            raise RuntimeError(
                f"{loop.name} was closed, or could not start, and takes no jobs; open a new one"
            ) from loop.failure
        outcome = Outcome(partial(job, *args, **kwargs))
        loop.start()
        _LOOPS[loop] = None
        loop.is_wanted = True
        loop.jobs.put(outcome)
        if loop.is_over:
            outcome.cancel(loop.failure)
            _LOOPS.pop(loop, None)
        return outcome

    def is_current(self) -> bool:
        """Return whether the calling thread is the worker's thread."""
        return threading.get_ident() == self._loop.ident

    def is_here(self) -> bool:
        """Return whether the worker was created in this process, not in one that this process was forked from."""
        return self._loop.process == _PROCESS.number

    def close(self) -> None:
        """Finish the jobs and end the thread. May be called again, for example after Ctrl-C."""
        self._loop.is_closing = True
        self._loop.finish()


def _nothing() -> None:
    pass


class _Process:
    """Counts the forks between the process that imported this module and the current one."""

    number = 0


_PROCESS = _Process()
# Loops that have had jobs, in the order of their first job: jobs of later loops may wait for jobs of earlier ones.
_LOOPS: dict[_Loop, None] = {}


def _note_fork() -> None:
    _PROCESS.number += 1
    _LOOPS.clear()


os.register_at_fork(after_in_child=_note_fork)


@atexit.register
def finish_all() -> None:
    """Finish all jobs and end all worker threads at exit: a thread still inside torch would abort the process."""
    for loop in reversed(list(_LOOPS)):
        loop.finish()
