"""The one thread on which optimizer steps run, in the order in which they were asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class OptimizerThread:
    """Runs jobs one after another beside the devices' work; its thread starts with the first job.

    >>> thread = OptimizerThread()
    >>> thread.submit(max, 1, 2).result()
    2
    >>> thread.close()
    """

    def __init__(self) -> None:
        self._ident: int | None = None
        self._executor = ThreadPoolExecutor(
            1,
            thread_name_prefix="roundpipe-optimizer",
            initializer=self._start,
            initargs=(torch.get_num_threads(),),
        )

    def _start(self, num_threads: int) -> None:
        # A new thread would take the count that a device's worker set last.
        torch.set_num_threads(num_threads)
        self._ident = threading.get_ident()

    def submit(
        self, job: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        """Queue a job. Its result, or what it raises, is in the future."""
        return self._executor.submit(job, *args, **kwargs)

    def is_current(self) -> bool:
        """Whether the calling thread is this one."""
        return threading.get_ident() == self._ident

    def close(self) -> None:
        """Finish the jobs and end the thread. May be called twice."""
        self._executor.shutdown(wait=True)
