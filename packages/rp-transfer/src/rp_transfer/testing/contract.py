"""Checks of the promises in `rp_transfer.api`, one function a promise, for any backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from rp_transfer.api import Abilities, Backend, Device, Event, Stream
from rp_transfer.errors import Closed
from rp_transfer.memory.blocks import Layout
from rp_transfer.testing import graph_contract
from rp_transfer.testing.demands import demand as _demand
from rp_transfer.testing.demands import demand_raises as _demand_raises
from rp_transfer.testing.timeout import bounded

Promise = Callable[[Backend, Device], None]

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
_ALIGNMENT = 64


def streams_of(device: Device) -> list[Stream]:
    """Return the five streams of a device."""
    return [
        device.compute,
        device.weights_in,
        device.activations_in,
        device.results_out,
        device.gradients_out,
    ]


def _filled(backend: Backend, values: torch.Tensor) -> torch.Tensor:
    host = backend.host_empty(values.shape, values.dtype)
    host.copy_(values)
    return host


def _round_trip(backend: Backend, device: Device, values: torch.Tensor) -> torch.Tensor:
    source, result = _filled(backend, values), backend.host_empty(values.shape, values.dtype)
    there = device.empty(values.shape, values.dtype, stream=device.weights_in)
    device.weights_in.copy(there, source)
    device.results_out.wait(device.weights_in.record())
    device.results_out.copy(result, there)
    device.results_out.record().synchronize()
    backend.host_touch(read=[result])
    return result


def names_differ(backend: Backend, device: Device) -> None:
    """A device has five streams with different names, and returns the same objects each time."""
    names = [stream.name for stream in streams_of(device)]
    _demand(len(set(names)) == 5, f"the five streams must have different names, but have {names}")
    _demand(device.name in [other.name for other in backend.devices], "a device must be listed under its name")
    same = all(one is two for one, two in zip(streams_of(device), streams_of(device), strict=True))
    _demand(same, "a device must return the same stream objects each time")


def events_end(backend: Backend, device: Device) -> None:
    """After `synchronize` an event has finished, on streams with and without work; a second call returns, too."""
    source = _filled(backend, torch.arange(5))
    for stream in streams_of(device):
        stream.record().synchronize()
        there = device.empty((5,), torch.int64, stream=stream)
        stream.copy(there, source)
        event = stream.record()
        event.synchronize()
        event.synchronize()
        _demand(event.query(), f"query() of an event of {stream.name} must be True after its synchronize()")


def streams_keep_order(backend: Backend, device: Device) -> None:
    """Copies of one stream run in order: of two copies to one place the later one wins."""
    first, second = _filled(backend, torch.zeros(64)), _filled(backend, torch.ones(64))
    result = backend.host_empty((64,), torch.float32)
    for stream in streams_of(device):
        there = device.empty((64,), torch.float32, stream=stream)
        stream.copy(there, first)
        stream.copy(there, second)
        stream.copy(result, there)
        stream.copy(there, first)
        stream.record().synchronize()
        backend.host_touch(read=[result])
        _demand(bool((result == 1).all()), f"{stream.name} must run its copies in order")


def devices_synchronize(backend: Backend, device: Device) -> None:
    """`Device.synchronize` waits for the work of all five streams."""
    results = [backend.host_empty((3,), torch.float32) for _ in range(5)]
    there = [device.empty((3,), torch.float32, stream=stream) for stream in streams_of(device)]
    source = _filled(backend, torch.ones(3))
    for stream, memory, result in zip(streams_of(device), there, results, strict=True):
        stream.copy(memory, source)
        stream.copy(result, memory)
    device.synchronize()
    backend.host_touch(read=results)
    done = all(bool((result == 1).all()) for result in results)
    _demand(done, "synchronize() must wait for the work of all five streams")


def bits_survive(backend: Backend, device: Device) -> None:
    """Values of every dtype survive a copy to the device and back, bit by bit."""
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        high = 2 if dtype == torch.bool else 256
        raw = torch.randint(0, high, (3, 8, dtype.itemsize), dtype=torch.uint8, generator=generator)
        values = raw.view(dtype).squeeze(-1)
        result = _round_trip(backend, device, values)
        same = torch.equal(result.view(torch.uint8), values.contiguous().view(torch.uint8))
        _demand(same and result.shape == values.shape, f"{dtype} must survive a copy to the device and back")


def nothing_copies(backend: Backend, device: Device) -> None:
    """Tensors without elements are allocated and copied like others."""
    for shape in ((0,), (3, 0)):
        result = _round_trip(backend, device, torch.empty(shape))
        _demand(
            result.shape == torch.Size(shape), f"a tensor of shape {shape} must keep it, but got {result.shape}"
        )


def copies_refuse(backend: Backend, device: Device) -> None:
    """Copies between dtypes, sizes or strided tensors raise `ValueError`; a foreign event raises `TypeError`."""
    there = device.empty((4, 4), torch.float32, stream=device.weights_in)
    stream = device.weights_in
    wrong = {
        "a copy between dtypes": backend.host_empty((4, 4), torch.int32),
        "a copy between sizes": backend.host_empty((4, 3), torch.float32),
        "a copy from a transposed tensor": backend.host_empty((4, 4), torch.float32).t(),
    }
    for what, source in wrong.items():
        _demand_raises(ValueError, lambda source=source: stream.copy(there, source), what)
    strided = there[:, :2]
    half = backend.host_empty((4, 2), torch.float32)
    _demand_raises(ValueError, lambda: stream.copy(strided, half), "a copy to a strided tensor")
    foreign: Event = _ForeignEvent()
    _demand_raises(TypeError, lambda: stream.wait(foreign), "waiting for another backend's event")


class _ForeignEvent:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def seconds_since(self, earlier: Event) -> float:
        raise ValueError(earlier)


def parts_are_copied(backend: Backend, device: Device) -> None:
    """`copy_part` copies these elements to the same places, and leaves the others alone."""
    source, result = _filled(backend, torch.arange(9, dtype=torch.int16)), backend.host_empty((9,), torch.int16)
    wanted = torch.full((9,), -1, dtype=torch.int16)
    blank = _filled(backend, wanted)
    wanted[2:5], wanted[7:9] = torch.arange(2, 5), torch.arange(7, 9)
    for stream in streams_of(device):
        there = device.empty((9,), torch.int16, stream=stream)
        stream.copy(there, blank)
        for part in (range(2, 5), range(7, 9), range(3, 3)):
            stream.copy_part(there, source, part)
        stream.copy_part(result, there, range(9))
        stream.record().synchronize()
        backend.host_touch(read=[result])
        _demand(torch.equal(result, wanted), f"copy_part() on {stream.name} must copy these elements alone")


def casts_convert(backend: Backend, device: Device) -> None:
    """A conversion rounds as torch does, and runs in order with the copies of its stream."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    source, result = _filled(backend, values), backend.host_empty((1000,), torch.bfloat16)
    for stream in streams_of(device):
        wide = device.empty((1000,), torch.float32, stream=stream)
        narrow = device.empty((1000,), torch.bfloat16, stream=stream)
        stream.copy(wide, source)
        stream.cast(narrow, wide)
        stream.copy(result, narrow)
        stream.record().synchronize()
        backend.host_touch(read=[result])
        _demand(torch.equal(result, values.bfloat16()), f"cast() on {stream.name} must round as torch does")
    there = device.empty((4,), torch.float32, stream=device.compute)
    _demand_raises(ValueError, lambda: device.compute.cast(there[1:], there), "a conversion between sizes")
    _demand_raises(
        ValueError, lambda: device.compute.cast(there[::2], there[::2]), "a conversion of strided memory"
    )


