"""Virtual devices: copies are pulled, memory is poisoned, and a wait that is missing is an error."""

from __future__ import annotations

import gc
import math
import threading
import tracemalloc

import pytest
import torch
from rp_transfer import Closed, CpuBackend, Retainer, Unordered
from rp_transfer.cpu import backend as cpu
from rp_transfer.cpu.backend import CpuDevice
from rp_transfer.testing import check
from rp_transfer.testing.timeout import bounded

SMALLEST = {
    torch.int8: -(2**7),
    torch.int16: -(2**15),
    torch.int32: -(2**31),
    torch.int64: -(2**63),
    torch.uint8: 255,
    torch.uint16: 0,
    torch.bool: False,
}
ONES = torch.ones(3)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)


@pytest.fixture
def backend() -> CpuBackend:
    return CpuBackend(2)


@pytest.fixture
def device(backend: CpuBackend) -> CpuDevice:
    return backend.devices[0]


def uploaded(device: CpuDevice, source: torch.Tensor) -> torch.Tensor:
    there = device.empty(source.shape, source.dtype, stream=device.weights_in)
    device.weights_in.copy(there, source)
    return there


def test_a_copy_does_not_run_before_somebody_waits_for_it(device: CpuDevice) -> None:
    there = uploaded(device, ONES)
    event = device.weights_in.record()
    assert not event.query()
    assert there.isnan().all()
    event.synchronize()
    assert event.query()
    assert there.tolist() == [1, 1, 1]


def test_only_the_copies_that_an_event_needs_are_run(device: CpuDevice) -> None:
    first = uploaded(device, ONES)
    event = device.weights_in.record()
    second = uploaded(device, ONES)
    later = device.weights_in.record()
    aside = device.empty((3,), torch.float32, stream=device.activations_in)
    device.activations_in.copy(aside, ONES)
    event.synchronize()
    assert not first.isnan().any()
    assert second.isnan().all()
    assert aside.isnan().all()
    assert not later.query()


def test_an_event_of_a_copy_stream_pulls_what_that_stream_waited_for(backend: CpuBackend) -> None:
    one, two = backend.devices
    source, between, result = torch.ones(3), backend.host_empty((3,), torch.float32), torch.zeros(3)
    there = uploaded(one, source)
    one.results_out.wait(one.weights_in.record())
    one.results_out.copy(between, there)
    two.activations_in.wait(one.results_out.record())
    away = two.empty((3,), torch.float32, stream=two.activations_in)
    two.activations_in.copy(away, between)
    two.compute.wait(two.activations_in.record())
    two.compute.copy(result, away)
    assert result.tolist() == [1, 1, 1]
    two.synchronize()


@pytest.mark.parametrize("dtype", FLOATS)
def test_floating_memory_is_poisoned_with_nan(device: CpuDevice, dtype: torch.dtype) -> None:
    assert device.empty((5,), dtype, stream=device.compute).isnan().all()


@pytest.mark.parametrize("dtype", SMALLEST)
def test_integer_memory_is_poisoned_with_the_smallest_integer(device: CpuDevice, dtype: torch.dtype) -> None:
    # One byte may be part of anything, so unsigned bytes are filled like NaN.
    assert set(device.empty((5,), dtype, stream=device.compute).tolist()) == {SMALLEST[dtype]}


def test_a_destination_is_poisoned_again_by_each_queued_copy(device: CpuDevice) -> None:
    there = uploaded(device, source := torch.ones(3))
    device.synchronize()
    device.weights_in.copy(there, source)
    assert there.isnan().all()
    device.synchronize()
    assert there.tolist() == [1, 1, 1]


def test_poison_waits_for_queued_copies_that_still_need_the_old_bytes(device: CpuDevice) -> None:
    there, result = uploaded(device, ONES), torch.zeros(3)
    device.synchronize()
    device.results_out.copy(result, there)
    out = device.results_out.record()
    device.weights_in.wait(out)
    device.weights_in.copy(there, twos := torch.full((3,), 2.0))
    assert there.tolist() == [1, 1, 1]
    out.synchronize()
    assert result.tolist() == [1, 1, 1]
    assert there.isnan().all()
    device.synchronize()
    assert torch.equal(there, twos)


