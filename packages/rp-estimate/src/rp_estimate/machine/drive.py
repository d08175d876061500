"""The disk to plan for, which has the optimizer's state or frozen weights: its size, rates and rated life."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

_DAY_S = 86400
# Rates of a usual NVMe disk on PCIe 4.0, in 10^9 bytes a second.
USUAL_RATES = (5.0, 4.0)


@dataclass(frozen=True, slots=True)
class Drive:
    """A disk, or several that are striped. `read_gb_s`, `write_gb_s`: rates in 10^9 bytes a second.

    `rated_tb`: the 10^12 bytes that may be written in its life; 0 if unknown. `is_measured`: the rates are.

    >>> Drive(2 * 10**12, 7.0, 6.0).ms(262 * 10**9)
    81095.23809523809
    """

    total_bytes: int
    read_gb_s: float
    write_gb_s: float
    rated_tb: float = 0.0
    is_measured: bool = False

    @property
    def is_there(self) -> bool:
        """Whether state is on a disk at all."""
        return self.total_bytes > 0

    def ms(self, nbytes: int) -> float:
        """Return the time to read and write so many bytes: what one takes, the other lacks."""
        return nbytes / 1e6 / self.read_gb_s + nbytes / 1e6 / self.write_gb_s

    def read_ms(self, nbytes: int) -> float:
        """Return the time to read so many bytes."""
        return nbytes / 1e6 / self.read_gb_s

    def tb_a_day(self, nbytes: int, step_ms: float) -> float:
        """Return the 10^12 bytes that are written in a day of steps that each write so many bytes."""
        return nbytes / 1e12 * _DAY_S * 1e3 / step_ms

    def days(self, tb_a_day: float) -> float:
        """Return the days until the disk's rated life is written; infinite if that is unknown."""
        return self.rated_tb / tb_a_day if self.rated_tb and tb_a_day else math.inf

    def told(self, nbytes: int, step_ms: float) -> dict[str, Any]:
        """Return what is read and written in steps of this time, by names that end with their units."""
        a_day = self.tb_a_day(nbytes, step_ms)
        days = self.days(a_day)
        return {
            "total_bytes": self.total_bytes,
            "read_gb_s": self.read_gb_s,
            "write_gb_s": self.write_gb_s,
            "is_measured": self.is_measured,
            "step_s": self.ms(nbytes) / 1e3,
            "written_bytes_a_step": nbytes,
            "written_tb_a_day": a_day,
            "rated_life_days": None if math.isinf(days) else days,
        }


NO_DISK = Drive(0, math.inf, math.inf)
