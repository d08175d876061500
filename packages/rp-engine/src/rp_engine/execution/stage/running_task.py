"""`RunningTask`: what the parts of one task share while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from rp_sched import Task
from rp_telemetry.layer_times import LayerTimes

from rp_engine.device.activations import PacketCopier
from rp_engine.device.weights import Weights
from rp_engine.execution.effects.aliasing import AliasTracker
from rp_engine.execution.shortage.task_slots import TaskSlots
from rp_engine.execution.stage.activity import TaskActivity
from rp_engine.execution.stage.task_context import TaskContext


@dataclass(frozen=True, slots=True)
class RunningTask:
    """A task with its weights and packets, on the device of `place`. `recomputes`, `is_part`: see `Stage`."""

    place: TaskContext
    task: Task
    weights: Weights
    slots: TaskSlots
    times: LayerTimes | None
    copier: PacketCopier
    activity: TaskActivity
    aliases: AliasTracker
    recomputes: bool
    is_part: bool

    @classmethod
    def of(
        cls,
        place: TaskContext,
        task: Task,
        weights: Weights,
        slots: TaskSlots,
        times: LayerTimes | None,
        *,
        recomputes: bool,
        is_part: bool,
    ) -> RunningTask:
        """A task that is to run."""
        copier = PacketCopier(place.backend, place.lane, weights.holds, place.tracer)
        activity = TaskActivity(place.call, task, place.lane.device.name)
        aliases = AliasTracker(
            lambda tensor: "a parameter or buffer of the model" if weights.holds(tensor) else None
        )
        return cls(place, task, weights, slots, times, copier, activity, aliases, recomputes, is_part)
