"""The limits that plans are priced with: device memory, and the measured rates of links and host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from rp_sched import Host, LayerCost, Limits, Plan, PricedPlan
from rp_state.block import Block
from rp_state.gradient import sum_dtype
from rp_state.model_state import ModelState
from rp_telemetry.layer_times import ModelTimer
from rp_telemetry.measurements import Machinery, priced
from rp_transfer import BlockGroup

from rp_engine.planning.footprint import Footprint
from rp_engine.planning.probe import frozen_gb_s, probed
from rp_engine.runtime.runtime import Runtime
from rp_engine.settings.execute_plan import MODEL_SHARE

# Until times are measured: twice as long for a byte of weights as a microbatch's forward pass is guessed to take.
_LINK_GB_S = 0.5
# In real time: PCIe 5.
_REAL_LINK_GB_S = 50.0
# Shares of a device's memory. Plans may use the first once calls are measured; the rest is lost to fragmentation.
# The second is the least that plans get, however large the measured workspace.
USABLE = 0.95
_LEAST_SHARE = 0.3
# The GIL time of launching a layer's forward and backward for a microbatch, and the forward part of it, where they
# were not measured: compiled decoders on an H200's host (benchmarks/results/performance.md).
LAUNCH_MS, FORWARD_PART = 3.1, 0.45
# The same for each pass of a layer that a graph launches: some 28 layers take below 1 ms (benchmarks/results).
REPLAY_LAUNCH_MS = 0.025
# A weight in 16 bits, as the scheduler counts parameters.
_WEIGHT_BYTES = 2


class Pricing:
    """The limits of one model's plans on a runtime.

    `has_room_for_pairs`: whether host memory suffices if two tasks of a call add to each gradient. `on_host`:
    whether devices compute on the host's cores. `sees_memory`: whether all memory of devices is counted. CPU
    devices without a limit use host memory, where activations are not.
    """

    def __init__(
        self, state: ModelState, runtime: Runtime, footprint: Footprint, has_room_for_pairs: Callable[[], bool]
    ) -> None:
        self._has_room_for_pairs = has_room_for_pairs
        self._is_tight = False
        self._state = state
        self._runtime = runtime
        self._footprint = footprint
        self.on_host = runtime.backend.abilities.computes_on_host
        self.sees_memory = all(use.is_complete for use in runtime.memory())
        self._devices = [lane.device.name for lane in runtime.lanes]
        self._memory_bytes = tuple(use.total_bytes for use in runtime.memory())
        self._host = host_of(state)

    def limits(self, costs: Sequence[LayerCost], rows: int = 0, *, is_known: bool = True) -> Limits:
        """Return the limits of plans from guessed costs: device memory, and a guessed link.

        The first call probes the machine. `rows`: of a microbatch. `is_known`: whether the bytes that layers keep
        were measured for this many rows.
        """
        measurements = self._runtime.measurements
        if not (self.on_host or measurements.is_probed):
            measurements.note_probe(probed(self._runtime))
        if not self.on_host and self._host.disk_gb_s is None:
            self._host = replace(self._host, disk_gb_s=frozen_gb_s(self._state.options.frozen))
        self._is_tight = self._state.options.steps_in_backward or (
            pairs_gradients(self._state) and not self._has_room_for_pairs()
        )
        return Limits(
            device_memory_bytes=self._budget(costs, rows, is_known=is_known),
            host_memory_bytes=self._host_memory_bytes(Host()),
            leaving_bytes=self._leaving_bytes(),
            upload_gb_s=_LINK_GB_S,
            download_gb_s=_LINK_GB_S,
        )

    def real_limits(self, costs: Sequence[LayerCost]) -> Limits:
        """Return the limits of plans from guessed costs in real time, at the rates of links and disks."""
        # In this order: the first limits probe the links.
        limits, rates = self.limits(costs), self._runtime.measurements.rates()
        up_gb_s, down_gb_s = slowest_gb_s(rates.up_gb_s), slowest_gb_s(rates.down_gb_s)
        host = Host(disk_gb_s=self._host.disk_gb_s)
        return replace(limits, upload_gb_s=up_gb_s, download_gb_s=down_gb_s, host=host)

    def priced(self, timer: ModelTimer, limits: Limits) -> Limits:
        """Return `limits` with measured rates, for plans from measured times."""
        # The first step may make second blocks.
        is_double = any(block.has_back for block in self._state.trainable)
        host = replace(self._host, double_buffer=is_double, launch_gil_share=timer.launch_gil_share)
        if self._state.trains_halves() and not is_double:
            host = in_place(host)
        speeds = timer.speeds.of(self._devices)
        machinery = Machinery(self._memory_bytes, speeds, None if self.on_host else host)
        measured = priced(limits, self._runtime.measurements.rates(), machinery)
        return replace(measured, host_memory_bytes=self._host_memory_bytes(measured.host))

    def _host_memory_bytes(self, host: Host) -> int | None:
        """Return the host memory of plans in which one task adds to each layer's gradients; None for no limit.

        There is a limit if two tasks' gradients do not fit, and if the optimizer steps during backward, since
        layers then pass on the memory of their gradients.
        """
        if not self._is_tight:
            return None
        copies = 2 if host.double_buffer else 1
        trainable = sum(block.nbytes for block in self._state.trainable)
        # As costs have them.
        weights = sum(block.nbytes for block in self._state.blocks)
        spared = self._footprint.spared_bytes(range(len(self._state.layers)))
        return weights - spared + copies * trainable

    def note_call(self, timer: ModelTimer, priced_plan: PricedPlan, call_ms: float) -> None:
        """Note the time of calls under this plan, which corrects the GIL's costs from the next call on."""
        if not self.on_host:
            launch_ms = priced_plan.work.launch_ms
            share = priced_plan.loads.limits.host.launch_gil_share
            timer.note_gil(call_ms, launch_ms, priced_plan.loads_ms(self.devices)["GIL"] - share * launch_ms)

    def network_ms(self, plan: Plan) -> float | None:
        """Return how long a step's traffic takes on the link between the machines, if each call has a step.

        None for one machine. The link's rate was measured when the machines connected, and is the same on all.
        """
        shards = self._state.shards
        if not shards.is_divided:
            return None
        spans = [
            stage
            for kind, stages, groups in plan.phases()
            for stage in stages
            for _ in range(len(groups) or 1)
            if kind.adds_gradients
        ]
        traffic = shards.traffic_bytes(
            (block.tensors, gradient_itemsize(block, spans), block.layout.dtype.itemsize)
            for block in self._state.trainable
        )
        return traffic / (self._runtime.peers.network_gb_s * 1e6)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self._devices)

    def _leaving_bytes(self) -> int | None:
        # Until a peak is known, gradients leave before the next backward pass; then they may use the free memory.
        return None if not self.sees_memory or self._footprint.knows_peak else 0

    def _budget(self, costs: Sequence[LayerCost], rows: int, *, is_known: bool) -> int:
        smallest = self._device_bytes()
        guessed = int(smallest * MODEL_SHARE)
        # The device's allocator decides whether a single layer fits when it runs, not a guess.
        largest_layer = max(cost.weight_bytes + cost.gradient_bytes for cost in costs)
        if not is_known:
            # Assume that a layer's workspace is at most what it keeps, also where it runs forward only.
            budget = guessed - max(cost.kept_bytes for cost in costs)
        elif not (self._footprint.is_measured and self._footprint.knows_peak):
            budget = guessed
        else:
            taken = self._footprint.working_at(rows) + self._footprint.graph_bytes(costs, rows)
            budget = max(self.usable_bytes - taken, int(smallest * _LEAST_SHARE))
        return max(int(min(budget, self._footprint.most_bytes(rows))), largest_layer, 1)

    @property
    def usable_bytes(self) -> int:
        """The bytes of a device's memory that plans may use once calls are measured."""
        return int(self._device_bytes() * USABLE)

    def _device_bytes(self) -> int:
        # Plans cannot use the memory that other processes and libraries have taken.
        obtainable = min(lane.device.obtainable_bytes() for lane in self._runtime.lanes)
        return min(obtainable, *(use.total_bytes for use in self._runtime.memory()))


