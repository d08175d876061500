"""From costs to a plan."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

from rp_sched import spans
from rp_sched.arguments import whole
from rp_sched.costs import LayerCost, Limits
from rp_sched.errors import Infeasible
from rp_sched.pack import Row, even, fewest, least_cap, tail
from rp_sched.plan import Mode, Plan, check_mode

Strategy = Literal["greedy"]
"""`greedy`: stages of about the same time, as few as memory and the number of devices ask for."""

NO_LIMITS = Limits()


def plan(
    costs: Sequence[LayerCost],
    *,
    devices: int,
    microbatches: int,
    mode: Mode,
    limits: Limits = NO_LIMITS,
    strategy: Strategy = "greedy",
) -> Plan:
    """How to cut a model whose layers have these costs.

    >>> layers = [LayerCost(1.0, weight_bytes=10)] * 6
    >>> plan(layers, devices=2, microbatches=4, mode="fused")
    Plan(FB[0:6] m0:2 m2:4)
    >>> plan(layers, devices=2, microbatches=4, mode="fused", limits=Limits(device_memory_bytes=120))
    Plan(F[0:4] FB[4:6] B[2:4] B[0:2])

    In mode `fused` a model that a device holds whole, with its gradients and the kept activations of one
    microbatch, is one fused stage, and the devices divide the microbatches. Otherwise the stages leave room to
    fetch the next one (see `Limits`), take about the same time, recomputation included, and are no fewer than the
    devices if there are that many layers; as many of the last layers are fused as fit in that time and memory.
    One device needs no balance: it fuses what memory allows. In mode `train` the forward stages are cut by
    themselves, and so are the backward stages.

    Raises `Infeasible` if a layer by itself is too large for a device.
    """
    whole("devices", devices, least=1)
    whole("microbatches", microbatches, least=1)
    check_mode(mode)
    _check_costs(costs, strategy)
    _check_feasible(costs, mode, limits)
    if mode == "fused" and _holds_all(costs, limits):
        return Plan(fused=range(len(costs)), groups=spans.divide(microbatches, min(devices, microbatches)))
    forward, backward = forward_row(costs, microbatches, limits), backward_row(costs, microbatches, limits)
    if mode == "fused":
        return _fused(forward, backward, devices)
    return Plan(_stages(forward, devices), None, _stages(backward, devices)[::-1] if mode == "train" else ())


def forward_row(costs: Sequence[LayerCost], microbatches: int, limits: Limits) -> Row:
    """The layers as forward stages see them: weights arrive, nothing is kept."""
    weights = [cost.weight_bytes for cost in costs]
    times_ms = [[microbatches * cost.forward_ms for cost in costs], _link_ms(weights, limits.upload_gb_s)]
    return _limited(times_ms, weights, weights, limits)


def backward_row(costs: Sequence[LayerCost], microbatches: int, limits: Limits) -> Row:
    """The layers as backward and fused stages see them: forward and backward run, gradients leave."""
    times_ms = [
        [microbatches * (cost.forward_ms + cost.backward_ms) for cost in costs],
        _link_ms([cost.weight_bytes for cost in costs], limits.upload_gb_s),
        _link_ms([cost.trainable_bytes for cost in costs], limits.download_gb_s),
    ]
    state = [cost.weight_bytes + cost.gradient_bytes for cost in costs]
    return _limited(times_ms, state, [_need_bytes(cost, "fused") for cost in costs], limits)


def _limited(times_ms: list[list[float]], state: list[int], resident: list[int], limits: Limits) -> Row:
    state_limit, device = limits.stage_limit_bytes, limits.device_memory_bytes
    return Row.of(
        times_ms=times_ms,
        state_bytes=state,
        resident_bytes=resident,
        state_limit=math.inf if state_limit is None else state_limit,
        # What the stage fetched ahead may take is not there for the stage that runs.
        resident_limit=math.inf if device is None or state_limit is None else device - state_limit,
    )


def _link_ms(layer_bytes: list[int], gb_s: float | None) -> list[float]:
    return [0.0 if gb_s is None else size / (gb_s * 1e6) for size in layer_bytes]


def _need_bytes(cost: LayerCost, mode: Mode) -> int:
    if mode == "infer":
        return cost.weight_bytes
    return cost.weight_bytes + cost.gradient_bytes + cost.kept_bytes


def _check_costs(costs: Sequence[LayerCost], strategy: str) -> None:
    if not costs:
        raise ValueError("costs must name at least one layer, but is empty")
    for layer, cost in enumerate(costs):
        if type(cost) is not LayerCost:
            raise TypeError(f"costs[{layer}] must be a LayerCost, but is {cost!r} instead")
    if strategy != "greedy":
        raise ValueError(f"strategy must be 'greedy', but is {strategy!r} instead")


def _check_feasible(costs: Sequence[LayerCost], mode: Mode, limits: Limits) -> None:
    if limits.device_memory_bytes is None:
        return
    for layer, cost in enumerate(costs):
        if _need_bytes(cost, mode) > limits.device_memory_bytes:
            raise Infeasible(layer, _need_bytes(cost, mode), limits.device_memory_bytes)


def _holds_all(costs: Sequence[LayerCost], limits: Limits) -> bool:
    state = sum(cost.weight_bytes + cost.gradient_bytes for cost in costs)
    need = sum(_need_bytes(cost, "fused") for cost in costs)
    in_stage = len(costs) == 1 or limits.stage_bytes is None or state <= limits.stage_bytes
    return in_stage and (limits.device_memory_bytes is None or need <= limits.device_memory_bytes)


def _stages(row: Row, devices: int) -> tuple[range, ...]:
    """All layers of the row, from the first up."""
    end = row.num_layers
    stages = max(min(devices, end), fewest(row, end, math.inf))
    cap_ms = least_cap(partial(fewest, row, end), stages, row.slowest_layer_ms, row.stage_ms(range(end)))
    return even(row, end, stages, cap_ms)


def _fused(forward: Row, backward: Row, devices: int) -> Plan:
    """Forward stages, a fused last one, and backward stages, all of about the same time."""
    num_layers = backward.num_layers
    wanted = min(devices, num_layers)
    # Each layer below the fused stage gives two stages at most, one up and one down.
    longest = num_layers - max(wanted // 2, 1)

    def count(cap_ms: float) -> int:
        end = tail(backward, longest, cap_ms).start
        return fewest(forward, end, cap_ms) + 1 + fewest(backward, end, cap_ms)

    stages = max(wanted, count(math.inf))
    all_ms = backward.stage_ms(range(num_layers))
    cap_ms = all_ms if devices == 1 else least_cap(count, stages, backward.slowest_layer_ms, all_ms)
    fused = tail(backward, longest, cap_ms)
    up, down = _share(forward, backward, fused.start, stages - 1, cap_ms)
    return Plan(even(forward, fused.start, up, cap_ms), fused, even(backward, fused.start, down, cap_ms)[::-1])


def _share(forward: Row, backward: Row, end: int, stages: int, cap_ms: float) -> tuple[int, int]:
    """How many of `stages` go up and how many down: what each needs, and the rest where stages are slower."""
    up, down = fewest(forward, end, cap_ms), fewest(backward, end, cap_ms)
    up_ms, down_ms = forward.stage_ms(range(end)), backward.stage_ms(range(end))
    while up + down < stages:
        if down == end or (up < end and up_ms / up > down_ms / down):
            up += 1
        else:
            down += 1
    return up, down
