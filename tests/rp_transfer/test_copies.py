"""Conveyors: whole blocks in chunks, two under way, through a ring where memory is not pinned."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_transfer import (
    Backend,
    Conveyor,
    CpuBackend,
    Device,
    Event,
    PinningWarning,
    Unordered,
    open_backend,
)
from rp_transfer.testing import Operation, Recording

CHUNK, SLOT = 256, 64


def quicken(stream: Any) -> None:
    """Let the stream's work be over as soon as it is recorded, as on an idle device."""
    record = stream.record

    def record_and_wait() -> Event:
        event: Event = record()
        event.synchronize()
        return event

    stream.record = record_and_wait


def conveyor(backend: CpuBackend | Recording, device: Device, way: str, *, quick: bool = False) -> Conveyor:
    if quick:
        quicken(getattr(device, way))
    return Conveyor(backend, device, getattr(device, way), chunk_bytes=CHUNK, slot_bytes=SLOT)


def host(backend: Backend, values: torch.Tensor, pinned: bool) -> torch.Tensor:
    if not pinned:
        return values.clone()
    held = backend.host_empty(values.shape, values.dtype)
    return held.copy_(values)


def on_device(backend: CpuBackend, device: Device, values: torch.Tensor) -> torch.Tensor:
    """Values that `gradients_out` may read."""
    stream = device.gradients_out
    there = device.empty(values.shape, values.dtype, stream=stream)
    source = host(backend, values, pinned=True)
    stream.copy(there, source)
    stream.record().synchronize()
    return there


sizes = st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000])
values = st.builds(
    lambda n, seed: torch.randn(n, generator=torch.Generator().manual_seed(seed)), sizes, st.integers(0, 9)
)


@settings(deadline=None)
@given(blocks=st.lists(st.tuples(values, st.booleans()), max_size=6), quick=st.booleans())
def test_blocks_arrive_whole_pinned_or_not(blocks: list[tuple[torch.Tensor, bool]], quick: bool) -> None:
    backend = CpuBackend(1)
    device = backend.devices[0]
    carrier = conveyor(backend, device, "weights_in", quick=quick)
    sources = [host(backend, block, pinned) for block, pinned in blocks]
    there = [device.empty(block.shape, block.dtype, stream=device.weights_in) for block, _ in blocks]
    for destination, source in zip(there, sources, strict=True):
        carrier.upload(destination, source)
    device.compute.wait(carrier.record())
    device.compute.touch(read=there)
    assert all(torch.equal(found, block) for found, (block, _) in zip(there, blocks, strict=True))


@settings(deadline=None)
@given(blocks=st.lists(st.tuples(values, st.booleans(), st.booleans()), max_size=6), quick=st.booleans())
def test_blocks_come_home_rounded_to_the_nearest(
    blocks: list[tuple[torch.Tensor, bool, bool]], quick: bool
) -> None:
    backend = CpuBackend(1)
    device = backend.devices[0]
    carrier = conveyor(backend, device, "gradients_out", quick=quick)
    sources = [on_device(backend, device, block) for block, _, _ in blocks]
    wanted = [block.bfloat16() if narrow else block for block, _, narrow in blocks]
    homes = [
        host(backend, torch.zeros_like(want), pinned) for want, (_, pinned, _) in zip(wanted, blocks, strict=True)
    ]
    for home, source in zip(homes, sources, strict=True):
        carrier.download(home, source)
    carrier.drain()
    backend.host_touch(read=homes)
    assert all(torch.equal(home, want) for home, want in zip(homes, wanted, strict=True))


@settings(deadline=None)
@given(
    numel=sizes,
    seeds=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    pinned=st.booleans(),
    quick=st.booleans(),
)
def test_additions_are_the_hosts_own(numel: int, seeds: list[int], pinned: bool, quick: bool) -> None:
    backend = CpuBackend(1)
    device = backend.devices[0]
    carrier = conveyor(backend, device, "gradients_out", quick=quick)
    total, wanted = host(backend, torch.ones(numel), pinned), torch.ones(numel)
    for seed in seeds:
        more = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        carrier.add(total, on_device(backend, device, more))
        wanted = wanted + more
    assert torch.equal(total, wanted)


