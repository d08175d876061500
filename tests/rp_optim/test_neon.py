"""The kernels for arm64, run by an emulator: `scripts/test-neon`."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ABSENT = [name for name in ("qemu-aarch64", "aarch64-linux-gnu-gcc", "cc") if shutil.which(name) is None]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compares arm64 with x86-64, by emulating the former")
@pytest.mark.skipif(bool(ABSENT), reason=f"needs {', '.join(ABSENT)}: CONTRIBUTING.md names the packages")
def test_the_kernels_for_arm64_give_the_bits_of_x86() -> None:
    done = subprocess.run([ROOT / "scripts/test-neon"], capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert {line.split(",")[0] for line in done.stdout.splitlines()} >= {"aarch64 scalar", "aarch64 neon"}
