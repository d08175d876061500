"""The one thread on which optimizer steps run, in the order in which they were asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch

from rp_optim.errors import WrongThread
from rp_optim.jobs import Outcome, Worker

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class _Here(threading.local):
    is_optimizer = False


_here = _Here()


def on_any_optimizer_thread() -> bool:
    """Whether the calling thread is that of any `OptimizerThread`."""
    return _here.is_optimizer


class OptimizerThread:
    """Runs jobs one after another beside the devices' work; its thread starts with the first job.

    Args:
        leave_cores: how many of torch's threads not to compute with, since others need the cores: the workers of
            CPU devices, for example. At least one is left.

    `num_failed` counts the jobs that have raised; it is written by the thread alone.

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

    def submit(
        self, job: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Outcome[_Result]:
        """Queue a job. What it returns or raises is in the outcome, and is not remembered here."""
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
        """Queue a job and return at once. The first failure is remembered; jobs behind it still run.

        Raises the remembered failure, itself, once; the job is not queued then.
        """
        self._raise_failure()
        self.queue(self._counted, fn, args, kwargs)

    def queue(self, fn: Callable[_Arguments, object], *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        """`launch_optim_kernel` for a job that runs whatever is remembered, and that `num_failed` leaves out."""
        self._worker.submit(self._run, fn, args, kwargs)

    def _run(self, fn: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            fn(*args, **kwargs)
        except BaseException as error:
            with self._failing:
                self._failure = self._failure or error

    def take_failure(self) -> BaseException | None:
        """The remembered failure, which is forgotten; None if there is none."""
        with self._failing:
            failure, self._failure = self._failure, None
        return failure

    def _raise_failure(self) -> None:
        if (failure := self.take_failure()) is not None:
            raise failure

    def synchronize_optim(self) -> None:
        """Wait until everything that was queued is done.

        Raises the remembered failure, itself, once; `WrongThread` on the optimizer's thread, which would wait for
        itself.
        """
        if self.on_optim_stream():
            raise WrongThread("the optimizer's thread cannot wait for itself; synchronize from the training loop")
        self._worker.submit(_nothing).result()
        self._raise_failure()

    def on_optim_stream(self) -> bool:
        """Whether the calling thread is this one.

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


def _nothing() -> None:
    pass


def _start(num_threads: int) -> None:
    # Torch gives a new thread the count that any thread set last. This one takes its own, whatever a device's
    # worker has set, and does not leave it to threads that start later. Asked first: the first question of a
    # thread would undo what was set before it.
    others = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    setter = threading.Thread(target=torch.set_num_threads, args=(others,))
    # At the interpreter's end, while the last jobs run, no thread can start: none that would take this count.
    with suppress(RuntimeError):
        setter.start()
        setter.join()
    _here.is_optimizer = True
