"""Porters: threads that carry blocks between the host and one device, one way each, off the lane's way."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

import torch
from rp_transfer import Backend, Conveyor, Device, Stream

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Jobs = SimpleQueue[tuple["Future[Any]", Callable[[], Any]] | None]


class Porter:
    """A thread with a conveyor; its jobs wait for their turns in the order in which the lane submits them.

    So they are in launch order, as the lane's tasks are, and the oldest unfinished one can always go on.
    `num_threads` are torch's intra-op threads for additions and for memory that is not pinned, which goes through
    slots of `slot_bytes`.
    """

    def __init__(
        self, backend: Backend, device: Device, stream: Stream, num_threads: int, slot_bytes: int
    ) -> None:
        self.device = device
        self.stream = stream
        self.conveyor = Conveyor(backend, device, stream, slot_bytes=slot_bytes)
        self._jobs: _Jobs = SimpleQueue()
        # Not an executor: those take no jobs while the interpreter waits for the lanes' last tasks at its end.
        name = f"roundpipe-{stream.name}"
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()
        # At the interpreter's end, too: a thread that is inside torch then would abort the process.
        self._end = weakref.finalize(self, _finish, self._jobs, self._thread)
        # Jobs and the bytes on the device that each lets go of at its end.
        self._loads: deque[tuple[Future[Any], int]] = deque()
        self.submit(_start, device, num_threads).result()

    def submit(
        self, job: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        """Queue a job. Its result, or what it raises, is in the future."""
        future: Future[_Result] = Future()
        self._jobs.put((future, partial(job, *args, **kwargs)))
        return future

    def settle(self) -> None:
        """Wait until all jobs so far have ended and let go of what they held."""
        self.submit(_nothing).result()

    def note_load(self, job: Future[Any], nbytes: int) -> None:
        """The job that was submitted last lets go of so many bytes on the device."""
        self._loads.append((job, nbytes))

    def wait_for_room(self, spare_bytes: int) -> None:
        """Block until what jobs have yet to let go of is no more than this; a job may also end by failing."""
        while self._loads and (self._loads[0][0].done() or self._loaded_bytes() > spare_bytes):
            wait([self._loads.popleft()[0]])

    def _loaded_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self._loads)

    def close(self) -> None:
        """Finish the jobs and end the thread. May be called twice."""
        self._end()


def _finish(jobs: _Jobs, thread: threading.Thread) -> None:
    jobs.put(None)
    if threading.current_thread() is not thread:
        thread.join()


def _nothing() -> None:
    """A job that ends when those before it have."""


def _start(device: Device, num_threads: int) -> None:
    device.attach_thread()
    torch.set_num_threads(num_threads)


def _work(jobs: _Jobs) -> None:
    while (next_one := jobs.get()) is not None:
        future, job = next_one
        del next_one
        if future.set_running_or_notify_cancel():
            result, error = _outcome(job)
            # Whoever waits for the job waits for the memory it held, too.
            del job
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
            del result, error
        else:
            del job
        del future


def _outcome(job: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return job(), None
    except BaseException as error:
        return None, error