def timed_events_measure(backend: Backend, device: Device) -> None:
    """`seconds_since` measures the time between timed events, and raises `ValueError` for untimed ones."""
    source = _filled(backend, torch.ones(1 << 20))
    for stream in streams_of(device):
        there = device.empty((1 << 20,), torch.float32, stream=stream)
        first = stream.record(timed=True)
        stream.copy(there, source)
        last, plain = stream.record(timed=True), stream.record()
        plain.synchronize()
        _demand(0 < last.seconds_since(first) < 60, f"{stream.name} must measure the time of a copy")
        _demand_raises(ValueError, lambda plain=plain, first=first: plain.seconds_since(first), "an untimed event")
        _demand_raises(ValueError, lambda plain=plain, last=last: last.seconds_since(plain), "an untimed event")


def blocks_have_their_layouts(backend: Backend, device: Device) -> None:
    """Blocks have the size and dtype of their layouts, are aligned, pinned, disjoint, and counted in bytes."""
    del device
    dtypes = (torch.float32, torch.bfloat16, torch.int64)
    layouts = [Layout.of([torch.empty(n, dtype=dtype)]) for n in (0, 1, 33, 5000) for dtype in dtypes]
    before = backend.host_memory().used_bytes
    asked_for = backend.host_blocks(layouts)
    used = backend.host_memory().used_bytes - before
    _demand(used == 0, "a block must be allocated when it is asked for, not before")
    blocks = list(asked_for)
    fits = all(
        block.shape == (layout.numel,) and block.dtype == layout.dtype
        for layout, block in zip(layouts, blocks, strict=True)
    )
    _demand(fits, "a block must have its layout's size and dtype")
    _demand(all(block.data_ptr() % _ALIGNMENT == 0 for block in blocks), "blocks must be aligned")
    _number(blocks)
    whole = all(bool((block == number).all()) for number, block in enumerate(blocks))
    _demand(whole, "blocks must not overlap")
    _demand(all(map(backend.is_pinned, blocks)), "blocks must be pinned")
    asked = sum(layout.nbytes for layout in layouts)
    _demand(backend.host_memory().used_bytes - before == asked, "used_bytes must grow by the blocks' exact size")
    blocks.clear()
    _demand(backend.host_memory().used_bytes == before, "used_bytes must not include freed blocks")


