"""Where the layers of calls run whose state stays on devices from call to call, and in which tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rp_sched import Task
from rp_sched.planners import stateful
from rp_sched.planners.stateful import stages_within
from rp_state.layers import LayerState

from rp_engine.device.memory.weight_cache import WeightCache, bytes_to_bring
from rp_engine.runtime.runtime import Runtime

# Nothing is known of what else there is when the first task brings all of a device's weights.
_EASY_SHARE = 0.5
# Of a device's memory, for the weights of a task if none stay.
_STAGE_SHARE = 0.25


def assign_layers(layers: Sequence[LayerState], runtime: Runtime) -> tuple[tuple[int, ...], ...]:
    """Return the layers of each device, by the weights that each would bring."""
    sizes = [bytes_to_bring([layer]) for layer in layers]
    return stateful.assign_layers(sizes, [use.total_bytes for use in runtime.memory()])


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
    stages = [
        _stages([layers[layer] for layer in home], there, nbytes)
        for home, there, nbytes in zip(homes, kept, memory, strict=True)
    ]
    return stateful.stateful_tasks(stages, microbatches)


def _stages(layers: Sequence[LayerState], kept: WeightCache, memory: float) -> list[range]:
    sizes = {layer.index: bytes_to_bring([layer], kept) for layer in layers}
    is_easy = sum(sizes.values()) == bytes_to_bring(layers) <= _EASY_SHARE * memory
    return stages_within(math.inf if is_easy else kept.stage_bytes(_STAGE_SHARE * memory), sizes)
