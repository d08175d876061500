"""Merge an adapter in this process, and print by how much its resident memory rose, in bytes.

`python merging_memory.py FOLDER`: with the adapter in ``FOLDER/adapter``, for the model in ``FOLDER/base``.
"""

import ctypes
import sys
from pathlib import Path

from rp_cli.main import main


def resident(name: str) -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024


def merge(folder: Path, output: str) -> None:
    assert main(["merge", str(folder / "adapter"), "--base", str(folder / "base"), "--output", output]) == 0


if __name__ == "__main__":
    place = Path(sys.argv[1])
    # Freed memory goes back to the system at once, so that what is resident is what is used.
    ctypes.CDLL(None).mallopt(-3, 1 << 20)
    merge(place / "small", str(place / "small" / "merged"))
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    merge(place, str(place / "merged"))
    sys.stdout.write(f"rose by {resident('VmHWM') - before}\n")
