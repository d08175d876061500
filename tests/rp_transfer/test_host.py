"""Host memory: to the byte, pinned by the page, reused when it is short-lived, given back when it is not."""

from __future__ import annotations

import gc
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from types import FrameType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_transfer import Layout, PinningWarning
from rp_transfer.cuda.pinned_pool import HostMemory
from rp_transfer.errors import PinningRefused
from rp_transfer.memory.pages import PAGE_BYTES, Pinned, whole_pages
from rp_transfer.memory.regions import Regions


class Driver:
    """What a driver does with pins: it counts them, and refuses those that overlap or go over a limit.

    `most_bytes`: the most that it pins in one call. A copy that crosses from one range to the next is refused.
    """

    def __init__(self, limit_bytes: int = 1 << 40, most_bytes: int = 1 << 40) -> None:
        self.limit_bytes = limit_bytes
        self.most_bytes = most_bytes
        self.pinned: dict[int, int] = {}

    def pin(self, address: int, nbytes: int) -> None:
        overlapping = any(start < address + nbytes and address < start + n for start, n in self.pinned.items())
        too_much = nbytes > self.most_bytes or sum(self.pinned.values()) + nbytes > self.limit_bytes
        if overlapping or too_much:
            raise PinningRefused(f"{nbytes} bytes")
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def takes(self, address: int, nbytes: int) -> bool:
        """Whether a copy from or to these bytes stays in one range, or outside all of them."""
        touched = [start for start, n in self.pinned.items() if start < address + nbytes and address < start + n]
        return len(touched) < 2


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def host(driver: Driver) -> HostMemory:
    return HostMemory(Pinned(driver), 1 << 20)


def block(nbytes: int) -> Layout:
    return Layout.of([torch.empty(nbytes, dtype=torch.uint8, device="meta")])


def test_memory_counts_to_the_byte(host: HostMemory) -> None:
    kept = [host.empty((n, 3), torch.int16, short_lived=False) for n in (1, 5, 0)]
    assert [tuple(tensor.shape) for tensor in kept] == [(1, 3), (5, 3), (0, 3)]
    assert (host.use().used_bytes, host.use().peak_bytes, host.use().total_bytes) == (36, 36, 1 << 20)
    kept.clear()
    assert (host.use().used_bytes, host.use().peak_bytes) == (0, 36)


def test_a_large_tensor_is_pinned_by_itself_in_whole_pages(driver: Driver, host: HostMemory) -> None:
    tensor = host.empty((100_001,), torch.uint8, short_lived=False)
    assert driver.pinned == {tensor.data_ptr(): 100_001}
    assert host.use().pinned_bytes == -(-100_001 // PAGE_BYTES) * PAGE_BYTES
    del tensor
    assert driver.pinned == {}
    assert host.use().pinned_bytes == 0


def test_a_slab_is_unpinned_when_the_last_of_its_tensors_is_gone(driver: Driver, host: HostMemory) -> None:
    first, second = (host.empty((10,), torch.float64, short_lived=False) for _ in range(2))
    assert len(driver.pinned) == 1
    second.fill_(2)
    assert not torch.equal(first, second)
    host.clear()
    del first
    assert len(driver.pinned) == 1
    assert second.sum() == 20
    del second
    assert driver.pinned == {}


def test_the_next_slab_is_begun_when_one_is_full(driver: Driver, host: HostMemory) -> None:
    kept = [host.empty((60_000,), torch.uint8, short_lived=False) for _ in range(40)]
    assert len(driver.pinned) == 3
    ranges = sorted((tensor.data_ptr(), tensor.data_ptr() + 60_000) for tensor in kept)
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))


@settings(deadline=None)
@given(sizes=st.lists(st.sampled_from([0, 1, 63, 64, 65, 5000, 70_000, 5 << 20]), min_size=1, max_size=30))
def test_blocks_of_one_model_take_few_pages_and_count_to_the_byte(sizes: list[int]) -> None:
    host = HostMemory(Pinned(Driver()), 1 << 40)
    blocks = list(host.blocks([block(nbytes) for nbytes in sizes]))
    for number, tensor in enumerate(blocks):
        tensor.fill_(number)
    assert [tensor.numel() for tensor in blocks] == sizes
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(blocks))
    assert host.use().used_bytes == sum(sizes)
    assert host.use().pinned_bytes <= sum(sizes) + 63 * len(sizes) + PAGE_BYTES * (1 + sizes.count(5 << 20))
    blocks.clear()
    del tensor
    assert (host.use().used_bytes, host.use().pinned_bytes) == (0, 0)


