"""Optimizer state on disk: the numbers of state in memory, whatever the disk does."""

from __future__ import annotations

import copy
import errno
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import Fault
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_optim import (
    SGD,
    Adafactor,
    Adam,
    AdamW,
    Disk,
    DiskError,
    DiskFull,
    DiskStalled,
    InvalidOption,
    InvalidParameter,
    Lion,
    Muon,
    Remainders,
    SplitMaster,
    TornState,
    disk_rates,
)
from rp_optim.disk.blocks import Blocks
from rp_optim.disk.memory import Arena
from rp_optim.disk.system import SYSTEM
from rp_optim.disk.volume import Transfer, Volume
from rp_optim.host import HostOptimizer

Make = Callable[..., HostOptimizer]

OPTIMIZERS: dict[str, Make] = {
    "adam": lambda params, **how: Adam(params, lr=0.01, amsgrad=True, **how),
    "adamw": lambda params, **how: AdamW(params, lr=0.01, **how),
    "sgd": lambda params, **how: SGD(params, lr=0.1, momentum=0.9, **how),
    "plain sgd": lambda params, **how: SGD(params, lr=0.1, **how),
    "lion": lambda params, **how: Lion(params, lr=0.01, **how),
    "adafactor": lambda params, **how: Adafactor(params, **how),
    "muon": lambda params, **how: Muon(_groups(params), lr=0.02, ns_dtype=torch.float32, **how),
}