def _number(blocks: Iterable[torch.Tensor]) -> None:
    for number, block in enumerate(blocks):
        block.fill_(number)


def host_memory_is_exact(backend: Backend, device: Device) -> None:
    """Host memory has exactly the requested bytes and is aligned; `used_bytes` follows allocations and frees."""
    del device
    for short_lived in (False, True):
        host = backend.host_empty((3, 5), torch.float64, short_lived=short_lived)
        _demand(host.untyped_storage().nbytes() == 120, "host memory for 120 bytes must be 120 bytes long")
        _demand(host.data_ptr() % _ALIGNMENT == 0, f"host memory must be aligned to {_ALIGNMENT} bytes")
        _demand(host.is_contiguous() and host.shape == (3, 5), "host memory must have the requested shape")
    use = backend.host_memory()
    _demand(use.used_bytes <= use.peak_bytes, "peak_bytes must not be less than used_bytes")
    host = backend.host_empty((1000,), torch.uint8)
    with_it = backend.host_memory().used_bytes
    del host
    without_it = backend.host_memory().used_bytes
    freed = with_it - without_it
    _demand(freed == 1000, f"freeing 1000 host bytes must lower used_bytes by 1000, but lowered it by {freed}")


def device_memory_is_counted(backend: Backend, device: Device) -> None:
    """A device's `used_bytes` follows allocations and frees; its peak stays until it is reset."""
    del backend
    before = device.memory().used_bytes
    memory = device.empty((1 << 16,), torch.float32, stream=device.weights_in)
    during = device.memory()
    _demand(during.used_bytes >= before + (1 << 18), "used_bytes must include allocated device memory")
    _demand(during.used_bytes <= during.peak_bytes, "peak_bytes must not be less than used_bytes")
    _demand(during.total_bytes > 0, "total_bytes must be positive")
    del memory
    after = device.memory()
    _demand(after.used_bytes == before, "used_bytes must not include freed device memory")
    _demand(after.peak_bytes >= during.used_bytes, "peak_bytes must not fall when memory is freed")
    device.reset_peak_memory()
    _demand(device.memory().peak_bytes < during.used_bytes, "reset_peak_memory() must lower the peak")


def computing_uses_the_stream(backend: Backend, device: Device) -> None:
    """Torch operations inside `computing` run in order with the work of the compute stream."""
    source, result = _filled(backend, torch.ones(256)), backend.host_empty((256,), torch.float32)
    there = device.empty((256,), torch.float32, stream=device.activations_in)
    device.activations_in.copy(there, source)
    device.compute.wait(device.activations_in.record())
    with device.computing():
        device.compute.touch(read=[there], what="doubling")
        doubled = there * 2
        device.compute.touch(write=[doubled], what="doubling")
    device.results_out.wait(device.compute.record())
    device.results_out.copy(result, doubled)
    device.results_out.record().synchronize()
    _demand(doubled.device == there.device, "the result of an operation must lie on the device")
    _demand(bool((result == 2).all()), "the copy of a computed tensor must hold the computed values")