def host_of(state: ModelState) -> Host:
    """Return the layout of a model's gradients on the host, and the bytes that its step moves.

    Two tasks' gradients in 16 bits stay two blocks, both of which the optimizer reads; in 32 bits the second is
    added to the first. Bytes are those of Adam; for an optimizer that moves other bytes, the rate is measured in
    Adam's, too.
    """
    nbytes = sum(block.nbytes for block in state.trainable)
    numel = sum(block.layout.numel for block in state.trainable)
    return Host(
        gradient_buffers=2 if pairs_gradients(state) else 1,
        optimizer_bytes=Host().optimizer_bytes * numel * _WEIGHT_BYTES / nbytes if nbytes else 0.0,
    )


def gradient_itemsize(block: BlockGroup | Block, spans: Iterable[range]) -> int:
    """Return the bytes per element of a block's gradients: fp32's if tasks of several of `spans` add to them.

    >>> import torch
    >>> found = BlockGroup("trainable", (1,), (torch.zeros(8, dtype=torch.bfloat16),))
    >>> gradient_itemsize(found, [range(2)]), gradient_itemsize(found, [range(2), range(1, 3)])
    (2, 4)
    """
    dtype, users = block.layout.dtype, frozenset(block.users)
    adding = sum(not users.isdisjoint(span) for span in spans)
    return (sum_dtype(dtype) if adding > 1 else dtype).itemsize


def pairs_gradients(state: ModelState) -> bool:
    """Return whether two tasks' gradients stay two blocks, as they do in 16 bits."""
    return any(block.layout.dtype != sum_dtype(block.layout.dtype) for block in state.trainable)


def in_place(host: Host) -> Host:
    """Return `host` for steps that write the weights that calls read, without a copy in between.

    >>> in_place(Host()).step_bytes == Host().optimizer_bytes
    True
    """
    copying = replace(host, double_buffer=False).step_bytes - host.optimizer_bytes
    return replace(host, optimizer_bytes=max(host.optimizer_bytes - copying, 0.0))


def slowest_gb_s(rates: Sequence[float | None]) -> float:
    """Return the rate of the slowest measured link, in GB/s; a guess if none was measured.

    >>> slowest_gb_s([None, 20.0, 24.0]), slowest_gb_s([None])
    (20.0, 50.0)
    """
    return min((rate for rate in rates if rate is not None), default=_REAL_LINK_GB_S)
