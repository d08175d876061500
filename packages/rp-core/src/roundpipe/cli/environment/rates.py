"""Measured rates: of host memory, and of the link to each device and back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rp_transfer import Backend, Device

# Large enough to leave the CPU's caches, small enough for a moment.
_BYTES = 256 << 20
_TIMES = 5


@dataclass(frozen=True, slots=True)
class Link:
    """Rates between host and device, in GB/s (10^9 bytes)."""

    upload_gb_s: float
    download_gb_s: float


@dataclass(frozen=True, slots=True)
class Rates:
    """`host_gb_s`: bytes that a copy on all threads reads and writes, in GB/s. `links`: one for each GPU."""

    host_gb_s: float
    links: tuple[Link, ...]


def measured_rates(backend: Backend, nbytes: int = _BYTES) -> Rates:
    """Measure for about a second, by copies of `nbytes`; the best of several counts. CPU devices have no link."""
    gpus = [device for device in backend.devices if device.torch_device.type != "cpu"]
    return Rates(_host_gb_s(nbytes), tuple(_link(backend, device, nbytes) for device in gpus))


def _host_gb_s(nbytes: int) -> float:
    source = torch.ones(nbytes, dtype=torch.uint8)
    destination = torch.empty_like(source)
    return 2 * nbytes / _best_seconds(lambda: destination.copy_(source)) / 1e9


def _link(backend: Backend, device: Device, nbytes: int) -> Link:
    host = backend.host_empty((nbytes,), torch.uint8)
    there = device.empty((nbytes,), torch.uint8, stream=device.weights_in)

    def copy(destination: torch.Tensor, source: torch.Tensor) -> None:
        device.weights_in.copy(destination, source)
        device.weights_in.record().synchronize()

    device.attach_thread()
    up = _best_seconds(lambda: copy(there, host))
    down = _best_seconds(lambda: copy(host, there))
    return Link(nbytes / up / 1e9, nbytes / down / 1e9)


def _best_seconds(work: Callable[[], object]) -> float:
    return min(_seconds(work) for _ in range(_TIMES))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return max(time.perf_counter() - start, 1e-9)
