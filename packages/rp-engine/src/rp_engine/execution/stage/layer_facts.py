"""What a task knows of a layer before it runs: none of it changes from one microbatch to the next."""

from __future__ import annotations

from dataclasses import dataclass

from rp_recompute.randomness import RngConsumer
from rp_sched import Task
from rp_state.layers import LayerState
from rp_telemetry.layer_times import LayerTimes
from rp_telemetry.tracing import SILENT

from rp_engine.execution.call import Call, View
from rp_engine.execution.effects.boundary import BoundaryChecks
from rp_engine.execution.stage.task_context import TaskContext

# How often a layer is examined after it or its flags have changed. The first time, in calls with gradients,
# outputs are compared, too; the second time attributes alone.
_EXAMINATIONS = 2


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One layer in one task.

    `is_for_loss`: the loss function of this task is what reads its output. `view`: what is made of its output
    instead of carrying it on. `is_watched`: its runs are timed or recorded, or weights of it are packed.
    `may_be_examined`, `looks_at_input`, `looks_at_output`: what has not been seen often enough in earlier tasks.
    """

    index: int
    state: LayerState
    consumer: RngConsumer
    training: tuple[bool, ...]
    prepares: bool
    has_buffers: bool
    is_for_loss: bool
    view: View | None
    is_watched: bool
    may_be_examined: bool
    looks_at_input: bool
    looks_at_output: bool

    @classmethod
    def of(
        cls, place: TaskContext, task: Task, layer: int, boundary: BoundaryChecks, times: LayerTimes | None
    ) -> LayerFacts:
        """What is known of a layer whose twin was built."""
        call, twins, state = place.call, place.twins, place.call.state.layers[layer]
        is_last = layer + 1 == call.num_layers
        is_for_loss = is_last and call.computes_loss(task)
        view = call.manner.view if is_last else None
        # Under some plan: not if only the loss function reads its output.
        crosses = view is None and (not is_for_loss or call.keep_outputs)
        return cls(
            index=layer,
            state=state,
            consumer=RngConsumer("layer", layer),
            training=call.flags[layer],
            prepares=twins.prepares(layer),
            has_buffers=state.has_buffers,
            is_for_loss=is_for_loss,
            view=view,
            is_watched=times is not None or place.tracer is not SILENT or twins.is_packed(layer),
            may_be_examined=wants_examination(call, layer),
            looks_at_input=layer == 0 and boundary.looks(layer, is_output=False),
            looks_at_output=crosses and boundary.looks(layer, is_output=True),
        )


def wants_examination(call: Call, layer: int) -> bool:
    """Whether a layer has not been examined often enough for such a call."""
    if call.holds_state or call.widening is not None:
        return False
    seen = call.habits.examined
    return max(seen[layer, True], seen[layer, call.with_grad]) < _EXAMINATIONS