def test_freed_memory_is_poisoned(backend: CpuBackend, device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    # Seen at the moment itself: afterwards the address is the allocator's.
    there, host = device.empty((3,), torch.float32, stream=device.compute), backend.host_empty((2,), torch.int64)
    ends = {(there.data_ptr(), 12), (host.data_ptr(), 16)}
    seen: set[tuple[int, int]] = set()
    original = cpu.poison

    def poison(address: int, nbytes: int, dtype: torch.dtype) -> None:
        original(address, nbytes, dtype)
        seen.add((address, nbytes))

    monkeypatch.setattr(cpu, "poison", poison)
    del there, host
    assert seen == ends


# Unordered, in every direction


def test_reading_before_the_copy_is_unordered_and_names_both_uses(device: CpuDevice) -> None:
    there = uploaded(device, ONES)
    with pytest.raises(Unordered, match=r"layer 3 on cpu:0/compute \(read\) .*of 12 bytes on cpu:0/weights_in"):
        device.compute.touch(read=[there], what="layer 3")
    device.compute.wait(device.weights_in.record())
    device.compute.touch(read=[there], what="layer 3")


def test_writing_over_a_pending_read_is_unordered(device: CpuDevice) -> None:
    there, result = uploaded(device, ONES), torch.zeros(3)
    device.synchronize()
    device.results_out.copy(result, there)
    with pytest.raises(Unordered, match=r"weights_in \(write\) is not ordered after .*results_out \(read\)"):
        device.weights_in.copy(there, ONES)
    device.weights_in.wait(device.results_out.record())
    device.weights_in.copy(there, ONES)
    device.synchronize()


def test_two_streams_that_write_one_place_are_unordered(device: CpuDevice) -> None:
    there = uploaded(device, ONES)
    with pytest.raises(Unordered, match=r"\(write\) is not ordered after .*\(write\)"):
        device.activations_in.copy(there, ONES)


def test_two_streams_may_read_one_place_and_write_different_ones(device: CpuDevice) -> None:
    source = torch.ones(8)
    there = device.empty((8,), torch.float32, stream=device.weights_in)
    device.weights_in.copy(there[:4], source[:4])
    device.activations_in.copy(there[4:], source[4:])
    device.synchronize()
    assert there.sum() == 8


def test_the_host_must_wait_before_it_reads_or_writes(backend: CpuBackend, device: CpuDevice) -> None:
    source, result = backend.host_empty((3,), torch.float32).fill_(1), backend.host_empty((3,), torch.float32)
    there = uploaded(device, source)
    with pytest.raises(Unordered, match=r"refill \(write\) on the host is not .*weights_in \(read\)"):
        backend.host_touch(write=[source], what="refill")
    backend.host_touch(read=[source])
    device.results_out.wait(device.weights_in.record())
    device.results_out.copy(result, there)
    with pytest.raises(Unordered, match=r"loss \(read\) on the host is not ordered after .*results_out \(write\)"):
        backend.host_touch(read=[result], what="loss")
    device.results_out.record().synchronize()
    backend.host_touch(read=[result], write=[source])


def test_a_query_that_says_yes_is_a_wait_of_the_host(backend: CpuBackend, device: CpuDevice) -> None:
    source = backend.host_empty((3,), torch.float32).fill_(1)
    there = uploaded(device, source)
    event = device.weights_in.record()
    assert not event.query()
    device.compute.wait(event)
    with pytest.raises(Unordered):
        backend.host_touch(write=[source])
    assert event.query()
    backend.host_touch(write=[source])
    assert there.tolist() == [1, 1, 1]


def test_the_order_of_other_devices_must_be_waited_for_as_well(backend: CpuBackend) -> None:
    one, two = backend.devices
    between = backend.host_empty((3,), torch.float32)
    there = uploaded(one, ONES)
    one.results_out.wait(one.weights_in.record())
    one.results_out.copy(between, there)
    away = two.empty((3,), torch.float32, stream=two.activations_in)
    with pytest.raises(Unordered, match=r"cpu:1/activations_in .*cpu:0/results_out"):
        two.activations_in.copy(away, between)
    one.synchronize()


def test_freeing_device_memory_in_use_is_unordered_at_the_next_call(
    backend: CpuBackend, device: CpuDevice
) -> None:
    there = uploaded(device, ONES)
    device.compute.wait(device.weights_in.record())
    device.compute.touch(read=[there], what="layer 3")
    del there
    with pytest.raises(Unordered, match=r"freeing 12 bytes of cpu:0/weights_in .*layer 3 on cpu:0/compute"):
        backend.host_empty((1,), torch.float32)
    backend.host_empty((1,), torch.float32)


def test_freeing_device_memory_that_its_stream_waited_for_is_fine(device: CpuDevice) -> None:
    there = uploaded(device, ONES)
    device.compute.wait(device.weights_in.record())
    device.compute.touch(read=[there])
    device.weights_in.wait(device.compute.record())
    del there
    device.synchronize()


def test_freeing_host_memory_in_use_is_unordered_at_the_next_call(backend: CpuBackend, device: CpuDevice) -> None:
    source = backend.host_empty((3,), torch.float32).fill_(1)
    there = uploaded(device, source)
    del source
    with pytest.raises(Unordered, match=r"freeing 12 host bytes .*copy of 12 bytes on cpu:0/weights_in"):
        device.compute.record()
    assert there.isnan().all()


@pytest.mark.parametrize("role", ["source", "destination"])
def test_memory_freed_before_its_copy_runs_is_unordered(device: CpuDevice, role: str) -> None:
    # Torch's own memory: only the copy itself can notice that it went.
    pair = {"source": torch.ones(3), "destination": torch.zeros(3)}
    device.weights_in.copy(pair["destination"], pair["source"])
    del pair[role]
    with pytest.raises(Unordered, match=f"copy of 12 bytes on cpu:0/weights_in: its {role} was freed"):
        device.weights_in.record().synchronize()


def test_new_memory_of_a_busy_stream_may_not_be_used_elsewhere_unwaited(device: CpuDevice) -> None:
    # It may be the memory that the stream's unfinished work was given back by.
    old = device.empty((3,), torch.float32, stream=device.compute)
    device.compute.touch(write=[old], what="layer 3")
    del old
    new = device.empty((3,), torch.float32, stream=device.compute)
    source = torch.ones(3)
    with pytest.raises(Unordered, match="not ordered after the allocation of 12 bytes on cpu:0/compute"):
        device.weights_in.copy(new, source)
    device.weights_in.wait(device.compute.record())
    device.weights_in.copy(new, source)
    device.synchronize()


def test_memory_that_torch_gives_out_again_carries_no_old_uses(device: CpuDevice) -> None:
    for _ in range(50):
        device.compute.touch(write=[torch.empty(1000)], what="a temporary")
        device.weights_in.touch(write=[torch.empty(1000)], what="another one")


def test_unchecked_devices_check_nothing_and_poison_nothing() -> None:
    device = CpuBackend(1, strict=False).devices[0]
    there, source = torch.zeros(3), torch.ones(3)
    device.weights_in.copy(there, source)
    device.compute.touch(read=[there])
    assert there.tolist() == [0, 0, 0]
    device.synchronize()
    assert there.tolist() == [1, 1, 1]


# Arguments, ends and figures


def test_another_backends_events_and_streams_are_refused(device: CpuDevice) -> None:
    other = CpuBackend(1).devices[0]
    with pytest.raises(TypeError, match="event of its own backend"):
        device.compute.wait(other.compute.record())
    with pytest.raises(TypeError, match="must belong to one of its streams"):
        device.empty((1,), torch.float32, stream="compute")  # type: ignore[arg-type]


def test_a_backend_needs_a_device() -> None:
    with pytest.raises(ValueError, match="at least one device, but 0"):
        CpuBackend(0)


def test_a_closed_backend_refuses_work_and_drops_what_was_queued(backend: CpuBackend, device: CpuDevice) -> None:
    there = uploaded(device, ONES)
    event = device.weights_in.record()
    backend.close()
    backend.close()
    for call in (
        event.synchronize,
        device.compute.record,
        device.synchronize,
        lambda: uploaded(device, ONES),
        lambda: backend.host_empty((1,), torch.int8),
        lambda: backend.host_touch(read=[there]),
    ):
        with pytest.raises(Closed):
            call()
    assert not event.query()
    assert there.isnan().all()
    assert not device.weights_in.queue


def test_an_upload_never_aliases_the_host(device: CpuDevice) -> None:
    source = torch.ones(3)
    there = uploaded(device, source)
    device.synchronize()
    source.zero_()
    assert there.tolist() == [1, 1, 1]


def test_attached_threads_compute_on_one_core(device: CpuDevice) -> None:
    def threads() -> int:
        device.attach_thread()
        return torch.get_num_threads()

    assert bounded(threads) == 1


def test_memory_freed_inside_the_backend_is_written_down_afterwards(
    backend: CpuBackend, device: CpuDevice
) -> None:
    # As the garbage collector does it, which may run in the middle of the backend's own work.
    there = device.empty((16,), torch.float32, stream=device.compute)
    with backend.streams.lock:
        del there
        assert device.memory().used_bytes == 64
    assert device.memory().used_bytes == 0


def test_memory_in_cycles_may_be_collected_at_any_moment() -> None:
    thresholds = gc.get_threshold()
    gc.set_threshold(3)
    try:
        device = CpuBackend(1).devices[0]
        for _ in range(100):
            cycle: list[object] = [device.empty((3,), torch.float32, stream=device.compute)]
            cycle.append(cycle)
            device.compute.touch(write=[torch.empty(4)])
        check(CpuBackend(1), range(3))
    finally:
        gc.set_threshold(*thresholds)
    del cycle
    gc.collect()
    assert device.memory().used_bytes == 0


def test_threads_of_several_devices_share_one_backend() -> None:
    backend = CpuBackend(4)
    source = backend.host_empty((100,), torch.float32).fill_(1)
    results = [backend.host_empty((100,), torch.float32) for _ in backend.devices]
    errors: list[BaseException] = []

    def work(device: CpuDevice, result: torch.Tensor) -> None:
        try:
            retainer = Retainer()
            for _ in range(100):
                there = uploaded(device, source)
                device.results_out.wait(device.weights_in.record())
                device.results_out.copy(result, there)
                retainer.keep(device.results_out.record(), there)
            retainer.drain()
        except BaseException as error:
            errors.append(error)

    pairs = zip(backend.devices, results, strict=True)
    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    assert all((result == 1).all() for result in results)


@pytest.mark.slow
def test_a_thousand_rounds_leave_nothing_behind() -> None:
    backend = CpuBackend(1)
    device = backend.devices[0]
    source = backend.host_empty((64,), torch.float32).fill_(1)
    result = backend.host_empty((64,), torch.float32)
    doubled = torch.empty(64)

    def rounds(count: int) -> int:
        for _ in range(count):
            there = uploaded(device, source)
            device.compute.wait(device.weights_in.record())
            device.compute.touch(read=[there])
            device.compute.touch(write=[doubled])
            torch.mul(there, 2, out=doubled)
            device.results_out.wait(device.compute.record())
            device.results_out.copy(result, doubled)
            event = device.results_out.record()
            event.synchronize()
        gc.collect()
        # Other threads of the process come and go: only what the package itself has asked for counts.
        ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*rp_transfer*")])
        return sum(trace.size for trace in ours.traces)

    tracemalloc.start()
    try:
        before = rounds(500)
        after = rounds(500)
    finally:
        tracemalloc.stop()
    assert after - before < 20_000
    assert math.isclose(float(result.sum()), 128)
    assert all(not stream.queue for stream in (device.weights_in, device.activations_in, device.results_out))
    assert backend.host_memory().used_bytes == 512


def test_the_ledger_stays_small_over_thousands_of_copies() -> None:
    backend = CpuBackend(1)
    device = backend.devices[0]
    block, there = torch.zeros(64), device.empty((64,), torch.float32, stream=device.weights_in)
    for index in range(3000):
        part = slice(index % 8 * 8, index % 8 * 8 + 8)
        device.weights_in.copy(there[part], block[part])
        # Torch's own memory, here and there, whose end nobody tells the ledger.
        source, destination = torch.ones(8 + index % 99), torch.empty(8 + index % 99)
        device.weights_in.copy(destination, source)
        device.weights_in.record().synchronize()
    assert len(backend.streams.ledger) < 300
    assert backend.streams.ledger.num_uses() < 320


@pytest.mark.parametrize("part", [range(6, 9), range(-2, 4), range(0, 8, 2), range(5, 3)])
def test_a_part_that_would_overrun_memory_is_refused(part: range) -> None:
    device = CpuBackend(1).devices[0]
    there = device.empty((8,), torch.float32, stream=device.weights_in)
    with pytest.raises(ValueError, match="range of step 1 inside of two flat tensors"):
        device.weights_in.copy_part(there, torch.ones(8), part)
    for other in (torch.ones(2, 4), torch.ones(8, dtype=torch.int32)):
        with pytest.raises(ValueError, match="two flat tensors of one dtype"):
            device.weights_in.copy_part(there, other, range(2))
