"""A lane: one device with the threads that work for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Protocol

from rp_optim.jobs import Outcome, Worker
from rp_transfer import Backend, Device, Event, Retainer

from rp_engine.runtime.launcher import wait_until
from rp_engine.runtime.porter import Porter

# Slot sizes of the porters' staging rings. Unpinned weights are copied to a slot, then read by the device: faster
# while slots fit into the CPU caches. Gradients are added from slots: larger slots take the GIL less often.
_FILLED_BYTES = 16 << 20
_ADDED_BYTES = 32 << 20
# How many microbatches, or large parts of one, a worker queues on its device before it waits for the oldest.
_AHEAD = 2


class Job(Protocol):
    """Work for a lane. Neither method raises: the job reports its errors where it puts its results."""

    def prefetch(self) -> None:
        """Start transfers that need no wait; called while the job before is still running."""
        ...

    def withdraw(self) -> None:
        """Free the device memory that `prefetch` has taken; called while the job before is still running."""
        ...

    def run(self) -> None:
        """Do the work; it may wait."""
        ...


class Lane:
    """One device and the worker thread that runs its jobs in the order of launch.

    Its porters copy blocks: `inbox` uploads weights, `outbox` downloads gradients.
    """

    def __init__(self, backend: Backend, device: Device, num_threads: int) -> None:
        self.device = device
        self.retainer = Retainer()
        # Each frees memory that calls do without, on this lane's thread.
        self.reserves: list[Callable[[], None]] = []
        # Whether the device's peak may have been reached by more than calls take.
        self.has_raised_peak = False
        self.inbox = Porter(backend, device, device.weights_in, num_threads, _FILLED_BYTES)
        self.outbox = Porter(backend, device, device.gradients_out, num_threads, _ADDED_BYTES)
        self._waiting: deque[Job] = deque()
        self._ahead: deque[Event] = deque()
        self._worker = Worker(f"roundpipe-{device.name}", device.attach_thread)
        self._worker.submit(_nothing).result()

    def is_current(self) -> bool:
        """Whether the calling thread is this lane's."""
        return self._worker.is_current()

    @property
    def has_jobs(self) -> bool:
        """Whether there are jobs that have not begun."""
        return bool(self._waiting)

    def submit(self, job: Job) -> Outcome[None]:
        """Queue a job; it runs in the caller's context variables, where newer torch keeps settings."""
        self._waiting.append(job)
        try:
            return self._worker.submit(copy_context().run, self._run, job)
        except BaseException:
            self._forget(job)
            raise

    def _run(self, job: Job) -> None:
        self._forget(job)
        job.run()

    def _forget(self, job: Job) -> None:
        with suppress(ValueError):
            self._waiting.remove(job)

    def do(self, body: Callable[[], None]) -> Outcome[None]:
        """Queue a body after the jobs."""
        return self._worker.submit(body)

    def settle(self) -> None:
        """Wait for all jobs and release the memory retained for them."""
        # Tickets are not enough: a delivery leaves its tickets before it releases its gradient sums.
        jobs = [
            self.inbox.submit(_nothing),
            self.outbox.submit(_nothing),
            self._worker.submit(self.retainer.drain),
        ]
        for job in jobs:
            wait_until(job.wait)
            job.result()

    def pace(self, done: Event) -> None:
        """Wait for the device if too much is queued on it, and release memory of finished work.

        `done`: the event after the work queued last. A transfer takes device memory from the moment it is queued,
        so queueing without a limit would fill the device.
        """
        self._ahead.append(done)
        if len(self._ahead) > _AHEAD:
            self._ahead.popleft().synchronize()
        self.retainer.flush()

    def prefetch_next(self) -> None:
        """Let the next queued job, if there is one, start its transfers."""
        for job in self._next():
            job.prefetch()

    def make_room(self) -> None:
        """Free all device memory but that of the running job, once what uses it is over; it takes its time."""
        for job in self._next():
            job.withdraw()
        for free in list(self.reserves):
            free()
        self.outbox.wait_for_room(0)
        self.settle_device()
        self.device.release_unused()

    def settle_device(self) -> None:
        """Wait for all that is queued on the device, and release the memory retained for it."""
        self.device.synchronize()
        self._ahead.clear()
        self.retainer.drain()

    def _next(self) -> list[Job]:
        try:
            return [self._waiting[0]]
        except IndexError:
            return []

    def close(self) -> None:
        """Finish the jobs and end the threads."""
        self._worker.close()
        for free in list(self.reserves):
            free()
        self.inbox.close()
        self.outbox.close()
        self.retainer.drain()


def _nothing() -> None:
    pass
