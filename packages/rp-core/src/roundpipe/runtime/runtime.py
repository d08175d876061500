"""The runtime: the devices, one worker thread for each, and the optimizer's thread."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from rp_optim import OptimizerThread
from rp_optim.jobs import Outcome, Worker, finish_all
from rp_sched import Dealer
from rp_transfer import Backend, Closed, Device, Event, HostUse, MemoryUse, Retainer, open_backend

from roundpipe.errors import Busy, RoundPipeError
from roundpipe.runtime.launcher import Launcher, wait_until
from roundpipe.runtime.porter import Porter
from roundpipe.runtime.switch_interval import quick_switching
from roundpipe.telemetry import tracing
from roundpipe.telemetry.late_errors import tell_the_rest

if TYPE_CHECKING:
    from roundpipe.state.model_state import ModelState


# Slots of the porters' rings. Weights that are not pinned are written there and then read by the device: faster
# while they fit into the cores' caches. Gradients are added from there: fewer slots, fewer turns of Python's lock.
_FILLED_BYTES = 16 << 20
_ADDED_BYTES = 32 << 20
# So many microbatches, or large parts of one, lie on a device before its worker waits for the oldest.
_AHEAD = 2

_Result = TypeVar("_Result")


class Job(Protocol):
    """What a lane carries out. Neither method raises: errors go where the job's results go."""

    def prefetch(self) -> None:
        """Start what can be started now without waiting for anything; the job before is still running."""
        ...

    def run(self) -> None:
        """Do the work."""
        ...


class Lane:
    """One device and the thread that runs its tasks, job by job in the order of launch.

    Its porters carry blocks: `inbox` weights to the device, `outbox` gradients from it.
    """

    def __init__(self, backend: Backend, device: Device, num_threads: int) -> None:
        self.device = device
        self.retainer = Retainer()
        self.inbox = Porter(backend, device, device.weights_in, num_threads, _FILLED_BYTES)
        self.outbox = Porter(backend, device, device.gradients_out, num_threads, _ADDED_BYTES)
        self._waiting: deque[Job] = deque()
        self._ahead: deque[Event] = deque()
        self._worker = Worker(f"roundpipe-{device.name}", device.attach_thread)
        self._worker.submit(_nothing).result()

    def is_current(self) -> bool:
        """Whether the calling thread is this lane's."""
        return self._worker.is_current()

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

    def settle(self) -> None:
        """Wait for the jobs and let go of what was kept for them."""
        # A delivery gives its turns up before it lets go of its sums.
        jobs = [
            self.inbox.submit(_nothing),
            self.outbox.submit(_nothing),
            self._worker.submit(self.retainer.drain),
        ]
        for job in jobs:
            wait_until(job.wait)
            job.result()

    def pace(self, done: Event) -> None:
        """Wait for the device if much was put on it, the last of it over with `done`; let go of what is over.

        What travels takes room on a device from the moment it is asked for.
        """
        self._ahead.append(done)
        if len(self._ahead) > _AHEAD:
            self._ahead.popleft().synchronize()
        self.retainer.flush()

    def prefetch_next(self) -> None:
        """Let the next job, if it is known already, start what it can."""
        try:
            job = self._waiting[0]
        except IndexError:
            return
        job.prefetch()

    def close(self) -> None:
        """Finish the jobs and end the thread."""
        self._worker.close()
        self.inbox.close()
        self.outbox.close()
        self.retainer.drain()