def _groups(params: Sequence[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": [one for one in params if one.dim() == 2]},
        {"params": [one for one in params if one.dim() != 2], "use_muon": False, "lr": 1e-3},
    ]


def _parameters(
    shapes: Sequence[tuple[int, ...]], *, halves: bool = False, remainders: Remainders | None = None
) -> list[torch.nn.Parameter]:
    torch.manual_seed(1)
    values = [torch.randn(shape) for shape in shapes]
    if halves:
        return [SplitMaster(value.bfloat16(), remainders=remainders) for value in values]
    return [torch.nn.Parameter(value) for value in values]


def _train(optimizer: HostOptimizer, steps: Sequence[int]) -> None:
    """Take these steps; each leaves out a parameter."""
    for step in steps:
        torch.manual_seed(step)
        for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            gradient = torch.randn(parameter.shape)
            parameter.grad = None if index == step % 7 else gradient
        optimizer.step()


def _values(parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [one.joined() if isinstance(one, SplitMaster) else one.detach() for one in parameters]


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return one == other


SHAPES = [(40, 3), (7,), (64, 64), (), (0, 4), (33,), (5, 130)]


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_on_disk_is_that_in_memory_to_the_last_bit(
    name: str, kind: Any, halves: bool, tmp_path: Path
) -> None:
    make, disk = OPTIMIZERS[name], Disk(str(tmp_path), kind=kind, block_bytes=3000, stripe_bytes=4096)
    in_memory = _parameters(SHAPES, halves=halves)
    on_disk = _parameters(SHAPES, halves=halves, remainders=Remainders(disk) if halves else None)
    one, other = make(in_memory, state=kind), make(on_disk, state=disk)

    _train(one, range(3))
    _train(other, range(3))
    loaded = make(on_disk, state=f"{kind} disk:{tmp_path},{tmp_path}")
    loaded.load_state_dict(other.deferred_state_dict())
    copied, then = copy.deepcopy(loaded), copy.deepcopy(other.state_dict())
    _train(one, range(3, 6))
    _train(loaded, range(3, 6))

    assert all(map(torch.equal, _values(in_memory), _values(on_disk)))
    assert _same(one.state_dict(), loaded.state_dict())
    assert _same(copied.state_dict(), then)
    assert list(tmp_path.iterdir()) == []


@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=2).map(tuple), min_size=1, max_size=12),
    block_bytes=st.sampled_from([1, 100, 5000, 1 << 20]),
    stripe_bytes=st.sampled_from([1, 4096, 3 * 4096, 1 << 20]),
    directories=st.integers(1, 3),
    kind=st.sampled_from(["fp32", "bf16", "8bit"]),
)
@settings(max_examples=examples(60), deadline=None)
def test_any_parameters_and_blocks_give_the_numbers_of_memory(
    shapes: list[tuple[int, ...]],
    block_bytes: int,
    stripe_bytes: int,
    directories: int,
    kind: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = str(tmp_path_factory.getbasetemp())
    disk = Disk(*[folder] * directories, kind=kind, block_bytes=block_bytes, stripe_bytes=stripe_bytes)
    in_memory, on_disk = _parameters(shapes), _parameters(shapes)

    one, other = AdamW(in_memory, state=kind), AdamW(on_disk, state=disk)
    _train(one, range(4))
    _train(other, range(4))

    assert all(map(torch.equal, in_memory, on_disk))
    assert _same(one.state_dict(), other.state_dict())


@given(
    sizes=st.lists(st.integers(0, 20000), min_size=1, max_size=9),
    memory_bytes=st.integers(0, 90000),
    stripe_bytes=st.sampled_from([4096, 12288, 1 << 20]),
    uses=st.lists(st.tuples(st.integers(0, 8), st.booleans(), st.booleans()), max_size=40),
)
@settings(max_examples=examples(150), deadline=None)
def test_blocks_have_what_was_written_last_in_any_order(
    sizes: list[int],
    memory_bytes: int,
    stripe_bytes: int,
    uses: list[tuple[int, bool, bool]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = str(tmp_path_factory.getbasetemp())
    blocks = Blocks(Volume([folder, folder], stripe_bytes=stripe_bytes), sizes, memory_bytes)
    known: dict[int, torch.Tensor] = {}

    for number, (use, changes, begins) in enumerate(uses):
        if begins:
            blocks.begin_step()
        memory = blocks.take(index := use % len(sizes))[: sizes[index]]
        if index in known:
            assert torch.equal(memory, known[index])
        if changes:
            memory.copy_(torch.arange(sizes[index]) * (number + 1) % 251)
            known[index] = memory.clone()
        blocks.give_back(changed=changes)

    blocks.drain()
    assert blocks.memory_bytes <= max(memory_bytes, *sizes) + 4096


# Faults


SMALL = [(50, 30), (2000,), (40, 40), (1700,), (64, 64)]


def _faulty(fault: Fault, folder: Path, **how: Any) -> tuple[list[torch.nn.Parameter], AdamW]:
    # So small that each step reads and writes all.
    disk = Disk(str(folder), **{"block_bytes": 1, "stripe_bytes": 4096, "system": fault.system, **how})
    parameters = _parameters(SMALL)
    return parameters, AdamW(parameters, lr=0.01, state=disk)


@pytest.mark.parametrize("nth", [0, 1, 2, 7, 19, 40])
@pytest.mark.parametrize(
    ("kind", "how", "error"),
    [
        ("read", "EIO", DiskError),
        ("read", "none", DiskError),
        ("write", "EIO", DiskError),
        ("write", "none", DiskError),
        ("write", "ENOSPC", DiskFull),
        ("reserve", "ENOSPC", DiskFull),
        ("open", "EACCES", DiskError),
    ],
)
def test_a_failed_call_is_named_and_its_state_refused_until_it_is_loaded(
    kind: str, how: str, error: type[Exception], nth: int, tmp_path: Path
) -> None:
    fault, reference, parameters, optimizers = Fault(kind, how, nth), _parameters(SMALL), [], []
    twin = AdamW(reference, lr=0.01)

    def train() -> None:
        made, optimizer = _faulty(fault, tmp_path)
        parameters.extend(made)
        optimizers.append(optimizer)
        for step in range(3):
            _train(optimizer, [step])
            _train(twin, [step])
            assert all(map(torch.equal, parameters, reference))
        optimizer.state_dict()
        if not fault.has_struck:
            raise error(str(tmp_path))

    with pytest.raises(DiskError) as raised:
        train()

    assert type(raised.value) is error
    assert str(tmp_path) in str(raised.value)
    if not optimizers:
        return
    fault.is_over, optimizer = True, optimizers[0]
    if optimizer.state and fault.has_struck and kind in ("read", "write"):
        with pytest.raises(TornState, match="load a state"):
            _train(optimizer, [5])
        with pytest.raises(TornState):
            optimizer.state_dict()
    for parameter, one in zip(parameters, reference, strict=True):
        parameter.data.copy_(one)
    optimizer.load_state_dict(copy.deepcopy(twin.state_dict()))
    _train(optimizer, range(6, 8))
    _train(twin, range(6, 8))
    assert all(map(torch.equal, parameters, reference))


@pytest.mark.parametrize("how", ["short", "delay"])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_short_and_slow_calls_change_nothing(kind: str, how: str, tmp_path: Path) -> None:
    fault = Fault(kind, how, 2)
    parameters, optimizer = _faulty(fault, tmp_path, stripe_bytes=1 << 20)
    reference = _parameters(SMALL)

    _train(optimizer, range(3))
    _train(AdamW(reference, lr=0.01), range(3))

    assert fault.has_struck
    assert all(map(torch.equal, parameters, reference))


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_disk_that_does_not_answer_is_named(kind: str, tmp_path: Path) -> None:
    fault = Fault(kind, "stall", 2)
    _, optimizer = _faulty(fault, tmp_path, stall_s=0.2)

    with pytest.raises(DiskStalled, match=f"the disk of {tmp_path} has not answered for 0.2 s"):
        _train(optimizer, range(3))

    with pytest.raises(TornState):
        _train(optimizer, [4])
    fault.is_over = True


def test_a_disk_that_is_slow_has_not_stalled(tmp_path: Path) -> None:
    volume = Volume(
        [str(tmp_path)], stripe_bytes=4096, threads=1, stall_s=0.1, system=Fault("write", "delay", 0).system
    )
    volume.reserve(1 << 19)

    memory = Arena(1 << 19).bytes_at(0, 1 << 19)

    # Before the last one there are 127 parts of 2 ms each.
    transfers = [volume.write(0, memory[:-4096]), volume.write((1 << 19) - 4096, memory[-4096:])]
    transfers[1].wait()

    assert all(transfer.done() for transfer in transfers)


@pytest.mark.parametrize("missing", ["O_TMPFILE", "O_DIRECT"])
def test_file_systems_without_nameless_files_or_direct_transfers_serve(missing: str, tmp_path: Path) -> None:
    def opened(path: str, flags: int, mode: int) -> int:
        if missing == "O_TMPFILE" and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return os.open(path, flags, mode)

    alignment = (lambda _: 0) if missing == "O_DIRECT" else SYSTEM.alignment
    left = tmp_path / f"roundpipe-{os.getuid()}-0123.working-state"
    left.write_bytes(b"of a process that was killed")
    fault = Fault("read", "EIO", 10**9)
    fault.system = replace(SYSTEM, open=opened, alignment=alignment)
    parameters, optimizer = _faulty(fault, tmp_path)
    reference = _parameters(SMALL)

    _train(optimizer, range(3))
    _train(AdamW(reference, lr=0.01), range(3))

    assert all(map(torch.equal, parameters, reference))
    if missing == "O_DIRECT":
        return
    (path,) = tmp_path.iterdir()
    assert path != left
    optimizer.state_dict()
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    with pytest.raises(DiskError, match="was changed at byte"):
        _train(optimizer, range(3, 6))
    del optimizer
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_a_place_is_refused(tmp_path: Path) -> None:
    parameters = _parameters(SMALL)

    for state in ("disc", "disk", "disk:", "disk:/a,,/b", "4bit disk:/tmp"):
        with pytest.raises(InvalidOption):
            AdamW(parameters, state=state)
    with pytest.raises(DiskError, match="make it first"):
        AdamW(parameters, state=f"disk:{tmp_path / 'missing'}")


KILLED = """
import sys, torch
from rp_optim import AdamW, Disk
parameters = [torch.nn.Parameter(torch.zeros(5000)) for _ in range(20)]
optimizer = AdamW(parameters, state=Disk(sys.argv[1], block_bytes=1))
while True:
    for parameter in parameters:
        parameter.grad = torch.ones(5000)
    optimizer.step()
    print(flush=True)
"""


@pytest.mark.later
@pytest.mark.parametrize("times", [1, pytest.param(50, marks=pytest.mark.nightly)])
@pytest.mark.timeout(600)
def test_a_killed_process_leaves_nothing(times: int, tmp_path: Path) -> None:
    for _ in range(times):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        process.wait()
        process.stdout.close()

    assert list(tmp_path.iterdir()) == []


# State of twelve blocks, of which memory holds a few.
MANY = [(4096,)] * 12


def _many(folder: Path, **options: Any) -> tuple[list[torch.nn.Parameter], HostOptimizer]:
    parameters = _parameters(MANY)
    return parameters, AdamW(parameters, lr=0.01, state=Disk(str(folder), block_bytes=4096, stall_s=20, **options))


def _pair(folder: Path) -> tuple[list[torch.nn.Parameter], list[HostOptimizer]]:
    """The same parameters twice, with optimizers whose state is on disk and in memory."""
    parameters, optimizer = _many(folder)
    reference = _parameters(MANY)
    return [*parameters, *reference], [optimizer, AdamW(reference, lr=0.01)]


def test_parameters_that_come_later_find_the_others_state(tmp_path: Path) -> None:
    parameters, optimizers = _pair(tmp_path)
    for optimizer in optimizers:
        _train(optimizer, range(2))
        late = torch.nn.Parameter(torch.ones(8))
        optimizer.add_param_group({"params": [late]})
        _train(optimizer, range(2, 4))
        parameters.append(late)

    assert all(map(torch.equal, [*parameters[:12], parameters[-2]], [*parameters[12:24], parameters[-1]]))


def test_parameters_that_leave_and_come_back_find_their_own(tmp_path: Path) -> None:
    parameters, optimizers = _pair(tmp_path)
    for optimizer in optimizers:
        _train(optimizer, range(2))
        (group,) = optimizer.param_groups
        frozen, group["params"] = group["params"][:1], group["params"][1:]
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(8))]})
        _train(optimizer, range(2, 4))
        optimizer.add_param_group({"params": frozen})
        _train(optimizer, range(4, 6))

    assert all(map(torch.equal, parameters[:12], parameters[12:]))


