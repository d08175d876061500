"""Simulated host memory: weights, gradients and activations between stages."""

from collections.abc import Sequence

from rp_sched.problem.tasks import Task
from rp_sched.simulation.peak_memory import Holding, peak
from rp_sched.simulation.stage_costs import Loads

_Key = tuple[str, int, int]


class HostMemoryUse:
    """Records the use of host memory, call by call.

    An activation is held from the end of the microbatch in the stage that produced it to the end of its last use:
    the backward pass, if a backward stage starts at that layer, else the next stage. A gradient is held until the
    stage below has used it.
    """

    def __init__(self, loads: Loads) -> None:
        self._loads = loads
        self._fixed_bytes = loads.weight_bytes[-1]
        self._holdings: list[Holding] = []
        self._since: dict[_Key, float] = {}
        self._saved: set[tuple[int, int]] = set()

    def next_call(self, tasks: Sequence[Task]) -> None:
        """Begin a call with these tasks."""
        self._since = {}
        self._saved = {(m, task.layers.start) for task in tasks if task.runs_backward for m in task.microbatches}
        added = [layer for task in tasks if task.adds_gradients for layer in task.layers]
        trainable = self._loads.trainable_bytes[-1] if added else 0
        # If several tasks add to a layer's gradients, these are two 16-bit blocks, or one of fp32.
        divided = len(added) > len(set(added))
        gradients = 2 * trainable if divided else trainable
        self._fixed_bytes = max(self._fixed_bytes, self._loads.weight_bytes[-1] + gradients)

    def note(self, task: Task, ends: Sequence[float]) -> None:
        """Record a task; `ends`: when each of its microbatches ended."""
        for microbatch, end_ms in zip(task.microbatches, ends, strict=True):
            self._take(task, microbatch, end_ms)
            self._leave(task, microbatch, end_ms)

    def peak_bytes(self) -> int:
        """The peak so far."""
        return self._fixed_bytes + peak(self._holdings)

    def _take(self, task: Task, microbatch: int, end_ms: float) -> None:
        if task.runs_backward or (microbatch, task.layers.start) not in self._saved:
            self._drop("input", microbatch, task.layers.start, end_ms)
        if task.takes_gradients:
            self._drop("gradient", microbatch, task.layers.stop, end_ms)

    def _leave(self, task: Task, microbatch: int, end_ms: float) -> None:
        if task.sends_gradients:
            self._since["gradient", microbatch, task.layers.start] = end_ms
        if task.sends_outputs:
            self._since["input", microbatch, task.layers.stop] = end_ms
        if task.saves_inputs:
            saved = [layer for layer in task.layers[1:] if (microbatch, layer) in self._saved]
            self._since.update({("input", microbatch, layer): end_ms for layer in saved})

    def _drop(self, name: str, microbatch: int, layer: int, end_ms: float) -> None:
        since_ms = self._since.pop((name, microbatch, layer), None)
        if since_ms is not None:
            self._holdings.append((since_ms, end_ms, self._loads.input_bytes[layer]))
