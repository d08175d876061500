"""Open the backend that a device string such as ``cuda:0,2`` or ``cpu:4`` names."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import torch

from rp_transfer.api import Backend
from rp_transfer.cpu.backend import CpuBackend
from rp_transfer.errors import BackendUnavailable, DeviceStringError

VARIABLE = "ROUNDPIPE_DEVICES"
# What torchrun tells each of its processes on a machine, and what holds without it.
_OF_TORCHRUN = (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
# Each virtual device has threads and clocks; more devices test nothing new.
MOST_CPU_DEVICES = 1024
# No device has a longer number; Python refuses to parse numbers of thousands of digits.
_MOST_DIGITS = 18
_SYNTAX = re.compile(r"(?P<kind>cpu|cuda)(:(?P<which>\d+(,\d+)*))?")


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """A parsed device string. `indices`: CUDA indices, None for all visible; `count`: number of CPU devices."""

    kind: str
    indices: tuple[int, ...] | None = None
    count: int = 1


def parse_devices(text: str) -> DeviceChoice:
    """Parse ``cuda`` (all visible), ``cuda:0,2``, ``cpu`` or ``cpu:4``.

    >>> parse_devices("cuda:0,2").indices
    (0, 2)
    >>> parse_devices("cpu:4").count
    4

    Raises `DeviceStringError` for anything else, and for more than 1,024 CPU devices.
    """
    match = _SYNTAX.fullmatch(text.strip())
    if match is None:
        raise DeviceStringError(
            f"devices must read 'cuda', 'cuda:0,2', 'cpu' or 'cpu:4', but are {text!r} instead"
        )
    words = [word for word in (match["which"] or "").split(",") if word]
    if any(len(word) > _MOST_DIGITS for word in words):
        raise DeviceStringError(
            f"numbers of devices must have at most {_MOST_DIGITS} digits, but devices are {text!r}"
        )
    numbers = tuple(map(int, words))
    if match["kind"] == "cpu":
        return _cpu_choice(text, numbers)
    if len(set(numbers)) != len(numbers):
        raise DeviceStringError(f"each CUDA device may be named once, but devices are {text!r}")
    return DeviceChoice("cuda", indices=numbers or None)


def _cpu_choice(text: str, numbers: tuple[int, ...]) -> DeviceChoice:
    if len(numbers) > 1 or numbers == (0,):
        raise DeviceStringError(
            f"'cpu:N' takes one number of virtual devices, at least 1, but devices are {text!r}"
        )
    if numbers > (MOST_CPU_DEVICES,):
        raise DeviceStringError(
            f"'cpu:N' must be at most {MOST_CPU_DEVICES} virtual devices, since each has threads of its own, "
            f"but devices are {text!r}"
        )
    return DeviceChoice("cpu", count=numbers[0] if numbers else 1)


def default_devices() -> str:
    """Return the devices of a process that names none.

    Those of ``ROUNDPIPE_DEVICES`` if it is set, else all CUDA devices, else ``cpu``. Of several processes that
    torchrun started on this machine, each has its share of the CUDA devices.

    >>> parse_devices(default_devices()).kind in ("cpu", "cuda")
    True

    Raises `BackendUnavailable` if these processes are more than the CUDA devices, `DeviceStringError` for what
    ``ROUNDPIPE_DEVICES`` must not be.
    """
    if named := os.environ.get(VARIABLE):
        try:
            parse_devices(named)
        except DeviceStringError as error:
            raise DeviceStringError(f"{VARIABLE}: {error}") from None
        return named
    if not torch.cuda.is_available():
        return "cpu"
    rank, processes = local_processes()
    return "cuda" if processes == 1 else _share(rank, processes, torch.cuda.device_count())


def local_processes() -> tuple[int, int]:
    """Return this process's number among those that torchrun started on this machine, and how many these are.

    Without torchrun, and if its variables make no sense, it is the only one:

    >>> local_processes()
    (0, 1)
    """
    try:
        rank, processes = (int(os.environ.get(name) or least) for name, least in _OF_TORCHRUN)
    except ValueError:
        return 0, 1
    return (rank, processes) if 0 <= rank < processes else (0, 1)


def _share(rank: int, processes: int, visible: int) -> str:
    """Return the CUDA devices of one of several processes on this machine."""
    if visible < processes:
        raise BackendUnavailable(
            f"torchrun started {processes} processes on this machine, but CUDA devices visible here are "
            f"{visible}; start one process a machine (--nproc-per-node 1), which drives all of them, or, if "
            f"CUDA_VISIBLE_DEVICES gives each process its own, set {VARIABLE}=cuda"
        )
    return "cuda:" + ",".join(map(str, range(rank * visible // processes, (rank + 1) * visible // processes)))


def open_backend(devices: str | None = None, *, strict: bool = True, memory_bytes: int | None = None) -> Backend:
    """Open the devices that a string names, or the default ones.

    Args:
        devices: see `parse_devices`; None takes `default_devices`.
        strict: whether CPU devices poison memory and check the order of its uses.
        memory_bytes: memory of each CPU device, see `CpuBackend`; None for no limit.

    Raises `DeviceStringError` for a malformed string, `BackendUnavailable` for devices that cannot be opened here,
    `ValueError` for `memory_bytes` with CUDA devices, whose limit torch sets.

    >>> backend = open_backend("cpu:2")
    >>> backend.devices[1].name
    'cpu:1'
    >>> backend.close()
    """
    choice = parse_devices(default_devices() if devices is None else devices)
    if choice.kind == "cpu":
        return CpuBackend(choice.count, strict=strict, memory_bytes=memory_bytes)
    if memory_bytes is not None:
        raise ValueError(
            "memory_bytes limits CPU devices; limit CUDA devices with torch.cuda.set_per_process_memory_fraction"
        )
    return _open_cuda(choice.indices)


def _open_cuda(indices: tuple[int, ...] | None) -> Backend:
    if not torch.cuda.is_available():
        raise BackendUnavailable(
            "CUDA devices were requested, but torch sees none here (no NVIDIA driver, or a torch built without "
            "CUDA); choose 'cpu' devices, or install the driver and a torch built for CUDA"
        )
    visible = torch.cuda.device_count()
    wanted = tuple(range(visible)) if indices is None else indices
    missing = [index for index in wanted if index >= visible]
    if missing:
        raise BackendUnavailable(
            f"cuda:{missing[0]} was requested, but {visible} CUDA devices are visible; "
            f"choose indices below {visible}"
        )
    try:
        from rp_transfer.cuda.backend import CudaBackend
    except ImportError as error:
        raise BackendUnavailable(
            f"CUDA devices need CuPy, which cannot be imported ({error}); "
            f"install it with: pip install 'rp-transfer[cuda{(torch.version.cuda or '13').split('.')[0]}]'"
        ) from error
    return CudaBackend(wanted)