def test_an_optimizer_may_load_its_own_deferred_state(tmp_path: Path) -> None:
    parameters, optimizers = _pair(tmp_path)
    for optimizer in optimizers:
        _train(optimizer, range(2))
        optimizer.load_state_dict(optimizer.deferred_state_dict())
        _train(optimizer, range(2, 4))

    assert all(map(torch.equal, parameters[:12], parameters[12:]))


def test_a_deferred_state_is_not_read_after_a_later_step(tmp_path: Path) -> None:
    _, optimizer = _many(tmp_path)
    _train(optimizer, range(2))
    deferred = optimizer.deferred_state_dict()["state"][3]["exp_avg"]
    deferred.read()
    _train(optimizer, [2])

    with pytest.raises(DiskError, match="'exp_avg' of a deferred state dict is read after a later step"):
        deferred.read()


def test_after_a_load_that_failed_steps_are_refused(tmp_path: Path) -> None:
    _, optimizer = _many(tmp_path)
    _train(optimizer, range(2))
    wrong = copy.deepcopy(optimizer.state_dict())
    wrong["state"][7]["exp_avg"] = torch.zeros(5)

    with pytest.raises(InvalidParameter, match="'exp_avg' must have the shape"):
        optimizer.load_state_dict(wrong)

    with pytest.raises(TornState, match="a state was loaded in part only"):
        _train(optimizer, [2])