@settings(deadline=None)
@given(
    numel=sizes, pinned=st.booleans(), quick=st.booleans(), dtype=st.sampled_from([torch.float32, torch.bfloat16])
)
def test_pieces_of_several_blocks_are_combined_with_what_arrives_rounded(
    numel: int, pinned: bool, quick: bool, dtype: torch.dtype
) -> None:
    backend = CpuBackend(1)
    device = backend.devices[0]
    totals = [host(backend, torch.full((numel,), value, dtype=dtype), pinned) for value in (1.0, 2.0)]
    more = torch.randn(numel, generator=torch.Generator().manual_seed(0))

    def combine(pieces: Sequence[torch.Tensor], arrived: torch.Tensor) -> None:
        assert len(pieces) == 2
        pieces[0].add_(arrived)
        pieces[1].mul_(arrived)

    conveyor(backend, device, "gradients_out", quick=quick).combine(
        totals, on_device(backend, device, more), combine
    )
    backend.host_touch(read=totals)
    assert torch.equal(totals[0], torch.ones(numel, dtype=dtype) + more.to(dtype))
    assert torch.equal(totals[1], more.to(dtype) * 2)


@pytest.mark.parametrize("pinned", [True, False])
def test_what_is_rounded_lives_until_its_last_byte_has_left(pinned: bool) -> None:
    backend = CpuBackend(1)
    device = backend.devices[0]
    carrier = Conveyor(backend, device, device.gradients_out, chunk_bytes=1 << 20, slot_bytes=1 << 20)
    block = torch.randn(1 << 20)
    home = host(backend, torch.zeros(1 << 20, dtype=torch.bfloat16), pinned)
    there = on_device(backend, device, block)
    carrier.download(home, there)
    carrier.drain()
    backend.host_touch(read=[home])
    assert torch.equal(home, block.bfloat16())


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("shapes", [((4, 2), (8,)), ((8,), (4, 2)), ((2, 4), (4, 2)), ((4, 2), (4, 2))])
def test_blocks_of_any_shape_are_copied_in_the_order_of_their_elements(shapes: Any, pinned: bool) -> None:
    backend = CpuBackend(1)
    device = backend.devices[0]
    carrier = Conveyor(backend, device, device.weights_in, chunk_bytes=11, slot_bytes=12)
    here, back = (host(backend, torch.arange(8.0).view(shapes[0]) + more, pinned) for more in (0, 1))
    there = device.empty(shapes[1], torch.float32, stream=device.weights_in)
    carrier.upload(there, here)
    carrier.download(back, there)
    carrier.drain()
    backend.host_touch(read=[here, back])
    assert torch.equal(back, here)
    carrier.add(back, there)
    assert torch.equal(back, 2 * here)
    carrier.combine([back], there, lambda totals, arrived: totals[0].sub_(arrived))
    assert torch.equal(back, here)


def test_sizes_and_dtypes_that_do_not_fit_are_refused() -> None:
    backend = CpuBackend(1)
    device = backend.devices[0]
    carrier = conveyor(backend, device, "gradients_out")
    there = on_device(backend, device, torch.ones(8))
    for pinned in (True, False):
        with pytest.raises(ValueError, match=r"upload needs 8 numbers of torch.float32, but the source has 9"):
            carrier.upload(there, host(backend, torch.ones(9), pinned))
        with pytest.raises(ValueError, match=r"download needs 9 numbers"):
            carrier.download(host(backend, torch.ones(9), pinned), there)
        with pytest.raises(ValueError, match=r"add needs 8 numbers of torch.bfloat16"):
            carrier.add(host(backend, torch.ones(8).bfloat16(), pinned), there)
        for other, message in ((torch.ones(9), "9 numbers of torch.float32"), (torch.ones(8).half(), "8 numbers")):
            totals = [host(backend, total, pinned) for total in (torch.ones(8), other)]
            with pytest.raises(ValueError, match=f"combine needs {message}"):
                carrier.combine(totals, there, nothing)
        with pytest.raises(ValueError, match="destination of a copy must be plain contiguous memory"):
            carrier.upload(there[::2], host(backend, torch.ones(4), pinned))
    with pytest.raises(ValueError, match="source of a copy must be plain contiguous memory"):
        carrier.download(host(backend, torch.ones(4), True), there[::2])
    with pytest.raises(ValueError, match="at least one block"):
        carrier.combine((), there, nothing)
    with pytest.raises(ValueError, match="must be >= 1"):
        Conveyor(backend, device, device.weights_in, slot_bytes=0)


