"""The runtime: owner of the devices, a worker thread for each, the launcher and the optimizer's thread."""

from __future__ import annotations

import inspect
import os
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from traceback import walk_stack
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import torch
from rp_errors import warn_user
from rp_optim import OptimizerThread
from rp_optim.disk.watch import watch_disks
from rp_sched import Assigner
from rp_telemetry import tracing
from rp_telemetry.measurements import Measurements
from rp_transfer import (
    Backend,
    Closed,
    HostLimit,
    HostUse,
    MemoryUse,
    current_limit,
    local_processes,
    open_backend,
)

from rp_engine.errors import Busy, RoundPipeError, TrainingWarning
from rp_engine.peers.alone import ALONE
from rp_engine.peers.opening import Connected, opened
from rp_engine.peers.peers import Peers
from rp_engine.runtime.at_exit import AT_EXIT
from rp_engine.runtime.disk_spans import note_disk_work
from rp_engine.runtime.lane import Lane
from rp_engine.runtime.launcher import Launcher, wait_until
from rp_engine.runtime.switch_interval import quick_switching

if TYPE_CHECKING:
    from rp_state.model_state import ModelState


_Result = TypeVar("_Result")
_BUSY = "another thread is inside a call on this runtime; call its models from one thread at a time"


class Runtime:
    """Owns devices and threads; each model runs on one runtime. Several may be open at once.

    Args:
        devices: ``"cuda"``, ``"cuda:0,2"``, ``"cpu"``, ``"cpu:4"``; None takes those of ``ROUNDPIPE_DEVICES`` if
            it is set, else all CUDA devices, else one CPU device. Of several processes that torchrun started on
            this machine, each takes its share of the CUDA devices then.
        strict: whether CPU devices check the order of every memory access; False for benchmarks.
        host_memory_bytes: host memory that the process may use; None takes ``ROUNDPIPE_HOST_MEMORY``, such as
            ``48GB``, if it is set, else what the machine and the container have.
        device_memory_bytes: memory of each CPU device, for trying out what happens where it is scarce: what layers
            allocate counts then, unless they are compiled. None for no limit. GPUs have what torch's allocator may
            have, see `torch.cuda.set_per_process_memory_fraction`.
        machines: whether to train together with the other processes that torchrun has started, one a machine; None
            does so if there are others. Or a `rp_dist.Machines` that the caller opened and will close.

    >>> with Runtime("cpu:2") as runtime:
    ...     [use.name for use in runtime.memory()]
    ['cpu:0', 'cpu:1']

    It is closed when the process exits, if not before.

    Raises `rp_transfer.DeviceStringError` and `rp_transfer.BackendUnavailable`; `ValueError` if the memory that is
    given is no size.
    """

    def __init__(
        self,
        devices: str | None = None,
        *,
        strict: bool = True,
        host_memory_bytes: int | None = None,
        device_memory_bytes: int | None = None,
        machines: Connected | bool | None = None,
    ) -> None:
        _check_size("host_memory_bytes", host_memory_bytes)
        _check_size("device_memory_bytes", device_memory_bytes)
        self._host_memory_bytes = host_memory_bytes
        # A variable that cannot be read is refused here.
        self.host_limit()
        if AT_EXIT.has_begun:
            raise Closed("the process is ending: no runtime can be opened any more")
        threads = torch.get_num_threads()
        _tell_one_thread(threads)
        self.backend: Backend = open_backend(devices, strict=strict, memory_bytes=device_memory_bytes)
        share = _share(threads, len(self.backend.devices))
        self.lanes = tuple(Lane(self.backend, device, share) for device in self.backend.devices)
        self.optimizer = OptimizerThread(leave_cores=_left(threads, len(self.lanes)))
        # The next device in the round, across the models that share the devices.
        self.next_device = 0
        self.assigner = Assigner(len(self.lanes))
        # What its links and host were measured to do, and how many calls were launched.
        self.measurements = Measurements([device.name for device in self.backend.devices])
        self.num_calls = 0
        # The models whose host memory this backend allocated.
        self.states: weakref.WeakSet[ModelState] = weakref.WeakSet()
        # For what memory of the host was told to be too small; each is told once.
        self.memory_warnings: set[str] = set()
        self._launch = threading.Lock()
        # Held by a thread that visits: calls that come later let it go first.
        self._visit = threading.Lock()
        # Whether the body that the launcher runs is that of a call.
        self._in_call = False
        # The thread whose calls are one for all others.
        self._owner: int | None = None
        self.closed = False
        self.peers: Peers = ALONE
        self._has_ended = False
        self._launcher = Launcher(num_threads=threads)
        # Workers of CPU devices set one intra-op thread; a thread that the user starts must not inherit that.
        torch.set_num_threads(threads)
        quick_switching.hold()
        watch_disks(note_disk_work)
        self.peers = self._opened(machines)
        # After the machines' own hook: this one runs before it.
        AT_EXIT.close(self)

    def _opened(self, machines: Connected | bool | None) -> Peers:
        try:
            return opened(machines)
        except BaseException:
            self.close()
            raise

    @property
    def group(self) -> Peers | None:
        """The machines that train together, this one with its `rank`, of `size`; None for one alone."""
        return None if self.peers.is_alone else self.peers

    def launching(self) -> AbstractContextManager[object]:
        """The launch lock, for a ``with``: its holder decides the order of tasks. Engine threads are refused.

        It is the lock itself, not a context manager of ours: in Python code, Ctrl-C could come between acquiring
        the lock and the ``with`` that releases it.
        """
        self.refuse()
        return self._launch

    def refuse(self) -> None:
        """Raise `RoundPipeError`, `Busy` or `Closed` if this thread may not launch now."""
        self.refuse_forked()
        self._refuse_own_threads()
        self._refuse_others_turn()
        if self._visit.locked() and self._owner is None:
            with self._visit:
                pass
        if self._launch.locked() and (self._in_call or self._is_inside()):
            raise Busy(_BUSY)
        self._refuse_closed()

    def _refuse_others_turn(self) -> None:
        if self._owner not in (None, threading.get_ident()):
            raise Busy(_BUSY)

    def _is_inside(self) -> bool:
        """Whether this thread is in a call already: a handler of a signal runs within it."""
        # By its stack: what a call notes would stay if Ctrl-C came at its end.
        launch = Runtime.launch.__code__
        return any(
            frame.f_code is launch and frame.f_locals.get("self") is self
            for frame, _ in walk_stack(inspect.currentframe())
        )

    def _refuse_closed(self) -> None:
        if self.closed:
            raise Closed(
                "the process is ending and has closed its runtimes; join the training threads in the main thread"
                if AT_EXIT.has_begun
                else "the runtime was closed; open another one and wrap the model again"
            )

    def launch(self, body: Callable[[], _Result]) -> _Result:
        """Run `body` on the launcher's thread, holding the launch lock; return its result or raise its error."""
        with self.launching():
            # Another thread's calls may have begun while this one waited.
            self._refuse_others_turn()
            return self._launcher.run(partial(self._call, body))

    @contextmanager
    def as_one_call(self) -> Generator[None]:
        """Refuse the calls of other threads, and let visits wait, while this thread makes several as one."""
        self.refuse()
        with self._visit:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None

    def launch_later(self, body: Callable[[], object]) -> None:
        """Run `body` on the launcher's thread, before later calls, and return at once."""
        self._launcher.run_later(body)

    def _call(self, body: Callable[[], _Result]) -> _Result:
        # On the launcher's thread, which no Ctrl-C enters.
        self._in_call = True
        try:
            return body()
        finally:
            self._in_call = False

    def may_wait(self) -> bool:
        """Whether this thread may wait for calls: not if it runs a part of one, or in a forked process."""
        own = self._launcher.is_current() or any(lane.is_current() for lane in self.lanes)
        return self._launcher.is_here() and not own and not self.optimizer.is_current()

    def visit(self, body: Callable[[], _Result]) -> _Result:
        """Like `launch`, for what only reads between calls: it waits for others' calls, and calls wait for it.

        A signal's handler may be inside a call of this thread, after which it reads then.
        """
        self.refuse_forked()
        self._refuse_own_threads()
        self._refuse_closed()
        if self._owner == threading.get_ident():
            raise Busy(_BUSY)
        if self._launch.locked() and self._is_inside():
            return self._launcher.run(body)
        with self._visit, self._launch:
            return self._launcher.run(body)

    def carry_out(self, body: Callable[[], _Result]) -> _Result:
        """Like `launch`, for a caller that holds the launch lock already."""
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

    def release_memory(self) -> tuple[MemoryUse, ...]:
        """Give back the device memory that calls have left, for another program on the same GPUs.

        It waits for calls in progress, which keep what they need, but not for steps. The next call takes memory
        again. Graphs (``launch="graphs"``) and the devices' contexts stay. Returns what is used then, by device.

        >>> with Runtime("cpu:2") as runtime:
        ...     [use.used_bytes for use in runtime.release_memory()]
        [0, 0]

        Raises `Busy` inside a layer, loss function or step function, and `Closed` after the runtime was closed.
        """
        self.launch(self._release_memory)
        return self.memory()

    def _release_memory(self) -> None:
        # First all leave what they hold: a packet may go from one device to another.
        for lane in self.lanes:
            lane.settle()
        for job in [lane.do(lane.make_room) for lane in self.lanes]:
            wait_until(job.wait)
            job.result()

    def host_memory(self) -> HostUse:
        """Bytes that blocks and activations take on the host."""
        return self.backend.host_memory()

    def host_limit(self) -> HostLimit:
        """The limit on the process's host memory that leaves least free at this moment."""
        return current_limit(self._host_memory_bytes)

    def close(self) -> None:
        """Finish launched work, end the threads, release the devices. May be called again."""
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
        self.peers.close()
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
        if error is not None:
            self.fail(error)
        self.close()

    def fail(self, error: BaseException) -> None:
        """Tell other machines, if there are any, that this one ends with an error; then close it."""
        if not self.closed and self._launcher.is_here():
            self.peers.fail(error)


