"""The machine to plan for: devices, links and host, in the scheduler's terms, and how this one is measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Barrier

import torch
from rp_engine import Runtime
from rp_engine.estimates import USABLE, probe
from rp_packing import fp8_refusal
from rp_sched import Host, Limits, Switch
from rp_transfer import Device, HostLimit

from rp_estimate.machine.cards import Card, card_named

# CUDA's context and libraries take this much of a device's memory.
CONTEXT_BYTES = 600 * 10**6
# Defaults, measured on hosts of H200s (benchmarks/results/scaling.md).
RAM_GB_S = 165.0
# Of a consumer board: two thirds of what two channels of DDR5-5600 carry by name, 89.6. Such boards have slots for
# two cards, and for four modules of 64 GB.
TWO_CHANNELS_GB_S = 60.0
MOST_ON_A_BOARD, MOST_BOARD_BYTES = 2, 256 * 2**30
OPTIMIZER_SHARE = 0.9
GIL_MS_PER_GB = 7.0
# Of 16-bit gradients that one porter adds to two buffers: what 12.5 were in fp32, in 0.9 of the time.
ADD_GB_S = 6.9
GRADIENT_BUFFERS = 2
# The size of a matrix product that is large enough to reach a device's rate, and one for a core of the host.
_MATRIX, _CORE_MATRIX = 8192, 512
_PRODUCTS = 5


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine. `is_measured`: its card, links and host memory were measured here.

    `ram`: None if it is unknown. `switches`: the groups of cards, by number, that share one link.
    `has_graphs`: the devices can be told what to compute by graphs.
    """

    card: Card
    devices: int
    ram: HostLimit | None
    ram_gb_s: float
    switches: tuple[Switch, ...] = ()
    is_measured: bool = False
    has_graphs: bool = True

    @property
    def usable_bytes(self) -> int:
        """The bytes of a device's memory that plans may use: the rest is CUDA's, or lost to fragmentation."""
        return max(int((self.card.memory_bytes - CONTEXT_BYTES) * USABLE), 1)

    def limits(self, working_bytes: int, *, optimizer_bytes: float, double_buffer: bool) -> Limits:
        """Return the limits for plans, beside a workspace of `working_bytes` on each device.

        `optimizer_bytes`: host memory that a step moves for each trained 16-bit weight.
        """
        return Limits(
            device_memory_bytes=max(self.usable_bytes - working_bytes, 1),
            upload_gb_s=self.card.link_gb_s,
            download_gb_s=self.card.link_gb_s,
            switches=self.switches,
            host=Host(
                memory_gb_s=self.ram_gb_s,
                gil_ms_per_gb=GIL_MS_PER_GB,
                add_gb_s=ADD_GB_S,
                add_threads=self.devices,
                gradient_buffers=GRADIENT_BUFFERS,
                optimizer_bytes=optimizer_bytes,
                optimizer_gb_s=OPTIMIZER_SHARE * self.ram_gb_s,
                double_buffer=double_buffer,
            ),
        )

    def with_devices(self, devices: int) -> Machine:
        """Return the machine with another number of devices, and the same number of devices behind each switch."""
        if not self.switches:
            return replace(self, devices=devices)
        first = self.switches[0]
        size = len(first.devices)
        groups = [range(at, min(at + size, devices)) for at in range(0, devices, size)]
        switches = tuple(replace(first, devices=tuple(group)) for group in groups)
        return replace(self, devices=devices, switches=switches)


def memory_bytes_for(nbytes: int) -> int:
    """The memory of a card of which plans may use so many bytes."""
    return math.ceil(nbytes / USABLE) + CONTEXT_BYTES + 1


def measured(runtime: Runtime, dtype: torch.dtype = torch.bfloat16) -> Machine:
    """Return the machine of an open runtime, measured by the engine's probe and one matrix product.

    A card in the table has the table's rate, since a product's rate depends on its size and on the clock. CPU
    devices are measured as they train: all at once, each with its own threads, in the `dtype` of the weights.
    """
    rates = probe(runtime)
    uses = runtime.memory()
    device = runtime.lanes[0].device.torch_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else uses[0].name
    known = card_named(name)
    links = [rate for rate in (*rates.up_gb_s, *rates.down_gb_s) if rate is not None]
    tflops = known.tflops if known else _tflops(device) if device.type == "cuda" else _cpu_tflops(runtime, dtype)
    fp8_tflops = known.fp8_tflops if known else _fp8_tflops(device, tflops)
    memory_gb_s = known.memory_gb_s if known else 0.0
    card = Card(name, min(use.total_bytes for use in uses), min(links), tflops, fp8_tflops, memory_gb_s)
    return Machine(
        card,
        len(uses),
        runtime.host_limit(),
        rates.memory_gb_s or RAM_GB_S,
        rates.switches,
        is_measured=True,
        has_graphs=device.type == "cuda",
    )


def _tflops(device: torch.device) -> float:
    """Return the 10^12 operations a second of a square bf16 product."""
    one = torch.ones(_MATRIX, _MATRIX, dtype=torch.bfloat16, device=device)
    return _rate(_MATRIX, _seconds(lambda: one @ one, lambda: torch.cuda.synchronize(device)))


def _fp8_tflops(device: torch.device, tflops: float) -> float | None:
    """Return the rate in FP8: twice that of bf16 on all GPUs that have it; CPU devices compute in fp32 instead."""
    if fp8_refusal(device) is not None:
        return None
    return 2 * tflops if device.type == "cuda" else tflops


def _cpu_tflops(runtime: Runtime, dtype: torch.dtype) -> float:
    """Return the 10^12 operations a second of the slowest CPU device while all of them compute."""
    devices = [lane.device for lane in runtime.lanes]
    together = Barrier(len(devices))

    def seconds(device: Device) -> float:
        # Sets the number of threads that this device computes with.
        device.attach_thread()
        one = torch.ones(_CORE_MATRIX, _CORE_MATRIX, dtype=dtype)
        together.wait()
        return _seconds(lambda: one @ one, lambda: None)

    # New threads begin with the number of threads that was set last: give this one's back.
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(len(devices)) as pool:
            return _rate(_CORE_MATRIX, max(pool.map(seconds, devices)))
    finally:
        torch.set_num_threads(threads)


def _rate(size: int, seconds: float) -> float:
    return max(2 * size**3 / seconds / 1e12, 1e-6)


def _seconds(work: Callable[[], object], wait: Callable[[], object]) -> float:
    """Return the shortest of some times."""
    times: list[float] = []
    for _ in range(_PRODUCTS):
        begun = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - begun)
    return max(min(times), 1e-9)
