"""Parts of a task that need less device memory than the task, and do the same one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rp_sched import Task, TaskKind
from rp_state.layers import LayerState


@dataclass(frozen=True, slots=True)
class TaskPart:
    """A task, or a part of one. `recomputes`: a forward task recomputes what has run before.

    `tries`: how often it has failed with the device to itself.
    """

    task: Task
    recomputes: bool = False
    tries: int = 0


def smaller(
    part: TaskPart, layers: Sequence[LayerState], num_microbatches: int, *, by_layer: bool
) -> list[TaskPart]:
    """Parts of about half as many layers each; none if there is no place to cut.

    The backward pass of the upper half starts from the activations between the halves: a part that computes them
    comes first, unless the inputs of all layers were saved (`by_layer`). Gradients pass between parts as between
    stages.

    `num_microbatches`: of the call. Layers that write a buffer together stay together.
    """
    task = part.task
    middle = _middle(part, layers, num_microbatches)
    if middle is None:
        return []
    low, high = range(task.layers.start, middle), range(middle, task.layers.stop)
    kind = task.kind
    if not kind.runs_backward:
        return [_over(part, kind, low), _over(part, kind, high)]
    computes = replace(_over(part, TaskKind.FORWARD, low), recomputes=part.recomputes or kind.recomputes)
    first = [] if by_layer and kind.recomputes else [computes]
    return [*first, _over(part, kind, high), _over(part, TaskKind.BACKWARD, low)]


def _over(part: TaskPart, kind: TaskKind, layers: range) -> TaskPart:
    task = part.task
    return TaskPart(Task(kind, layers, task.microbatches, task.device), part.recomputes)


def _middle(part: TaskPart, layers: Sequence[LayerState], num_microbatches: int) -> int | None:
    inside = part.task.layers
    together = _written_together(layers) if _writes(part) and num_microbatches > 1 else []
    places = [layer for layer in inside[1:] if not any(span.start < layer < span.stop for span in together)]
    return min(places, key=lambda layer: abs(2 * layer - inside.start - inside.stop), default=None)


def _writes(part: TaskPart) -> bool:
    return part.task.runs_forward and not part.recomputes


def _written_together(layers: Sequence[LayerState]) -> list[range]:
    """Spans of layers that share a buffer which they may write."""
    blocks = {
        block for layer in layers for block in layer.blocks if block.kind == "buffer" and block.writes is not False
    }
    return [range(min(block.users), max(block.users) + 1) for block in blocks]
