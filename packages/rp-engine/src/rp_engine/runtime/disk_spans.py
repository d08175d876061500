"""What disks do while a profile is taken, and who waits for them, in its rows."""

from __future__ import annotations

from rp_optim.disk.watch import DiskWork
from rp_telemetry.tracing import DISK_READS, DISK_WAITS, DISK_WRITES, of_profile

_ROWS = {"read": DISK_READS, "write": DISK_WRITES, "wait": DISK_WAITS}


def note_disk_work(work: DiskWork, began_s: float, ended_s: float) -> None:
    """Record work that is over, between these times of `time.perf_counter`."""
    is_wait = work.kind == "wait"
    name = f"wait for the disk of {work.directory}" if is_wait else f"{work.kind} in {work.directory}"
    reason = "disk" if is_wait else ""
    of_profile().past(_ROWS[work.kind], work.kind, name, began_s, ended_s, work.nbytes, reason)
