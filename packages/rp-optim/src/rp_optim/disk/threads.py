"""Threads that read and write files; a call that never returns does not keep the process from ending."""

from __future__ import annotations

import os
import time
from _thread import start_new_thread
from collections.abc import Callable
from queue import SimpleQueue
from weakref import finalize

from rp_optim.errors import DiskError
from rp_optim.jobs import Outcome

_Queue = SimpleQueue[Outcome[None] | None]


class _Progress:
    """When a job ended last."""

    last_end_s = 0.0


class TransferThreads:
    """`count` threads that take jobs from one queue, in the order of their submission.

    They end with this object, once their jobs are done. They are not joined at exit, unlike
    `rp_optim.jobs.Worker`: a disk that stopped answering would hold up the process for ever, and working state is
    worth nothing after it.
    """

    def __init__(self, count: int) -> None:
        self._jobs: _Queue = SimpleQueue()
        self._progress = _Progress()
        self._process = os.getpid()
        self._count = count
        self._has_started = False
        finalize(self, _end, self._jobs, count).atexit = False

    def submit(self, job: Callable[[], None]) -> Outcome[None]:
        """Queue a job. Raises `DiskError` in a forked child."""
        self.check_process()
        if not self._has_started:
            self._has_started = True
            for _ in range(self._count):
                start_new_thread(_work, (self._jobs, self._progress))
        outcome = Outcome(job)
        self._jobs.put(outcome)
        return outcome

    @property
    def last_end_s(self) -> float:
        """When a job ended last, by `time.monotonic`."""
        return self._progress.last_end_s

    def check_process(self) -> None:
        """Raise `DiskError` in a forked child, which does not have the threads."""
        if self._process != os.getpid():
            raise DiskError(
                "working state on disk belongs to the process that opened it, not to one forked from it; make the "
                "optimizer in the child, or start processes with multiprocessing's 'spawn'"
            )


def _work(jobs: _Queue, progress: _Progress) -> None:
    while (outcome := jobs.get()) is not None:
        outcome.carry_out()
        progress.last_end_s = time.monotonic()
        del outcome


def _end(jobs: _Queue, count: int) -> None:
    for _ in range(count):
        jobs.put(None)
