"""Porters: threads that copy blocks between the host and one device, one for each direction."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from rp_optim.jobs import Outcome, Worker
from rp_transfer import Backend, Conveyor, Device, Stream

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Porter:
    """A thread with a conveyor. It runs jobs, which may wait for tickets, in the order of their submission.

    The lane submits in launch order, so the oldest unfinished job can always continue: no deadlock. `num_threads`:
    torch's intra-op threads for additions and for copies of unpinned memory, staged through slots of `slot_bytes`.
    """

    def __init__(
        self, backend: Backend, device: Device, stream: Stream, num_threads: int, slot_bytes: int
    ) -> None:
        self.device = device
        self.stream = stream
        self.conveyor = Conveyor(backend, device, stream, slot_bytes=slot_bytes)
        self._worker = Worker(f"roundpipe-{stream.name}", partial(_start, device, num_threads))
        # Jobs and the device memory that each releases at its end, in bytes.
        self._loads: deque[tuple[Outcome[Any], int]] = deque()
        self.submit(_nothing).result()

    def submit(
        self, job: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Outcome[_Result]:
        """Queue a job."""
        return self._worker.submit(job, *args, **kwargs)

    def note_load(self, job: Outcome[Any], nbytes: int) -> None:
        """Record that the job submitted last will release `nbytes` on the device."""
        self._loads.append((job, nbytes))

    def wait_for_room(self, spare_bytes: int) -> None:
        """Block until unfinished jobs hold at most `spare_bytes` on the device; failed jobs count as finished."""
        while self._loads and (self._loads[0][0].done() or self._loaded_bytes() > spare_bytes):
            self._loads.popleft()[0].wait()

    def _loaded_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self._loads)

    def close(self) -> None:
        """Finish the jobs and end the thread. May be called twice."""
        self._worker.close()


def _start(device: Device, num_threads: int) -> None:
    device.attach_thread()
    torch.set_num_threads(num_threads)


def _nothing() -> None:
    pass
