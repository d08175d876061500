"""Which tasks and layers graphs may launch, and why they launch no others."""

from __future__ import annotations

from dataclasses import dataclass

from rp_recompute.randomness import RngConsumer
from rp_state.layers import LayerState
from rp_state.modules.habits import Habits
from rp_state.modules.signature import modules_of

from rp_engine.device.compiling import compiled_parts
from rp_engine.device.replica import Twins, has_hooks
from rp_engine.execution.stage.task_context import TaskContext


def task_reason(place: TaskContext, *, is_whole: bool) -> str | None:
    """Why graphs launch no layer of a task; None if they may."""
    call = place.call
    reasons = {
        "this kind of device captures no graphs": not place.backend.abilities.captures_graphs,
        'recompute_grain="layer" recomputes each layer apart': call.grain == "layer",
        "the task runs in parts, since device memory is short": not is_whole,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


@dataclass(frozen=True, slots=True)
class Graphable:
    """Tells of the layers of a task whether graphs may launch them, by what was seen of them."""

    place: TaskContext

    def is_known(self, layer: int) -> bool:
        """Whether it was seen what random numbers a layer draws. Without seeds capturing it shows that."""
        return not self._is_seeded or has_drawn(layer, self.place.call.habits)

    def reason(self, layer: int) -> str | None:
        """What a run of a layer is beside its forward, in words; None if it is nothing else."""
        call = self.place.call
        if call.holds_state and not compiled_parts(call.state.layers[layer].module):
            return "it is the model's code around its layers, which reads state as it was before them"
        return layer_reason(call.state.layers[layer], call.habits, self.place.twins, is_seeded=self._is_seeded)

    @property
    def _is_seeded(self) -> bool:
        return self.place.call.randomness is not None


def has_drawn(layer: int, habits: Habits) -> bool:
    """Whether it was seen what random numbers a layer draws; calls that compare look anew."""
    consumer = RngConsumer("layer", layer)
    return consumer in habits.not_drawing or consumer in habits.sources


def layer_reason(layer: LayerState, habits: Habits, twins: Twins, *, is_seeded: bool) -> str | None:
    """What a run of a layer is beside its forward, in words, by what was seen of it; None if it is nothing else.

    `is_seeded`: its call seeds random numbers.
    """
    index, consumer = layer.index, RngConsumer("layer", layer.index)
    if is_seeded and consumer not in habits.not_drawing:
        return "it draws random numbers on the host"
    if consumer in habits.writers:
        return "it writes its input"
    if layer.has_buffers:
        return "it has buffers"
    if twins.prepares(index):
        return "it has a `prepare`"
    if twins.is_packed(index):
        return "its weights are packed"
    return "it has hooks" if any(map(has_hooks, modules_of(layer.module))) else None