def test_ten_thousand_small_parameters_take_two_per_cent_more_at_most() -> None:
    # 100 layers of 100 parameters, as norms and biases of odd sizes are.
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(200, 6000, (100, 100), generator=generator).tolist()
    layouts = [Layout.of([torch.empty(n, device="meta") for n in layer]) for layer in sizes]
    host = HostMemory(Pinned(Driver()), 1 << 40)
    blocks = list(host.blocks(layouts))
    assert len(blocks) == 100
    assert host.use().pinned_bytes <= 1.02 * 4 * sum(map(sum, sizes))


def test_a_short_lived_buffer_is_used_again_only_when_its_last_tensor_is_gone(host: HostMemory) -> None:
    first = host.empty((8,), torch.float32, short_lived=True)
    view, address = first[2:], first.data_ptr()
    del first
    second = host.empty((8,), torch.float32, short_lived=True)
    assert second.data_ptr() != address
    del view
    assert host.empty((4, 4), torch.int16, short_lived=True).data_ptr() == address


def test_clearing_gives_back_what_nobody_uses(driver: Driver, host: HostMemory) -> None:
    kept = host.empty((1 << 17,), torch.float32, short_lived=True)
    host.empty((1 << 17,), torch.int8, short_lived=True)
    assert len(driver.pinned) == 2
    host.clear()
    assert host.use().used_bytes == 4 << 17
    del kept
    host.clear()
    assert host.use().used_bytes == 0
    assert driver.pinned == {}


def test_batches_of_about_the_same_length_use_the_same_buffers(driver: Driver, host: HostMemory) -> None:
    for length in range(100, 200):
        tensor = host.empty((length, 1024), torch.bfloat16, short_lived=True)
        assert tensor.shape == (length, 1024)
        tensor.zero_()
        del tensor
    # Each is an eighth larger than the one before, and the pool keeps what was lent at once.
    assert host.use().used_bytes <= 200 * 1024 * 2 * 9 // 8
    assert len(driver.pinned) <= 2


@given(numel=st.integers(1, 10_000), dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.complex128]))
def test_a_short_lived_buffer_is_an_eighth_larger_at_the_most(numel: int, dtype: torch.dtype) -> None:
    host = HostMemory(Pinned(Driver()), 1 << 20)
    tensor = host.empty((numel,), dtype, short_lived=True)
    assert tensor.nbytes <= host.use().used_bytes <= tensor.nbytes * 9 / 8


def collect_at(function: str, line: int) -> None:
    """Collect garbage before a line of a function, as Python may at any call; once."""

    def trace(frame: FrameType, event: str, _: object) -> object:
        code = frame.f_code
        if code.co_name == function and event == "line" and frame.f_lineno == code.co_firstlineno + line:
            sys.settrace(None)
            gc.collect()
        return trace

    sys.settrace(trace)


