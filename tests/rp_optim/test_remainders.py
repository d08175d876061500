"""Remainders of masters on disk: masters in halves read and write them as if they were in memory."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_optim import AdamW, Disk, DiskError, DiskFull, Remainders, SplitMaster, TornState, write_weights
from rp_optim.disk.system import SYSTEM

SIZES = [5000, 300, 7, 0, 5000]


class Broken:
    """A disk whose writes, or reservations, fail while it `is_broken`."""

    def __init__(self) -> None:
        self.is_broken = self.is_full = False

    def write(self, descriptor: int, memory: memoryview, offset: int) -> int:
        if self.is_broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return SYSTEM.write(descriptor, memory, offset)

    def reserve(self, descriptor: int, offset: int, nbytes: int) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        SYSTEM.reserve(descriptor, offset, nbytes)

    def disk(self, folder: Path) -> Disk:
        system = replace(SYSTEM, write=self.write, reserve=self.reserve)
        return Disk(str(folder), block_bytes=1, stripe_bytes=4096, system=system)


def _masters(sizes: list[int], remainders: Remainders | None = None) -> list[SplitMaster]:
    torch.manual_seed(2)
    return [SplitMaster(torch.randn(size).bfloat16(), remainders=remainders) for size in sizes]


def _step(masters: list[SplitMaster], optimizer: AdamW, seed: int) -> None:
    torch.manual_seed(seed)
    for master in masters:
        master.grad = torch.randn(master.shape)
    optimizer.step()


def _steps(masters: list[SplitMaster], optimizer: AdamW, seeds: Iterable[int]) -> None:
    for seed in seeds:
        _step(masters, optimizer, seed)


def _same(ones: list[SplitMaster], others: list[SplitMaster]) -> bool:
    return all(torch.equal(one.joined(), other.joined()) for one, other in zip(ones, others, strict=True))


@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=8),
    block_bytes=st.sampled_from([1, 1000, 9000, 1 << 20]),
    late=st.integers(0, 300),
    state=st.sampled_from(["fp32", "8bit", "disk"]),
)
@settings(max_examples=examples(30), deadline=None)
def test_steps_give_the_masters_of_memory(
    sizes: list[int], block_bytes: int, late: int, state: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    disk = Disk(str(tmp_path_factory.getbasetemp()), block_bytes=block_bytes, stripe_bytes=4096)
    remainders = Remainders(disk)
    trainings: list[list[SplitMaster]] = []
    for store, kind in (
        (None, "fp32" if state == "disk" else state),
        (remainders, disk if state == "disk" else state),
    ):
        masters = _masters(sizes, store)
        optimizer = AdamW(masters, lr=0.01, state=kind)
        _steps(masters, optimizer, range(3))
        masters.append(SplitMaster(torch.ones(late, dtype=torch.bfloat16), remainders=store))
        optimizer.add_param_group({"params": masters[-1:]})
        _steps(masters, optimizer, range(3, 6))
        trainings.append(masters)

    assert _same(*trainings)
    assert remainders.memory_bytes <= 2 * sum(sizes) + 5 * max(block_bytes, *sizes, late) * 2 + 6 * 4096


def test_values_are_read_and_written_in_parts_copied_and_made_whole(tmp_path: Path) -> None:
    remainders = Remainders(Disk(str(tmp_path), block_bytes=100, stripe_bytes=4096))
    masters, twins = _masters(SIZES, remainders), _masters(SIZES)
    values = torch.randn(5000)
    for ones in (masters, twins):
        ones[0].write(0, values[:4000])
        ones[0].write(4000, values[4000:])
        ones[1].start_from(torch.full((300,), 0.3).bfloat16())
        ones[4].write(10, values[:20])
    whole = torch.empty(5000)
    write_weights([masters[0]], [whole])

    assert torch.equal(masters[0].read(100, 4500), values[100:4500])
    assert torch.equal(whole, values)
    assert _same(masters, twins)
    assert torch.equal(copy.deepcopy(masters[0]), values)
    assert [master.rest.nbytes for master in masters] == [0] * 5
    assert torch.equal(masters[0].detach(), values)
    assert not masters[0].is_split
    assert list(tmp_path.iterdir()) == []


def test_memory_holds_a_few_blocks(tmp_path: Path) -> None:
    remainders = Remainders(Disk(str(tmp_path), block_bytes=1, stripe_bytes=4096))
    masters, twins = _masters([5000] * 40, remainders), _masters([5000] * 40)

    _steps(masters, AdamW(masters, lr=0.01), range(3))
    _steps(twins, AdamW(twins, lr=0.01), range(3))

    assert _same(masters, twins)
    # Two blocks of a master each, rounded up to pages; all take 400,000 bytes.
    assert remainders.memory_bytes <= 4 * 12288


def test_a_failed_disk_tears_the_masters_until_each_is_set_anew(tmp_path: Path) -> None:
    system = Broken()
    masters, twins = _masters(SIZES, Remainders(system.disk(tmp_path))), _masters(SIZES)
    optimizer, other = (AdamW(ones, lr=0.01) for ones in (masters, twins))
    _step(masters, optimizer, 0)
    _step(twins, other, 0)
    saved = [twin.joined() for twin in twins]

    system.is_broken = True
    with pytest.raises(DiskError, match="Input/output"):
        _steps(masters, optimizer, range(1, 4))
    system.is_broken = False

    before = [master.upper.clone() for master in masters]
    with pytest.raises(TornState, match="load a state or a checkpoint"):
        _step(masters, optimizer, 4)
    with pytest.raises(TornState):
        masters[0].joined()
    assert all(torch.equal(master.upper, one) for master, one in zip(masters, before, strict=True))
    masters[0].write(0, saved[0])
    assert torch.equal(masters[0].joined(), saved[0])
    with pytest.raises(TornState, match="were lost when the disk failed"):
        masters[1].joined()
    with pytest.raises(TornState, match="were lost when the disk failed"):
        _step(masters, optimizer, 4)
    for master, values in zip(masters[1:], saved[1:], strict=True):
        master.write(0, values)
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    _step(masters, optimizer, 5)
    _step(twins, other, 5)
    assert _same(masters, twins)


def test_a_full_disk_is_named_before_a_step_changes_anything(tmp_path: Path) -> None:
    system = Broken()
    masters = _masters(SIZES, Remainders(system.disk(tmp_path)))
    optimizer, before = AdamW(masters, lr=0.01), [master.upper.clone() for master in masters]

    system.is_full = True
    with pytest.raises(DiskFull, match=str(tmp_path)):
        _step(masters, optimizer, 0)
    assert all(torch.equal(master.upper, one) for master, one in zip(masters, before, strict=True))
    system.is_full = False
    _step(masters, optimizer, 0)
    assert not torch.equal(masters[0].joined(), before[0].float())


def test_no_room_for_new_files_leaves_the_masters_torn(tmp_path: Path) -> None:
    system = Broken()
    masters = _masters([3000, 3000], Remainders(system.disk(tmp_path)))
    optimizer = AdamW(masters, lr=0.01)
    _step(masters, optimizer, 0)
    system.is_broken = True
    with pytest.raises(DiskError):
        _steps(masters, optimizer, range(1, 4))
    system.is_broken, system.is_full = False, True

    with pytest.raises(DiskFull):
        masters[0].write(0, torch.ones(3000))
    with pytest.raises(TornState):
        masters[0].joined()
    system.is_full = False
    for master in masters:
        master.write(0, torch.ones(3000))
    _step(masters, optimizer, 5)


@pytest.mark.parametrize("call", ["read", "write", "reserve", "open"])
@pytest.mark.parametrize("nth", range(0, 24, 3))
def test_whatever_call_fails_values_are_right_or_refused(call: str, nth: int, tmp_path: Path) -> None:
    left = [nth]

    def failing(*args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return getattr(SYSTEM, call)(*args)

    changed: dict[str, Any] = {call: failing}
    disk = Disk(str(tmp_path), block_bytes=1, stripe_bytes=4096, system=replace(SYSTEM, **changed))
    twins = _masters(SIZES)
    other = AdamW(twins, lr=0.01)
    right = 0
    with suppress(DiskError):
        masters = _masters(SIZES, Remainders(disk))
        optimizer = AdamW(masters, lr=0.01)
        for seed in range(4):
            _step(twins, other, seed)
            _step(masters, optimizer, seed)
            assert _same(masters, twins)
            right += 1

    assert (right == 4) == (left[0] >= 0)


def test_directories_without_files_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="is none; make it first"):
        Remainders(Disk(str(tmp_path / "missing")))
