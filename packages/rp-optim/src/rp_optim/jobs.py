"""Worker threads, and what becomes of their jobs; Ctrl-C in a thread that asks or waits breaks neither.

Python raises it anywhere in the main thread's code, so also between a condition's lock and the ``with`` that would
give it back: `threading.Condition`, and all that stands on it, can stay locked for good. Here whoever asks changes
nothing but by single operations of the interpreter, and whoever waits has a queue of its own.
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
    """A job and what becomes of it; it has what is used of a `concurrent.futures.Future`."""

    __slots__ = ("_claim", "_error", "_is_done", "_job", "_value", "_waiting")

    def __init__(self, job: Callable[[], _Result]) -> None:
        self._job: Callable[[], _Result] | None = job
        # Whoever gets it settles the outcome: the worker, or who cancels the job.
        self._claim = allocate_lock()
        self._waiting: deque[SimpleQueue[None]] = deque()
        self._is_done = False
        self._value: _Result | None = None
        self._error: BaseException | None = None

    def carry_out(self) -> None:
        """Run the job here and now, unless it was cancelled or run before."""
        try:
            if self._claim.acquire(blocking=False) and self._job is not None:
                try:
                    self._value = self._job()
                except BaseException as error:
                    self._error = error
                self._settle()
        finally:
            # An error holds the frames that it came through: this one must not hold the error.
            del self

    def cancel(self, error: BaseException | None = None) -> bool:
        """Settle it with `error` unless the job has begun; whether it never will. Not on the main thread."""
        if not self._claim.acquire(blocking=False):
            return type(self._error) is CancelledError
        self._error = error or CancelledError()
        self._settle()
        return True

    def _settle(self) -> None:
        # Whoever waits may count on it that what the job held is let go of.
        self._job = None
        self._is_done = True
        while self._waiting:
            self._waiting.popleft().put(None)

    def done(self) -> bool:
        """Whether the job is over, or cancelled."""
        return self._is_done

    def wait(self, seconds: float | None = None) -> bool:
        """Wait, so long at most; whether it is done."""
        return wait_for_any((self,), seconds)

    def result(self, timeout: float | None = None) -> _Result:
        """What the job returned. Raises what it raised, and `TimeoutError`."""
        error = self.exception(timeout)
        try:
            if error is not None:
                raise error
            return cast("_Result", self._value)
        finally:
            del error, self

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the job raised; None if it returned. Raises `TimeoutError`."""
        if not self.wait(timeout):
            raise TimeoutError(f"a job was not over after {timeout} s")
        return self._error

    def listen(self, woken: SimpleQueue[None]) -> None:
        """Have something put there when it is done, if it is not done yet."""
        self._waiting.append(woken)

    def forget(self, woken: SimpleQueue[None]) -> None:
        """The opposite of `listen`."""
        with suppress(ValueError):
            self._waiting.remove(woken)


def wait_for_any(outcomes: Iterable[Outcome[Any]], seconds: float | None = None) -> bool:
    """Wait until one of them is done, so long at most; whether one is."""
    chosen = tuple(outcomes)
    if any(outcome.done() for outcome in chosen):
        return True
    woken: SimpleQueue[None] = SimpleQueue()
    for outcome in chosen:
        outcome.listen(woken)
    # Once more: what was settled before it listened wakes nobody.
    if not any(outcome.done() for outcome in chosen):
        with suppress(Empty):
            woken.get(timeout=seconds)
    for outcome in chosen:
        outcome.forget(woken)
    return any(outcome.done() for outcome in chosen)


def wait_for_all(outcomes: Iterable[Outcome[Any]]) -> None:
    """Wait until all of them are done."""
    for outcome in outcomes:
        outcome.wait()


class _Loop:
    """What a worker's thread knows: nothing of the worker, so that a worker that is dropped ends its thread."""

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
        """Start the thread, if it has not begun; from a thread that no interrupt enters: `Thread.start` waits."""
        if self.thread is None:
            try:
                start_new_thread(self._begin, ())
            except RuntimeError as error:
                raise RuntimeError(
                    f"{self.name} cannot start: {error}. Where the main thread has ended already, let it join "
                    "the threads that train"
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
        """Wait until all jobs are done and the thread has ended; again if that was interrupted."""
        if not self.is_wanted or self.process != _PROCESS.number:
            return
        self.jobs.put(None)
        self.start()
        self.over.wait()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()


class Worker:
    """A thread that runs jobs in the order in which they are submitted; it starts with the first one.

    Args:
        name: the thread's.
        prepare: what the thread runs first; what that raises, all jobs raise. It must not hold the worker.

    Jobs that are queued as the process ends are run. A worker that nobody holds any more ends its thread.

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
        """Queue a job.

        Raises `RuntimeError` once the worker was closed, and in a forked child, which has none of the threads.
        """
        loop = self._loop
        if loop.process != _PROCESS.number:
            raise RuntimeError(
                f"{loop.name} stayed in the process that this one was forked from; start processes with "
                "multiprocessing's 'spawn', or make everything in the child"
            )
        if loop.is_closing or loop.is_over:
            raise RuntimeError("the worker was closed, and takes no jobs any more") from loop.failure
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
        """Whether the calling thread is this one."""
        return threading.get_ident() == self._loop.ident

    def is_here(self) -> bool:
        """Whether it was made in this process; not in the one that this one was forked from."""
        return self._loop.process == _PROCESS.number

    def close(self) -> None:
        """Finish the jobs and end the thread. May be called again, as after Ctrl-C."""
        self._loop.is_closing = True
        self._loop.finish()


def _nothing() -> None:
    pass


class _Process:
    """Which process this is, counted from the one that imported this."""

    number = 0


_PROCESS = _Process()
# Those whose threads have had work, in the order of their first jobs: later ones may wait for earlier ones.
_LOOPS: dict[_Loop, None] = {}


def _note_fork() -> None:
    _PROCESS.number += 1
    _LOOPS.clear()


os.register_at_fork(after_in_child=_note_fork)


@atexit.register
def finish_all() -> None:
    """Finish all jobs of all workers, and end these: a thread inside torch would abort a process that ends."""
    for loop in reversed(list(_LOOPS)):
        loop.finish()
