"""Measure how fast a runtime's links and host memory are, by a few short copies before the first plan."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

import torch
from rp_optim.disk.rate import disk_rates
from rp_optim.errors import DiskError
from rp_state.frozen.store import FrozenDisk
from rp_telemetry.measurements import Rates, Way, shared_by
from rp_transfer import Backend

from rp_engine.runtime.lane import Lane
from rp_engine.runtime.porter import Porter
from rp_engine.runtime.runtime import Runtime

_LOG = logging.getLogger(__name__)
# Large enough that a copy's start-up is negligible; eight devices together take a quarter of a gigabyte.
_BYTES = 16 << 20
_COPIES = 4
# Longer, so that all copies overlap although their threads start one after another.
_COPIES_AT_ONCE = 8
# Host memory: more than the caches of most processors hold.
_HOST_BYTES = 512 << 20
# How long a disk is read, and written before.
_DISK_S = 0.1

_lock = threading.Lock()
# By the devices' names: machines do not change while a process lives.
_known: dict[tuple[str, ...], Rates] = {}
# By their directories, what disks read a second.
_known_disks: dict[tuple[str, ...], float | None] = {}


def probed(runtime: Runtime) -> Rates:
    """Return the rates that `probe` measures for the runtime's devices, once per process; none if it fails.

    A failure is logged. Training must not depend on the probe: calls measure the rates that it does not know.
    """
    devices = tuple(lane.device.name for lane in runtime.lanes)
    with _lock:
        if devices not in _known:
            _known[devices] = _attempt(runtime)
        return _known[devices]


def frozen_gb_s(disk: FrozenDisk | None) -> float | None:
    """Return how fast this disk is read, measured once; None if there is none, or if measuring fails."""
    if disk is None:
        return None
    with _lock:
        if disk.directories not in _known_disks:
            _known_disks[disk.directories] = _attempt_reading(disk)
        return _known_disks[disk.directories]


def _attempt_reading(disk: FrozenDisk) -> float | None:
    try:
        return disk_rates(disk.directories, _DISK_S).read_gb_s
    except DiskError as error:
        _LOG.warning("the disk could not be probed, so plans take it to be as fast as links: %s", error)
        return None


def _attempt(runtime: Runtime) -> Rates:
    try:
        return probe(runtime)
    except Exception as error:
        _LOG.warning("links and host memory could not be probed, so calls must measure them: %s", error)
        return Rates()


def probe(runtime: Runtime, *, nbytes: int = _BYTES, host_bytes: int = _HOST_BYTES) -> Rates:
    """Measure each link alone, then all at once, and host memory; the devices should be idle.

    >>> with Runtime("cpu:2") as runtime:
    ...     len(probe(runtime, nbytes=1 << 10, host_bytes=1 << 10).up_gb_s)
    2

    Each direction copies `nbytes` a few times between separate buffers on the host and on the device, on the
    threads and streams that carry weights and gradients. All buffers are freed. For host memory, all intra-op
    threads of the calling thread update `host_bytes` in place, reading and writing each byte.

    Raises any error of an allocation or a copy.
    """
    lanes = runtime.lanes
    up, down = ([_LinkDirection(runtime.backend, lane, way, nbytes) for lane in lanes] for way in ("up", "down"))
    ups, downs = ([at_once([link], _COPIES)[0] for link in links] for links in (up, down))
    return Rates(
        up_gb_s=tuple(ups),
        down_gb_s=tuple(downs),
        switches=shared_by(
            ups,
            downs,
            lambda way, chosen: at_once([(up if way == "up" else down)[at] for at in chosen], _COPIES_AT_ONCE),
        ),
        memory_gb_s=_host_gb_s(host_bytes),
    )


class _LinkDirection:
    """One direction of a device's link, with the host buffer that it is measured with."""

    def __init__(self, backend: Backend, lane: Lane, way: Way, nbytes: int) -> None:
        self._porter: Porter = lane.inbox if way == "up" else lane.outbox
        self._host = backend.host_empty((nbytes,), torch.uint8)
        self._way = way
        backend.host_touch(write=(self._host,), what="probe")
        self._host.zero_()

    def start(self, copies: int) -> Callable[[], float]:
        """Queue copies on the porter; return a function that waits for them and returns their GB/s."""
        return self._porter.submit(self._gb_s, copies).result

    def _gb_s(self, copies: int) -> float:
        device, stream, host = self._porter.device, self._porter.stream, self._host
        there = device.empty(host.shape, host.dtype, stream=stream)
        stream.copy(there, host)
        first = stream.record(timed=True)
        for _ in range(copies):
            stream.copy(*((there, host) if self._way == "up" else (host, there)))
        last = stream.record(timed=True)
        last.synchronize()
        return copies * host.nbytes / max(last.seconds_since(first), 1e-9) / 1e9


def at_once(links: Iterable[_LinkDirection], copies: int) -> list[float]:
    """Return the GB/s that each of these links reaches while all are in use."""
    started = [link.start(copies) for link in links]
    return [wait() for wait in started]


def _host_gb_s(nbytes: int) -> float:
    # Updated in place, as by an optimizer: a copy also reads the memory that it writes. Written first, since pages
    # that were never written are all the same physical page, which caches hold.
    memory = torch.ones(nbytes // 4, dtype=torch.float32, device="cpu")
    seconds: list[float] = []
    for _ in range(3):
        begun = time.perf_counter()
        memory.add_(1.0)
        seconds.append(time.perf_counter() - begun)
    return 2 * memory.nbytes / max(min(seconds), 1e-9) / 1e9