@pytest.mark.slow
@pytest.mark.untraced
@pytest.mark.parametrize("line", range(1, 8))
def test_a_buffer_may_be_given_back_in_the_middle_of_taking_another(host: HostMemory, line: int) -> None:
    class Cycle:
        """Garbage that only the collector finds."""

    host.empty((100,), torch.uint8, short_lived=True)
    cycle = Cycle()
    cycle.me, cycle.tensor = cycle, host.empty((300,), torch.uint8, short_lived=True)
    del cycle
    gc.disable()
    try:
        collect_at("_reuse", line)
        tensor = host.empty((100,), torch.uint8, short_lived=True)
    finally:
        sys.settrace(None)
        gc.enable()
    gc.collect()
    assert tensor.shape == (100,)
    assert host._idle == sum(size * len(pieces) for size, pieces in host._free.items())


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 5 * PAGE_BYTES), (PAGE_BYTES, PAGE_BYTES + 100)],
        [(0, 100), (0, 5 * PAGE_BYTES)],
        [(0, 5 * PAGE_BYTES), (0, 100)],
        [(0, 5 * PAGE_BYTES - 50), (PAGE_BYTES, PAGE_BYTES + 100), (5 * PAGE_BYTES - 40, 6 * PAGE_BYTES)],
    ],
    ids=["nested", "larger last", "smaller last", "nested, then a neighbour"],
)
def test_storages_that_lie_in_one_another_are_pinned_once(driver: Driver, spans: list[tuple[int, int]]) -> None:
    memory = torch.zeros(8 * PAGE_BYTES, dtype=torch.uint8)
    first = -memory.data_ptr() % PAGE_BYTES
    places = [memory[first + start : first + stop] for start, stop in spans]
    tensors = [Layout.of([place]).storages(place)[0] for place in places]
    pinned = Pinned(driver)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        held = Regions(pinned).register(tensors)
    assert all(pinned.covers(tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
    assert len(driver.pinned) == 1
    del held


def test_a_region_keeps_its_storages(driver: Driver) -> None:
    tensor = torch.ones(100_000)
    storage = tensor.untyped_storage()
    held = Regions(Pinned(driver)).register([tensor])
    assert [kept.data_ptr() for region in held for kept in region.storages] == [storage.data_ptr()]


def test_what_ended_while_the_lock_was_held_counts_no_more_when_blocks_are_made(host: HostMemory) -> None:
    tensors = [host.empty((1000,), torch.float32, short_lived=False)]
    with host._guard:
        tensors.clear()
    list(host.blocks([Layout.of([torch.zeros(1000)])]))
    assert host.use().peak_bytes == 4000


def test_a_slab_maps_no_more_pages_than_it_needs(host: HostMemory) -> None:
    tensor = host.empty((20 * PAGE_BYTES + 1,), torch.uint8, short_lived=False)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system does not list what is mapped")
    ranges = [line.split()[0].split("-") for line in maps.read_text().splitlines()]
    sizes = [int(stop, 16) - int(start, 16) for start, stop in ranges if int(start, 16) == tensor.data_ptr()]
    assert sizes == [21 * PAGE_BYTES]


@given(sizes=st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=30))
def test_a_pool_never_holds_more_than_was_needed_at_once(sizes: list[tuple[int, bool]]) -> None:
    host = HostMemory(Pinned(Driver()), 1 << 20)
    for numel, short_lived in sizes * 3:
        host.empty((numel,), torch.float32, short_lived=short_lived)
    assert host.use().used_bytes <= 4 * (1 + 2 + 3 + 4)


def test_refused_pinning_is_said_once_and_the_memory_is_plain() -> None:
    driver = Driver(limit_bytes=150_000)
    pinned = Pinned(driver)
    host = HostMemory(pinned, 1 << 40)
    first = host.empty((100_000,), torch.uint8, short_lived=False)
    with pytest.warns(PinningWarning, match="100001 bytes.*ulimit -l"):
        second = host.empty((100_001,), torch.uint8, short_lived=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        third = host.empty((100_002,), torch.uint8, short_lived=True)
    assert second.fill_(3).sum() == 300_003
    assert [pinned.covers(t.data_ptr(), t.nbytes) for t in (first, second, third)] == [True, False, False]
    assert host.use().pinned_bytes == whole_pages(first.data_ptr(), first.nbytes)
    del second, third
    host.clear()
    assert list(driver.pinned.values()) == [100_000]


def pages_of(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start // PAGE_BYTES, (start + tensor.nbytes - 1) // PAGE_BYTES


def storages_within(memory: torch.Tensor, *ranges: tuple[int, int]) -> list[torch.Tensor]:
    """Storages of their own at places in `memory`, which begins a page."""
    return Layout.of([memory]).storages(memory) if not ranges else [own(memory, *span) for span in ranges]


def own(memory: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return Layout.of([memory[start:stop]]).storages(memory[start:stop])[0]


@pytest.fixture
def pages() -> torch.Tensor:
    """Ten pages of plain memory."""
    memory = torch.zeros(11 * PAGE_BYTES, dtype=torch.uint8)
    skip = -memory.data_ptr() % PAGE_BYTES
    return memory[skip : skip + 10 * PAGE_BYTES]


def test_storages_on_one_page_are_pinned_together_and_others_apart(driver: Driver, pages: torch.Tensor) -> None:
    pinned = Pinned(driver)
    near, apart = PAGE_BYTES + 100, 6 * PAGE_BYTES
    tensors = storages_within(pages, (0, near), (near + 50, 2 * near), (apart, apart + 10))
    held = Regions(pinned).register(tensors)
    base = pages.data_ptr()
    assert driver.pinned == {base: 2 * near, base + apart: 10}
    assert all(pinned.covers(t.data_ptr(), t.nbytes) for t in tensors)
    del held
    assert driver.pinned == {}


def test_registered_storages_live_as_long_as_they_are_pinned(driver: Driver, pages: torch.Tensor) -> None:
    regions = Regions(Pinned(driver))
    tensors = storages_within(pages, (0, 100))
    first, second = regions.register(tensors), regions.register(tensors)
    assert len(driver.pinned) == 1
    tensors.clear()
    del first
    gc.collect()
    assert len(driver.pinned) == 1
    del second
    assert driver.pinned == {}


def test_memory_that_is_pinned_already_is_not_pinned_again(driver: Driver, host: HostMemory) -> None:
    tensor = host.empty((100_000,), torch.uint8, short_lived=False)
    pinned = dict(driver.pinned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Regions(Pinned(driver)).register([]) == ()
        assert Regions(host._pinned).register([tensor, torch.empty(0)]) == ()
    assert driver.pinned == pinned


def test_a_copy_may_not_cross_from_one_region_to_the_next(driver: Driver, pages: torch.Tensor) -> None:
    pinned = Pinned(driver)
    regions = Regions(pinned)
    first, second = storages_within(pages, (0, PAGE_BYTES), (PAGE_BYTES, 2 * PAGE_BYTES))
    held = regions.register([first]), regions.register([second])
    assert len(driver.pinned) == 2
    assert pinned.covers(pages.data_ptr(), PAGE_BYTES)
    assert not pinned.covers(pages.data_ptr() + 10, PAGE_BYTES)
    del held


def test_a_storage_across_the_edge_of_a_region_stays_plain(driver: Driver, pages: torch.Tensor) -> None:
    pinned = Pinned(driver)
    regions = Regions(pinned)
    inside, across = storages_within(pages, (0, 100), (50, 150))
    held = regions.register([inside])
    assert regions.register([across]) == ()
    assert not pinned.covers(across.data_ptr(), across.nbytes)
    assert len(held) == len(driver.pinned) == 1


@settings(deadline=None)
@given(data=st.data())
def test_regions_follow_whoever_holds_them(data: st.DataObject) -> None:
    memory = torch.zeros(40_000, dtype=torch.uint8)
    cuts = sorted(data.draw(st.sets(st.integers(0, 40_000), min_size=2, max_size=12)))
    tensors = [own(memory, start, stop) for start, stop in pairwise(cuts)]
    driver = Driver()
    pinned, held = Pinned(driver), []
    regions = Regions(pinned)
    for _ in range(data.draw(st.integers(1, 12))):
        if held and data.draw(st.booleans()):
            held.pop(data.draw(st.integers(0, len(held) - 1)))
        else:
            chosen = data.draw(st.lists(st.sampled_from(tensors), max_size=4))
            held.append((chosen, regions.register(chosen)))
        assert all(pinned.covers(t.data_ptr(), t.nbytes) for chosen, _ in held for t in chosen)
        assert pinned.nbytes == sum(whole_pages(start, nbytes) for start, nbytes in driver.pinned.items())
    held.clear()
    assert driver.pinned == {}


# Enough for a slab of its own.
FEW_PAGES = 32 * PAGE_BYTES


def test_much_memory_is_pinned_in_pieces_and_unpinned_together() -> None:
    driver = Driver(most_bytes=FEW_PAGES)
    pinned = Pinned(driver, FEW_PAGES)
    tensor = HostMemory(pinned, 1 << 40).empty((2 * FEW_PAGES + PAGE_BYTES + 5,), torch.uint8, short_lived=False)
    start = tensor.data_ptr()
    last = start + 2 * FEW_PAGES
    assert driver.pinned == {start: FEW_PAGES, start + FEW_PAGES: FEW_PAGES, last: PAGE_BYTES + 5}
    assert pinned.covers(start, tensor.nbytes)
    assert pinned.nbytes == 66 * PAGE_BYTES
    assert [pinned.parts(n, start) for n in (FEW_PAGES, FEW_PAGES + 1)] == [
        [(0, FEW_PAGES)],
        [(0, FEW_PAGES), (FEW_PAGES, 1)],
    ]
    del tensor
    assert driver.pinned == {}
    assert pinned.nbytes == 0
    assert list(pinned.parts(3 * FEW_PAGES, start)) == [(0, 3 * FEW_PAGES)]


def test_what_is_refused_in_part_is_not_pinned_at_all() -> None:
    driver = Driver(limit_bytes=2 * FEW_PAGES)
    host = HostMemory(Pinned(driver, FEW_PAGES), 1 << 40)
    with pytest.warns(PinningWarning):
        tensor = host.empty((3 * FEW_PAGES,), torch.uint8, short_lived=False)
    assert driver.pinned == {}
    assert not host._pinned.covers(tensor.data_ptr(), 1)
    kept = host.empty((2 * FEW_PAGES,), torch.uint8, short_lived=False)
    assert list(driver.pinned.values()) == [FEW_PAGES, FEW_PAGES]
    del kept


def test_pieces_of_registered_storages_share_no_page() -> None:
    memory = torch.zeros(5 * FEW_PAGES, dtype=torch.uint8)
    tensor = own(memory, 100, 4 * FEW_PAGES + PAGE_BYTES)
    driver = Driver(most_bytes=FEW_PAGES)
    held = Regions(Pinned(driver, FEW_PAGES)).register([tensor])
    assert sum(driver.pinned.values()) == tensor.nbytes
    assert len(driver.pinned) == 5
    ends = sorted((start // PAGE_BYTES, (start + n - 1) // PAGE_BYTES) for start, n in driver.pinned.items())
    assert all(last < first for (_, last), (first, _) in pairwise(ends))
    del held
    assert driver.pinned == {}


@settings(deadline=None)
@given(data=st.data())
def test_no_part_of_a_copy_crosses_from_one_piece_to_the_next(data: st.DataObject) -> None:
    driver = Driver(most_bytes=FEW_PAGES)
    host = HostMemory(Pinned(driver, FEW_PAGES), 1 << 40)
    sizes = st.integers(2 * FEW_PAGES, 5 * FEW_PAGES)
    one, other = (host.empty((data.draw(sizes),), torch.uint8, short_lived=False) for _ in range(2))
    nbytes = data.draw(st.integers(1, 2) | st.integers(FEW_PAGES, min(one.nbytes, other.nbytes)))
    start = one.data_ptr() + data.draw(st.integers(0, one.nbytes - nbytes))
    there = other.data_ptr() + data.draw(st.integers(0, other.nbytes - nbytes))
    parts = host._pinned.parts(nbytes, start, there)
    assert [offset for offset, _ in parts] == [
        sum(size for _, size in parts[:index]) for index in range(len(parts))
    ]
    assert sum(size for _, size in parts) == nbytes
    assert all(driver.takes(address + offset, size) for offset, size in parts for address in (start, there))
    # No more cuts than there are ends of pieces.
    assert len(parts) <= 2 * (nbytes // FEW_PAGES + 1) + 1


@pytest.mark.parametrize("most_bytes", [0, PAGE_BYTES + 1, PAGE_BYTES // 2])
def test_pieces_must_be_whole_pages(driver: Driver, most_bytes: int) -> None:
    with pytest.raises(ValueError, match="whole pages"):
        Pinned(driver, most_bytes)


@pytest.mark.cuda
def test_a_gpu_copies_across_the_pieces_of_a_block() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from rp_transfer.cuda.backend import CudaBackend

    backend = CudaBackend([0], most_pinned_bytes=FEW_PAGES)
    device = backend.devices[0]
    source = backend.host_empty((50 * FEW_PAGES + 3,), torch.uint8).random_(256)
    back = backend.host_empty(source.shape, torch.uint8).zero_()
    assert backend.is_pinned(source)
    there = device.empty(source.shape, torch.uint8, stream=device.weights_in)
    device.weights_in.copy(there[1:], source[1:])
    device.results_out.wait(device.weights_in.record())
    device.results_out.copy(back[1:], there[1:])
    device.results_out.record().synchronize()
    assert torch.equal(back[1:], source[1:])
    backend.close()
