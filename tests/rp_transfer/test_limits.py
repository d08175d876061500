"""How much host memory is free: as the machine and its control groups say, whichever is least."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rp_transfer import HostLimit, host_limits, resident_bytes, tightest

GIB = 1 << 30
Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file of a machine with 64 GiB, 60 of them available."""

    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")

    write(
        "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemFree: 5 kB\nMemAvailable: {60 << 20} kB\nHugePages_Total: 0"
    )
    return write


MACHINE = HostLimit("the machine", 64 * GIB, 60 * GIB)


@pytest.mark.usefixtures("write")
def test_without_control_groups_the_machine_alone_counts(tmp_path: Path) -> None:
    assert host_limits(tmp_path) == (MACHINE,)


def test_a_group_of_version_2_limits_what_is_free_and_files_pages_are_free(write: Write, tmp_path: Path) -> None:
    write("proc/self/cgroup", "0::/")
    write("sys/fs/cgroup/memory.max", str(16 * GIB))
    write("sys/fs/cgroup/memory.current", str(10 * GIB))
    write("sys/fs/cgroup/memory.stat", f"anon {6 * GIB}\nactive_file {GIB}\ninactive_file {3 * GIB}\nshmem 7")
    limits = host_limits(tmp_path)
    assert limits == (MACHINE, HostLimit("the container", 16 * GIB, 10 * GIB))
    assert tightest(limits) == limits[1]


def test_the_groups_around_a_group_count_too(write: Write, tmp_path: Path) -> None:
    write("proc/self/cgroup", "0::/user.slice/job.scope/step")
    for path, limit in (("user.slice", 8 * GIB), ("user.slice/job.scope", 32 * GIB)):
        write(f"sys/fs/cgroup/{path}/memory.max", str(limit))
        write(f"sys/fs/cgroup/{path}/memory.current", str(GIB))
    write("sys/fs/cgroup/user.slice/job.scope/step/memory.max", "max")
    write("sys/fs/cgroup/user.slice/job.scope/step/memory.current", str(GIB))
    assert [limit.total_bytes for limit in host_limits(tmp_path)[1:]] == [32 * GIB, 8 * GIB]


def test_a_group_of_version_1_counts_what_is_below_it(write: Write, tmp_path: Path) -> None:
    write("proc/self/cgroup", "4:cpu,cpuacct:/elsewhere\n3:memory:/docker/abc\n0::/")
    # Only the container's own group is mounted; its path is the host's.
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", str(4 * GIB))
    write("sys/fs/cgroup/memory/memory.usage_in_bytes", str(3 * GIB))
    write(
        "sys/fs/cgroup/memory/memory.stat", f"inactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}"
    )
    assert host_limits(tmp_path)[1:] == (HostLimit("the container", 4 * GIB, 3 * GIB),)


def test_a_group_without_a_limit_is_none(write: Write, tmp_path: Path) -> None:
    write("proc/self/cgroup", "3:memory:/\n0::/")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    write("sys/fs/cgroup/memory/memory.usage_in_bytes", str(GIB))
    assert host_limits(tmp_path) == (MACHINE,)


def test_a_full_group_has_nothing_free(write: Write, tmp_path: Path) -> None:
    write("proc/self/cgroup", "0::/")
    write("sys/fs/cgroup/memory.max", str(GIB))
    write("sys/fs/cgroup/memory.current", str(GIB + 4096))
    assert tightest(host_limits(tmp_path)) == HostLimit("the container", GIB, 0)


def test_where_nothing_is_told_all_of_the_machine_is_free(tmp_path: Path) -> None:
    (limit,) = host_limits(tmp_path)
    assert limit.total_bytes == limit.free_bytes > 0


def test_this_machine_has_more_than_is_free() -> None:
    assert all(0 <= limit.free_bytes <= limit.total_bytes for limit in host_limits())


def test_pages_of_files_are_resident_but_can_be_dropped(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("VmRSS:\t  100 kB\nRssAnon:\t  10 kB\nRssFile:\t  70 kB\n")
    assert resident_bytes(root=tmp_path) == 100 << 10
    assert resident_bytes(with_files=False, root=tmp_path) == 30 << 10
