"""`OptimizerThread`: the thread that runs optimizer steps in launch order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

import torch

from rp_optim.errors import WrongThread
from rp_optim.jobs import Outcome, Worker

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class _ThreadState(threading.local):
    is_optimizer = False


_thread_state = _ThreadState()


def on_any_optimizer_thread() -> bool:
    """Return whether the calling thread is the thread of any `OptimizerThread`."""
    return _thread_state.is_optimizer


def wait_for_steps() -> None:
    """Wait for the jobs queued on all optimizer threads; on one of them, return at once."""
    if on_any_optimizer_thread():
        return
    for thread in list(_THREADS):
        thread.wait()


class OptimizerThread:
    """Runs jobs one after another on its own thread, in parallel with the devices.

    The thread starts with the first job.

    Args:
        leave_cores: how many cores to leave to other threads, such as the workers of CPU devices. Torch's number
            of intra-op threads for the jobs is lowered by this, to one at least.

    `num_failed`: the number of jobs that raised, except those of `queue`; written only by the thread.

    >>> thread = OptimizerThread()
    >>> thread.submit(max, 1, 2).result()
    2
    >>> thread.close()
    """

    def __init__(self, *, leave_cores: int = 0) -> None:
        if leave_cores < 0:
            raise ValueError(f"leave_cores must be >= 0, but is {leave_cores} instead")
        self.num_failed = 0
        self._failure: BaseException | None = None
        self._failing = threading.Lock()
        num_threads = max(1, torch.get_num_threads() - leave_cores)
        self._worker = Worker("roundpipe-optimizer", partial(_start, num_threads))
        self._has_jobs = False
        _THREADS.add(self)

    def wait(self) -> None:
        """Wait until all queued jobs are done, without raising their errors. Returns at once after `close`."""
        if not self._has_jobs or not self._worker.is_here():
            return
        with suppress(RuntimeError):
            self._worker.submit(_nothing).wait()

    def submit(
        self, job: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Outcome[_Result]:
        """Queue a job. Only the returned outcome has its result or exception; this object does not keep it."""
        self._has_jobs = True
        return self._worker.submit(self._counted, job, args, kwargs)

    def _counted(self, job: Callable[..., _Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Result:
        try:
            return job(*args, **kwargs)
        except BaseException:
            self.num_failed += 1
            raise

    def launch_optim_kernel(
        self, fn: Callable[_Arguments, object], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> None:
        """Queue a job and return at once. The first exception of a job is kept; later jobs still run.

        Raises the kept exception, if there is one, and forgets it; the job is then not queued.
        """
        self._raise_failure()
        self.queue(self._counted, fn, args, kwargs)

    def queue(self, fn: Callable[_Arguments, object], *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        """Queue a job like `launch_optim_kernel`, but raise nothing here and leave it out of `num_failed`."""
        self._has_jobs = True
        self._worker.submit(self._run, fn, args, kwargs)

    def _run(self, fn: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            fn(*args, **kwargs)
        except BaseException as error:
            with self._failing:
                self._failure = self._failure or error

    def take_failure(self) -> BaseException | None:
        """Return the kept exception and forget it; None if there is none."""
        with self._failing:
            failure, self._failure = self._failure, None
        return failure

    def _raise_failure(self) -> None:
        if (failure := self.take_failure()) is not None:
            raise failure

    def synchronize_optim(self) -> None:
        """Wait until all queued jobs are done.

        Raises the kept exception, if there is one, and forgets it; `WrongThread` on the optimizer's thread, which
        would wait for itself.
        """
        if self.on_optim_stream():
            raise WrongThread("the optimizer's thread cannot wait for itself; synchronize from the training loop")
        self._worker.submit(_nothing).result()
        self._raise_failure()

    def on_optim_stream(self) -> bool:
        """Return whether the calling thread is this optimizer thread.

        >>> thread = OptimizerThread()
        >>> thread.on_optim_stream(), thread.submit(thread.on_optim_stream).result()
        (False, True)
        >>> thread.close()
        """
        return self._worker.is_current()

    is_current = on_optim_stream

    def close(self) -> None:
        """Finish the jobs and end the thread. May be called twice."""
        self._worker.close()

    shutdown_optim = close


_SETTING = threading.Lock()
# Weak references to all optimizer threads of the process.
_THREADS: WeakSet[OptimizerThread] = WeakSet()


def _nothing() -> None:
    pass


def compute_with(num_threads: int) -> None:
    """Set torch's intra-op threads for the calling thread, a new one, without changing them for later threads.

    >>> worker = Worker("example", partial(compute_with, 1))
    >>> worker.submit(torch.get_num_threads).result()
    1
    >>> worker.close()
    """
    # Torch gives a new thread the number of intra-op threads that any thread has set last. So this thread sets its
    # number, and then restores the previous one for threads that start later. It reads the number first, since a
    # thread's first read would undo an earlier set. The lock admits one thread at a time: otherwise another thread
    # would read this number in between and restore it.
    with _SETTING:
        others = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        setter = threading.Thread(target=torch.set_num_threads, args=(others,))
        # At interpreter shutdown no thread can start, so there is none to restore the number for.
        with suppress(RuntimeError):
            setter.start()
            setter.join()


def _start(num_threads: int) -> None:
    compute_with(num_threads)
    _thread_state.is_optimizer = True