def _is_open(descriptor: int, inode: int) -> bool:
    try:
        return os.fstat(descriptor).st_ino == inode
    except OSError:
        return False


def test_where_there_is_room_for_one_state_another_can_be_loaded(tmp_path: Path) -> None:
    # By file: a descriptor's number is used again.
    reserved: dict[tuple[int, int], int] = {}

    def reserve(descriptor: int, offset: int, nbytes: int) -> None:
        file = (descriptor, os.fstat(descriptor).st_ino)
        # What was closed is free.
        living = sum(size for one, size in reserved.items() if _is_open(*one) and one != file)
        if living + nbytes > 1 << 19:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(descriptor, offset, nbytes)
        reserved[file] = nbytes

    parameters, optimizer = _many(tmp_path, system=replace(SYSTEM, reserve=reserve), stripe_bytes=4096)
    _train(optimizer, range(2))
    state, values = copy.deepcopy(optimizer.state_dict()), [one.detach().clone() for one in parameters]
    _train(optimizer, [2])
    wanted = [one.detach().clone() for one in parameters]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data.copy_(value)

    optimizer.load_state_dict(state)
    _train(optimizer, [2])

    assert all(map(torch.equal, parameters, wanted))


def test_where_space_cannot_be_reserved_zeros_take_it(tmp_path: Path) -> None:
    def reserve(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    volume = Volume([str(tmp_path)], system=replace(SYSTEM, reserve=reserve), stripe_bytes=1 << 20)
    volume.reserve(9 << 20)

    assert os.fstat(volume.files[0].descriptor).st_blocks * 512 >= 9 << 20


def test_a_disk_is_measured_in_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def reserve(_: Volume, nbytes: int) -> None:
        asked.append(nbytes)
        if nbytes > 20 << 20:
            raise DiskFull("full")

    monkeypatch.setattr(Volume, "reserve", reserve)

    assert disk_rates([str(tmp_path)], seconds=0.001).write_gb_s > 0
    assert asked == [128 << 20, 64 << 20, 32 << 20, 16 << 20]


def test_time_in_which_the_process_was_stopped_is_no_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = Volume([str(tmp_path)])
    now_s, looks = [0.0], [0]

    class Part:
        def wait(self, seconds: float) -> bool:
            looks[0] += 1
            # Stopped for an hour at the tenth look; ended soon after it goes on.
            now_s[0] += 3600 if looks[0] == 10 else seconds
            return looks[0] == 20

        def done(self) -> bool:
            return False

        def result(self) -> None:
            pass

    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    part: Any = Part()

    Transfer(((part, str(tmp_path), volume._threads[0]),)).wait()

    assert looks == [20]


@pytest.mark.later
def test_a_forked_child_changes_nothing(tmp_path: Path) -> None:
    program = f"""
import os, torch, sys
from rp_optim import AdamW, Disk, DiskError
parameter = torch.nn.Parameter(torch.ones(64))
optimizer = AdamW([parameter], state=Disk({str(tmp_path)!r}))
parameter.grad = torch.ones(64)
optimizer.step()
before = optimizer.state_dict()["state"][0]["exp_avg"]
if not (child := os.fork()):
    try:
        optimizer.step()
    except DiskError:
        os._exit(7)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], before)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_a_step_writes_each_block_once_however_its_parameters_come(layer_by_layer: bool, tmp_path: Path) -> None:
    parameters = _parameters([(16, 64)] * 64)
    # Four parameters a block, sixteen blocks, of which memory holds four.
    optimizer = AdamW(parameters, lr=0.01, state=Disk(str(tmp_path), block_bytes=1 << 15))
    place: Any = optimizer._place
    for step in range(3):
        begun = place.blocks.bytes_written
        _train(optimizer, [step]) if not layer_by_layer else _step_each(optimizer, parameters)
        place.blocks.drain()
        assert place.blocks.bytes_written - begun == place.blocks.volume_bytes


def _step_each(optimizer: HostOptimizer, parameters: Sequence[torch.nn.Parameter]) -> None:
    for parameter in reversed(parameters):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        parameter.grad = None


@pytest.mark.parametrize("state", [None, b"fp32", 8])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(InvalidOption, match="state"):
        AdamW(_parameters(SMALL), state=state)