def test_a_chunk_does_not_wait_for_an_urgent_copy_behind_one_that_cannot_start() -> None:
    recording, kept = Recording(CpuBackend(2)), list[torch.Tensor]()
    device, other = recording.devices
    elsewhere = other.empty((1000,), torch.float32, stream=other.weights_in)
    source = host(recording, torch.randn(1000), pinned=True)
    other.weights_in.copy(elsewhere, source)
    late, early = other.weights_in.record(), other.results_out.record()
    early.synchronize()
    carrier = conveyor(recording, device, "weights_in")
    for ready in (late, early):
        device.activations_in.wait(ready)
        urgent_copy(recording, kept)
        carrier.let_pass(ready, device.activations_in.record())
    there = device.empty((1000,), torch.float32, stream=device.weights_in)
    carrier.upload(there, source)
    carrier.record().synchronize()
    assert not late.query()


def test_no_more_than_two_chunks_are_under_way() -> None:
    backend = CpuBackend(1)
    device = backend.devices[0]
    carrier = conveyor(backend, device, "weights_in")
    source = host(backend, torch.randn(10 * CHUNK // 4), pinned=True)
    there = device.empty(source.shape, source.dtype, stream=device.weights_in)
    carrier.upload(there, source)
    waiting = sum(move.destination.nbytes for move in backend.streams.queued())
    assert 0 < waiting <= 2 * CHUNK
    arrived = 10 * CHUNK - waiting
    assert torch.equal(there[: arrived // 4], source[: arrived // 4])
    assert there[arrived // 4 :].isnan().all()


def test_many_small_blocks_are_not_under_way_all_at_once() -> None:
    # Each costs as much of the link's time as 128 KiB do.
    backend = CpuBackend(1)
    device = backend.devices[0]
    carrier = Conveyor(backend, device, device.weights_in, chunk_bytes=1 << 20)
    blocks = [host(backend, torch.ones(1), pinned=True) for _ in range(100)]
    there = device.empty((100,), torch.float32, stream=device.weights_in)
    for index, block in enumerate(blocks):
        carrier.upload(there[index : index + 1], block)
    assert sum(1 for _ in backend.streams.queued()) <= 2 * ((1 << 20) + (128 << 10)) // (128 << 10)


def test_chunks_are_no_larger_than_asked_for() -> None:
    recording = Recording(CpuBackend(1))
    device = recording.devices[0]
    source = host(recording, torch.randn(1000), pinned=True)
    carrier = conveyor(recording, device, "weights_in")
    there = device.empty((1000,), torch.float32, stream=device.weights_in)
    carrier.upload(there, source)
    copies: list[Operation] = recording.operations()
    assert sum(copy.nbytes for copy in copies) == 4000
    assert max(copy.nbytes for copy in copies) <= CHUNK


def urgent_copy(recording: Recording, kept: list[torch.Tensor]) -> None:
    """On `activations_in`, from memory that stays."""
    device = recording.devices[0]
    kept += [host(recording, torch.ones(8), pinned=True)]
    kept += [device.empty((8,), torch.float32, stream=device.activations_in)]
    device.activations_in.copy(kept[-1], kept[-2])


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_chunk_lets_an_urgent_copy_pass_that_can_start_and_no_other(is_ready: bool) -> None:
    recording, kept = Recording(CpuBackend(2)), list[torch.Tensor]()
    device, other = recording.devices
    source = host(recording, torch.randn(1000), pinned=True)
    there = device.empty((1000,), torch.float32, stream=device.weights_in)
    elsewhere = other.empty((1000,), torch.float32, stream=other.weights_in)
    other.weights_in.copy(elsewhere, source)
    made = other.weights_in.record()
    if is_ready:
        made.synchronize()
    device.activations_in.wait(made)
    urgent_copy(recording, kept)
    carrier = conveyor(recording, device, "weights_in")
    carrier.let_pass(made, device.activations_in.record())
    carrier.upload(there, source)
    urgent, *chunks = [found for found in recording.operations() if found.device == 0]
    assert urgent.stream == "cpu:0/activations_in"
    assert [chunk.may_overlap(urgent) for chunk in chunks] == [not is_ready] * len(chunks)


def test_urgent_copies_of_long_ago_are_forgotten() -> None:
    recording, kept = Recording(CpuBackend(1)), list[torch.Tensor]()
    device = recording.devices[0]
    carrier = conveyor(recording, device, "weights_in")
    for _ in range(300):
        urgent_copy(recording, kept)
        carrier.let_pass(None, device.activations_in.record())
    assert len(carrier._urgent) <= 64


def test_the_ring_stays_small_and_is_used_again() -> None:
    backend = CpuBackend(1)
    device = backend.devices[0]
    carrier, before = conveyor(backend, device, "weights_in"), backend.host_memory().used_bytes
    for _ in range(50):
        there = device.empty((1000,), torch.float32, stream=device.weights_in)
        carrier.upload(there, torch.ones(1000))
        carrier.drain()
    assert 0 < backend.host_memory().used_bytes - before <= 4 * SLOT


def test_the_ring_takes_no_more_than_it_carries_and_grows_with_it() -> None:
    backend = CpuBackend(1)
    device = backend.devices[0]
    carrier, before = conveyor(backend, device, "weights_in"), backend.host_memory().used_bytes
    for numel in (1, 2, 8, 16, 16):
        there = device.empty((numel,), torch.float32, stream=device.weights_in)
        carrier.upload(there, source := torch.randn(numel))
        carrier.record().synchronize()
        assert torch.equal(there, source)
        assert backend.host_memory().used_bytes - before == 4 * numel


@pytest.mark.parametrize("way", ["upload", "download"])
def test_carrying_a_thousand_times_keeps_nothing(way: str) -> None:
    backend = CpuBackend(1)
    device = backend.devices[0]
    carrier = conveyor(backend, device, "gradients_out")
    there = on_device(backend, device, torch.ones(200))
    home = host(backend, torch.zeros(200, dtype=torch.float32 if way == "upload" else torch.bfloat16), pinned=True)
    used = (backend.host_memory().used_bytes, device.memory().used_bytes)
    for _ in range(1000):
        carrier.upload(there, home) if way == "upload" else carrier.download(home, there)
    carrier.drain()
    assert (backend.host_memory().used_bytes, device.memory().used_bytes) == used
    assert not list(backend.streams.queued())


def nothing(*_: object) -> None:
    pass


def read_too_early(backend: CpuBackend, device: Device) -> None:
    there = device.empty((100,), torch.float32, stream=device.weights_in)
    carrier = conveyor(backend, device, "weights_in")
    carrier.upload(there, host(backend, torch.ones(100), pinned=True))
    device.compute.touch(read=[there], what="layer")


def change_the_source_too_early(backend: CpuBackend, device: Device) -> None:
    source = host(backend, torch.ones(100), pinned=True)
    there = device.empty((100,), torch.float32, stream=device.weights_in)
    conveyor(backend, device, "weights_in").upload(there, source)
    backend.host_touch(write=[source])


def read_home_too_early(backend: CpuBackend, device: Device) -> None:
    home = host(backend, torch.zeros(100), pinned=True)
    conveyor(backend, device, "gradients_out").download(home, on_device(backend, device, torch.ones(100)))
    backend.host_touch(read=[home])


def combine_while_it_is_read(backend: CpuBackend, device: Device) -> None:
    totals = [host(backend, torch.ones(100), pinned=True) for _ in range(2)]
    there = device.empty((100,), torch.float32, stream=device.weights_in)
    conveyor(backend, device, "weights_in").upload(there, totals[1])
    more = on_device(backend, device, torch.ones(100))
    conveyor(backend, device, "gradients_out").combine(
        totals, more, lambda pieces, arrived: pieces[1].add_(arrived)
    )


def add_before_it_is_made(backend: CpuBackend, device: Device) -> None:
    there = device.empty((100,), torch.float32, stream=device.compute)
    device.compute.touch(write=[there], what="backward")
    conveyor(backend, device, "gradients_out").add(host(backend, torch.zeros(100), pinned=True), there)


@pytest.mark.parametrize(
    "mistake",
    [
        read_too_early,
        change_the_source_too_early,
        read_home_too_early,
        add_before_it_is_made,
        combine_while_it_is_read,
    ],
)
def test_a_forgotten_wait_around_a_conveyor_is_noticed(mistake: Callable[[CpuBackend, Device], None]) -> None:
    backend = CpuBackend(1)
    with pytest.raises(Unordered):
        mistake(backend, backend.devices[0])


def test_where_pinning_is_refused_blocks_still_arrive_and_it_is_said_once() -> None:
    backend = CpuBackend(1, pin_limit_bytes=6 * SLOT)
    device = backend.devices[0]
    with pytest.warns(PinningWarning, match="go over the limit of 384"):
        source = host(backend, torch.randn(1000), pinned=True)
    assert not backend.is_pinned(source)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        there = device.empty((1000,), torch.float32, stream=device.weights_in)
        carrier = conveyor(backend, device, "weights_in")
        carrier.upload(there, source)
        device.gradients_out.wait(carrier.record())
        home = backend.host_empty((1000,), torch.float32)
        conveyor(backend, device, "gradients_out").download(home, there)
    assert torch.equal(home, source)


@pytest.fixture
def cuda() -> Iterator[Backend]:
    backend = open_backend("cuda:0")
    backend.devices[0].attach_thread()
    yield backend
    backend.close()


@pytest.mark.cuda
def test_a_gpu_gets_and_gives_back_large_blocks_pinned_or_not(cuda: Backend) -> None:
    device = cuda.devices[0]
    up, down = (Conveyor(cuda, device, stream) for stream in (device.weights_in, device.gradients_out))
    for numel in (1, 1000, (4 << 20) + 1, 25_000_003):
        for pinned in (True, False):
            block = torch.randn(numel)
            there = device.empty((numel,), torch.float32, stream=device.weights_in)
            source = host(cuda, block, pinned)
            up.upload(there, source)
            device.gradients_out.wait(up.record())
            home, narrow, total = (
                host(cuda, value, pinned) for value in (torch.zeros(numel), torch.zeros(numel).bfloat16(), block)
            )
            down.download(home, there)
            down.download(narrow, there)
            down.add(total, there)
            down.drain()
            up.drain()
            assert torch.equal(home, block)
            assert torch.equal(narrow, block.bfloat16())
            assert torch.equal(total, block + block)


@pytest.mark.cuda
def test_a_gpu_copies_registered_storages_that_share_pages(cuda: Backend) -> None:
    device = cuda.devices[0]
    carrier = Conveyor(cuda, device, device.weights_in)
    tensors = [torch.randn(numel) for numel in (10, 300, 5000, 70_000, 3_000_000) * 20]
    held = cuda.register(tensors)
    assert all(map(cuda.is_pinned, tensors))
    there = [device.empty(t.shape, t.dtype, stream=device.weights_in) for t in tensors]
    for destination, source in zip(there, tensors, strict=True):
        carrier.upload(destination, source)
    carrier.drain()
    assert all(torch.equal(found.cpu(), tensor) for found, tensor in zip(there, tensors, strict=True))
    pinned = cuda.host_memory().pinned_bytes
    del held
    assert not any(map(cuda.is_pinned, tensors))
    assert cuda.host_memory().pinned_bytes <= pinned - sum(tensor.nbytes for tensor in tensors)


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_what_the_driver_refuses_to_pin_is_staged_and_nothing_else_is_harmed(
    cuda: Backend, tmp_path: Path
) -> None:
    device, values = cuda.devices[0], torch.randn(3_000_000)
    (tmp_path / "weights").write_bytes(values.numpy().tobytes())
    with open(tmp_path / "weights", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
    tensor = torch.frombuffer(mapped, dtype=torch.float32)
    with pytest.warns(PinningWarning):
        held = cuda.register([tensor])
    assert not cuda.is_pinned(tensor)
    assert torch.ones(3, device="cuda:0").sum() == 3
    there = device.empty(tensor.shape, tensor.dtype, stream=device.weights_in)
    carrier = Conveyor(cuda, device, device.weights_in)
    carrier.upload(there, tensor)
    carrier.drain()
    assert torch.equal(there.cpu(), values)
    del held