class Runtime:
    """Owns devices and threads; models run on one. Several may live side by side.

    Args:
        devices: ``"cuda"``, ``"cuda:0,2"``, ``"cpu"``, ``"cpu:4"``; None asks ``ROUNDPIPE_DEVICES``, then takes
            all CUDA devices, else one CPU device.
        strict: whether CPU devices check the order of every memory access; False for benchmarks.

    >>> with Runtime("cpu:2") as runtime:
    ...     [use.name for use in runtime.memory()]
    ['cpu:0', 'cpu:1']

    It is closed at exit, if not before.

    Raises `rp_transfer.DeviceStringError` and `rp_transfer.BackendUnavailable`.
    """

    def __init__(self, devices: str | None = None, *, strict: bool = True) -> None:
        if _AT_EXIT.has_begun:
            raise Closed("the process is ending: no runtime can be opened any more")
        threads = torch.get_num_threads()
        self.backend: Backend = open_backend(devices, strict=strict)
        share = _share(threads, len(self.backend.devices))
        self.lanes = tuple(Lane(self.backend, device, share) for device in self.backend.devices)
        self.optimizer = OptimizerThread(leave_cores=_left(threads, len(self.lanes)))
        # Whose turn it is, across the models that share the devices.
        self.next_device = 0
        self.dealer = Dealer(len(self.lanes))
        # The models whose memory comes from this backend.
        self.states: weakref.WeakSet[ModelState] = weakref.WeakSet()
        self._launch = threading.Lock()
        self.closed = False
        self._has_ended = False
        self._launcher = Launcher(num_threads=threads)
        # Workers of CPU devices take one core each; a thread that the user starts must not inherit that.
        torch.set_num_threads(threads)
        quick_switching.hold()
        _AT_EXIT.close(self)

    def launching(self) -> AbstractContextManager[object]:
        """The right to decide orders, for a ``with``; held by one thread at a time and never by the engine's own.

        It is the lock itself: in code of ours, Ctrl-C could come between taking it and the ``with`` that gives it
        back.
        """
        self.refuse()
        return self._launch

    def refuse(self) -> None:
        """Raise if nothing may be launched now, by this thread."""
        self.refuse_forked()
        self._refuse_own_threads()
        if self._launch.locked():
            raise Busy(
                "another thread is inside a call on this runtime; call its models from one thread at a time"
            )
        if self.closed:
            raise Closed(
                "the process is ending, and has closed its runtimes; let the main thread join those that train"
                if _AT_EXIT.has_begun
                else "the runtime was closed; open another one and wrap the model again"
            )

    def launch(self, body: Callable[[], _Result]) -> _Result:
        """What `body` returns or raises, run by the launcher with the right to decide orders."""
        with self.launching():
            return self._launcher.run(body)

    def carry_out(self, body: Callable[[], _Result]) -> _Result:
        """`launch` for whoever is inside `launching` already."""
        return self._launcher.run(body)

    def refuse_forked(self) -> None:
        """Raise `RoundPipeError` in a process that was forked from the one that opened this runtime."""
        if not self._launcher.is_here():
            raise RoundPipeError(
                "this process was forked from the one that opened the runtime, whose threads and devices stayed "
                "there; start it with multiprocessing's 'spawn', or open a Runtime and wrap a model in it"
            )

    def _refuse_own_threads(self) -> None:
        if self.optimizer.is_current():
            raise Busy("a model was called from inside a step function; call it from the training loop")
        if self._launcher.is_current() or any(lane.is_current() for lane in self.lanes):
            raise Busy("a model was called from inside a layer or loss function of another one")

    def memory(self) -> tuple[MemoryUse, ...]:
        """Used, peak and total bytes of each device."""
        return tuple(lane.device.memory() for lane in self.lanes)

    def host_memory(self) -> HostUse:
        """Bytes that blocks and activations take on the host."""
        return self.backend.host_memory()

    def close(self) -> None:
        """Finish what was launched, end the threads, give the devices back. May be called again."""
        self.closed = True
        if not self._launcher.is_here():
            return
        if not self._has_ended:
            self._launcher.run(self._end)
        self._launcher.close()

    def _end(self) -> None:
        if self._has_ended:
            return
        for lane in self.lanes:
            lane.close()
        self.optimizer.close()
        try:
            tracing.devices_go(self.backend.devices)
        finally:
            self._has_ended = True
            quick_switching.release()
            self.backend.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _nothing() -> None:
    pass


def lasting() -> AbstractContextManager[object]:
    """What is made within outlives the caller's inference mode."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _share(num_threads: int, num_devices: int) -> int:
    # Two porters a device. Where several devices add to one gradient, calls wait for these additions, and so does
    # the optimizer.
    return max(num_threads // (2 * num_devices), 1)


def _left(num_threads: int, num_devices: int) -> int:
    # A worker, its backward thread and two porters a device, and the caller: where one of them finds no core, a
    # whole device waits. The optimizer is bound by memory, so that it hardly needs the last third.
    return max(num_devices, min(5 * num_devices, num_threads // 3))


_default_lock = threading.Lock()
_default: list[Runtime] = []


def default_runtime() -> Runtime:
    """The runtime of models that were given none; opened by the first of them and closed at exit.

    Raises `RoundPipeError` in a process that was forked from the one that opened it.
    """
    for runtime in _default:
        # Before the lock, which another thread may have held when the process was forked.
        runtime.refuse_forked()
    with _default_lock:
        if not _default or _default[-1].closed:
            _default.append(Runtime())
        return _default[-1]


class _AtExit:
    """Closes the runtimes that are open as the process ends, and tells of what failed and nobody asked for."""

    def __init__(self) -> None:
        self.has_begun = False
        self._open: weakref.WeakSet[Runtime] = weakref.WeakSet()
        self._hook = partial(self._run)

    def close(self, runtime: Runtime) -> None:
        """Have one closed."""
        self._open.add(runtime)
        # Each time anew: it must run before what the devices' libraries have registered.
        before, self._hook = self._hook, partial(self._run)
        atexit.register(self._hook)
        atexit.unregister(before)

    def _run(self) -> None:
        self.has_begun = True
        with ExitStack() as stack:
            stack.callback(tell_the_rest)
            stack.callback(finish_all)
            for runtime in list(self._open):
                stack.callback(runtime.close)


_AT_EXIT = _AtExit()