def _check_size(name: str, nbytes: object) -> None:
    if nbytes is not None and (not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < 0):
        raise ValueError(f"{name} must be a number of bytes or None, but is {nbytes!r} instead")


def _share(num_threads: int, num_devices: int) -> int:
    # Two porters a device. They need threads: where more than two tasks add to one gradient, calls and the
    # optimizer wait for these additions.
    return max(num_threads // (2 * num_devices), 1)


def _left(num_threads: int, num_devices: int) -> int:
    # Each device has a worker, its backward thread and two porters; if one of them or the caller finds no free
    # core, a whole device waits. The optimizer is limited by memory bandwidth, so the last third of the cores
    # hardly speeds it up.
    return max(num_devices, min(5 * num_devices, num_threads // 3))


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tell_one_thread(num_threads: int) -> None:
    """Warn, in one of several processes on a machine, that torchrun's default leaves cores idle."""
    rank, processes = local_processes()
    is_default = num_threads == 1 and os.environ.get("OMP_NUM_THREADS") == "1"
    if rank or processes == 1 or not is_default or num_cores() <= processes:
        return
    warn_user(
        f"each of the {processes} processes on this machine has one thread for optimizer steps, since torchrun "
        "sets OMP_NUM_THREADS=1 if it is not set; start one process a machine, which drives all its GPUs, or set "
        "OMP_NUM_THREADS to the number of cores of each process",
        TrainingWarning,
    )


_default_lock = threading.Lock()
_default: list[Runtime] = []


def default_runtime() -> Runtime:
    """The runtime of models made without one; opened for the first of them and closed at exit.

    Raises `RoundPipeError` in a process that was forked from the one that opened it.
    """
    for runtime in _default:
        # Before the lock: another thread may have held it at the fork, and it would then never be released here.
        runtime.refuse_forked()
    with _default_lock:
        if not _default or _default[-1].closed:
            _default.append(Runtime())
        return _default[-1]
