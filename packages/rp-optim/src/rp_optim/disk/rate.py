"""The rates of a disk, measured briefly in files like those of working state."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rp_optim.disk.memory import Arena
from rp_optim.disk.volume import STRIPE_BYTES, Transfer, Volume
from rp_optim.errors import DiskFull

# Stripes in each directory. More are under way at once than a disk's queue needs.
_STRIPES = 8
# Where little is free, stripes are halved down to this: 1 MiB in each directory.
_LEAST_STRIPE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Rates in 10^9 bytes a second: reading alone, writing alone, and the sum of both at the same time."""

    read_gb_s: float
    write_gb_s: float
    both_gb_s: float


def disk_rates(directories: Sequence[str], seconds: float = 0.3) -> DiskRates:
    """Measure how fast working state in these directories, striped, is read and written, each for `seconds`.

    A virtual disk may be twice as fast a minute later.

    >>> min(disk_rates(["/tmp"], seconds=0.01).read_gb_s, 0.001)
    0.001

    Raises `DiskError` as `Disk` does.
    """
    volume, nbytes = _roomy(directories)
    arena = Arena(2 * nbytes)
    first, second = arena.bytes_at(0, nbytes), arena.bytes_at(nbytes, nbytes)

    def write() -> list[Transfer]:
        return [volume.write(0, first)]

    def read() -> list[Transfer]:
        return [volume.read(0, second)]

    def both() -> list[Transfer]:
        return [volume.write(nbytes, first), volume.read(0, second)]

    # Space that was only reserved is slower to write the first time.
    _gb_s(write, nbytes, 0.0)
    return DiskRates(
        write_gb_s=_gb_s(write, nbytes, seconds),
        read_gb_s=_gb_s(read, nbytes, seconds),
        both_gb_s=_gb_s(both, 2 * nbytes, seconds),
    )


def _roomy(directories: Sequence[str], stripe_bytes: int = STRIPE_BYTES) -> tuple[Volume, int]:
    """Return a volume with room for twice so many bytes: fewer where little is free. Raises `DiskFull`."""
    volume, nbytes = Volume(directories, stripe_bytes=stripe_bytes), _STRIPES * stripe_bytes * len(directories)
    try:
        volume.reserve(2 * nbytes)
    except DiskFull:
        if stripe_bytes == _LEAST_STRIPE_BYTES:
            raise
        return _roomy(directories, stripe_bytes // 2)
    return volume, nbytes


def _gb_s(move: Callable[[], list[Transfer]], nbytes: int, seconds: float) -> float:
    moved, begun = 0, time.perf_counter()
    while moved == 0 or time.perf_counter() - begun < seconds:
        for transfer in move():
            transfer.wait()
        moved += nbytes
    return moved / 1e9 / (time.perf_counter() - begun)