def copies_are_raw(backend: Backend, device: Device) -> None:
    """Autograd does not see a copy, even from or to a leaf that requires gradients."""
    source = _filled(backend, torch.ones(3)).requires_grad_()
    there = device.empty((3,), torch.float32, stream=device.weights_in).requires_grad_()
    device.weights_in.copy(there, source)
    with torch.inference_mode():
        device.weights_in.copy(there, source)
    device.weights_in.record().synchronize()
    _demand(there.is_leaf and there.grad_fn is None and source.grad is None, "a copy must not enter the graph")
    _demand(bool((there == 1).all()), "a tensor that requires gradients must copy like any other")


def generators_repeat(backend: Backend, device: Device) -> None:
    """The same seed draws the same numbers on the device."""
    del backend
    generator = device.generator()
    saved = generator.get_state()
    draws: list[torch.Tensor] = []
    for _ in range(2):
        with device.computing():
            generator.manual_seed(7)
            draws.append(torch.rand(4, device=device.torch_device).cpu())
    generator.set_state(saved)
    _demand(torch.equal(*draws), "seeding generator() must repeat the device's random numbers")


def registered_memory_copies(backend: Backend, device: Device) -> None:
    """Existing memory can be registered, also twice, copies like any other, and is unpinned at the end."""
    values = torch.arange(5000.0)
    registered = backend.register([values, torch.empty(0)])
    again = backend.register([values])
    _demand(backend.is_pinned(values[7:]), "registered memory must be pinned")
    there = device.empty((5000,), torch.float32, stream=device.weights_in)
    result = backend.host_empty((5000,), torch.float32)
    device.weights_in.copy(there, values)
    device.weights_in.copy(result, there)
    device.weights_in.record().synchronize()
    _demand(torch.equal(result, values), "copies from registered memory must be exact")
    del registered
    _demand(backend.is_pinned(values), "memory registered twice must stay pinned until both handles are gone")
    del again
    _demand(not backend.is_pinned(values), "memory must be unpinned once no handle of register() is left")


def any_thread_may_wait(backend: Backend, device: Device) -> None:
    """Any thread may wait for an event, query it, and free device memory."""
    source = _filled(backend, torch.ones(1000))
    there = [device.empty((1000,), torch.float32, stream=device.weights_in)]
    result = backend.host_empty((1000,), torch.float32)
    device.weights_in.copy(there[0], source)
    device.weights_in.copy(result, there[0])
    event = device.weights_in.record()

    def elsewhere() -> bool:
        event.synchronize()
        there.clear()
        return event.query()

    _demand(bounded(elsewhere), "query() in another thread must be True after its synchronize()")
    _demand(event.query(), "an event that another thread waited for must have finished for all threads")
    backend.host_touch(read=[result])
    _demand(bool((result == 1).all()), "another thread's wait must finish the copies")


def abilities_are_told(backend: Backend, device: Device) -> None:
    """A backend tells what its devices do in their own way."""
    told = getattr(backend, "abilities", None)
    _demand(isinstance(told, Abilities), f"{device.name}'s backend must have Abilities")


PROMISES: tuple[Promise, ...] = (
    names_differ,
    events_end,
    streams_keep_order,
    devices_synchronize,
    bits_survive,
    nothing_copies,
    copies_refuse,
    parts_are_copied,
    casts_convert,
    timed_events_measure,
    blocks_have_their_layouts,
    host_memory_is_exact,
    device_memory_is_counted,
    computing_uses_the_stream,
    copies_are_raw,
    generators_repeat,
    registered_memory_copies,
    any_thread_may_wait,
    abilities_are_told,
    *graph_contract.PROMISES,
)


def closing_is_final(backend: Backend) -> None:
    """A closed backend refuses to allocate, leaves allocated host memory intact, and may be closed again."""
    kept = _filled(backend, torch.arange(3))
    backend.close()
    backend.close()
    _demand_raises(Closed, lambda: backend.host_empty((1,), torch.float32), "host_empty() after close()")
    _demand(torch.equal(kept, torch.arange(3)), "host memory must stay intact after close()")
