"""The host memory that this process may use, and what is free of it, on the machine and in its container."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Where Linux mounts control groups, by systemd's convention: version 2, beside version 1, and version 1.
_VERSION_2 = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
_VERSION_1 = "sys/fs/cgroup/memory"


@dataclass(frozen=True, slots=True)
class HostLimit:
    """A limit on the host memory of this process, in bytes.

    `name`: what sets the limit, "the machine" or "the container". `free_bytes`: what may still be allocated. Pages
    of files that the system can drop count as free; swap does not.

    >>> HostLimit("the machine", total_bytes=64 << 30, free_bytes=60 << 30).free_bytes >> 30
    60
    """

    name: str
    total_bytes: int
    free_bytes: int


def host_limits(root: Path = Path("/")) -> tuple[HostLimit, ...]:
    """Return the machine's limit, then the limits of the control groups that this process is in.

    Containers (Docker, Kubernetes) and batch systems (Slurm, systemd) limit memory by control groups, of version 1
    or 2. A process that exceeds such a limit is killed.

    Args:
        root: where ``proc`` and ``sys`` are; for tests.

    >>> [limit.name for limit in host_limits()][0]
    'the machine'

    Sources: admin-guide/cgroup-v2.rst, admin-guide/cgroup-v1/memory.rst and filesystems/proc.rst of Linux. On
    other systems free memory is unknown: all of the machine's memory counts as free.
    """
    machine = _machine(root)
    groups = [limit for folder in _groups(root) if (limit := _of_group(folder)) is not None]
    return (machine, *(group for group in groups if group.total_bytes < machine.total_bytes))


def tightest(limits: tuple[HostLimit, ...]) -> HostLimit:
    """Return the limit with the least free memory.

    >>> tightest((HostLimit("the machine", 9, 8), HostLimit("the container", 7, 5))).name
    'the container'
    """
    return min(limits, key=lambda limit: limit.free_bytes)


def resident_bytes(*, with_files: bool = True, root: Path = Path("/")) -> int:
    """Return the resident host memory of this process, in bytes; its peak on systems without ``/proc``.

    Args:
        with_files: count pages of mapped files, such as libraries and weights, which the system can drop.
        root: where ``proc`` is; for tests.

    >>> resident_bytes() >= resident_bytes(with_files=False) > 0
    True
    """
    status = _table(root / "proc/self/status")
    if "VmRSS:" not in status:
        return _peak_resident_bytes()
    return (status["VmRSS:"] - (0 if with_files else status.get("RssFile:", 0))) * 1024


def _peak_resident_bytes() -> int:
    # macOS counts bytes where Linux counts KiB.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _machine(root: Path) -> HostLimit:
    kibibytes = _table(root / "proc/meminfo")
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    total = kibibytes.get("MemTotal:", physical // 1024) * 1024
    return HostLimit("the machine", total, kibibytes.get("MemAvailable:", total // 1024) * 1024)


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of the control groups that this process is in, and of their parent groups."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        mounts = _VERSION_2 if not controllers else (_VERSION_1,) if "memory" in controllers.split(",") else ()
        for mount in mounts:
            folder = root / mount / path.lstrip("/")
            # Inside a container the path may be the host's, while only the container's own group is mounted.
            while folder.is_relative_to(root / mount):
                yield folder
                folder = folder.parent


def _of_group(folder: Path) -> HostLimit | None:
    for limit, usage, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        total, used = _number(folder / limit), _number(folder / usage)
        if total is not None and used is not None:
            stat = _table(folder / "memory.stat")
            cached = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
            return HostLimit("the container", total, max(total - max(used - cached, 0), 0))
    return None


def _number(file: Path) -> int | None:
    """Return the number in a file; None if there is no such file or it says "max"."""
    text = "".join(_lines(file))
    return int(text) if text.isdigit() else None


def _table(file: Path) -> Mapping[str, int]:
    rows = (line.split() for line in _lines(file))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
