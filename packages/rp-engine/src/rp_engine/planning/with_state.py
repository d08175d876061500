"""Where the layers of calls run whose state stays on devices from call to call, and in which tasks."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from rp_sched import Task, TaskKind
from rp_state.layers import LayerState

from rp_engine.device.memory.weight_cache import WeightCache, bytes_to_bring
from rp_engine.runtime.runtime import Runtime

# Weights up to this share of some devices' memory stay there: the rest is for state, such as keys and values.
_SHARE = 0.6
# Nothing is known of what else there is when the first task brings all of a device's weights.
_EASY_SHARE = 0.5
# Of a device's memory, for the layers that it has at its turn: as many as a task brings while others stay.
_TURN_SHARE = 1 / 32
# Of a device's memory, for the weights of a task if none stay.
_STAGE_SHARE = 0.25


def assign_layers(layers: Sequence[LayerState], runtime: Runtime) -> tuple[tuple[int, ...], ...]:
    """Return the layers of each device.

    Where all weights have room on some devices, those layers that follow each other are on as few devices as that
    takes. Otherwise each device brings what does not fit of its own layers alone, and a few layers go to each in
    turn: so all devices bring weights at the same time, and each computes another microbatch. If devices divided
    the microbatches, each would keep the same weights, and bring the same others.
    """
    sizes = [bytes_to_bring([layer]) for layer in layers]
    memory = [use.total_bytes for use in runtime.memory()]
    fitting = (count for count, room in enumerate(accumulate(memory), start=1) if sum(sizes) <= _SHARE * room)
    for count in fitting:
        return _divided(sizes, memory[:count], len(memory))
    return _in_turn(sizes, _TURN_SHARE * min(memory), len(memory))


def _in_turn(sizes: Sequence[int], most: float, count: int) -> tuple[tuple[int, ...], ...]:
    """Layers that follow each other and take `most` bytes, or single layers, to `count` devices in turn.

    >>> _in_turn([1, 4, 2, 2, 4], 4, 2)
    ((0, 2, 3), (1, 4))
    """
    turns = _within(most, dict(enumerate(sizes)))
    return tuple(tuple(layer for turn in turns[first::count] for layer in turn) for first in range(count))


def _divided(sizes: Sequence[int], shares: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Layers that follow each other, whose sizes are about as `shares`, and none, for `count` devices in all.

    >>> _divided([1, 4, 4, 4, 3], [10, 10], 3)
    ((0, 1, 2), (3, 4), ())
    """
    ends = [share * sum(sizes) / sum(shares) for share in accumulate(shares)]
    before = accumulate(sizes, initial=0)
    # By its middle. Layers without weights at the end belong to the last one.
    homes = [
        min(bisect_right(ends, start + size / 2), len(shares) - 1)
        for start, size in zip(before, sizes, strict=False)
    ]
    return tuple(tuple(layer for layer, home in enumerate(homes) if home == device) for device in range(count))


def stateful_tasks(
    layers: Sequence[LayerState],
    microbatches: int,
    homes: Sequence[Sequence[int]],
    kept: Sequence[WeightCache],
    memory: Sequence[float],
) -> tuple[Task, ...]:
    """Return the tasks of a call, each layer on its device for all microbatches.

    `kept`: the weights that are on each device, of `memory` bytes. A task that brings many others leaves room for
    those of the next task, and for the state.
    """
    tasks = [
        Task(TaskKind.FORWARD, stage, range(microbatches), device)
        for device, home in enumerate(homes)
        for stage in _stages(layers, home, kept[device], memory[device])
    ]
    return tuple(sorted(tasks, key=lambda task: task.layers.start))


def _stages(layers: Sequence[LayerState], home: Sequence[int], kept: WeightCache, memory: float) -> list[range]:
    sizes = {layer: bytes_to_bring([layers[layer]], kept) for layer in home}
    total = bytes_to_bring([layers[layer] for layer in home])
    if sum(sizes.values()) == total <= _EASY_SHARE * memory:
        most = math.inf
    else:
        most = _STAGE_SHARE * memory if kept.stage_bytes is None else kept.stage_bytes
    return _within(most, sizes) if home else []


def _within(most: float, sizes: dict[int, int]) -> list[range]:
    """Layers that follow each other, whose sizes add up to `most` or less, or are a single layer.

    >>> _within(5, {3: 2, 4: 3, 5: 1, 6: 9, 8: 1})
    [range(3, 5), range(5, 6), range(6, 7), range(8, 9)]
    """
    first = next(iter(sizes))
    stages, nbytes = [range(first, first)], 0
    for layer, size in sizes.items():
        begun = stages[-1]
        if begun and (layer != begun.stop or nbytes + size > most):
            stages.append(range(layer, layer + 1))
            nbytes = size
        else:
            stages[-1] = range(begun.start, layer + 1)
            nbytes += size
    return stages
