"""Host memory of the activations between stages: guessed from layers' widths, then known from what calls took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from rp_sched import Task
from rp_state.layers import LayerState

from rp_engine.device.memory.call_size import CallSize

# A call of so many times the largest before is only guessed: what does not grow with the rows, such as staging
# memory, would count as many times.
_KNOWN_UP_TO = 4


@dataclass(frozen=True, slots=True)
class ExpectedActivations:
    """Bytes of a call's activations, as guessed from widths and, if `is_measured`, corrected by earlier calls."""

    nbytes: int
    guessed_bytes: int
    is_measured: bool


class ActivationMemory:
    """The activations that a model's calls have on the host at once, in bytes.

    Saved inputs of stages wait for backward, in all microbatches. Beside them are the activations, or gradients,
    at one boundary, and the outputs if the caller wants them.
    """

    def __init__(self, layers: Sequence[LayerState]) -> None:
        self._inputs = [_width(layer) for layer in layers]
        self._outputs = _width(layers[-1], of_output=True)
        # The pool before the first call, which may hold what other models have left; infinite if that is unknown.
        self._before = math.inf
        # Measured bytes for each guessed one; infinite if nothing was measured.
        self._factor = math.inf
        # The largest guess of a launched call.
        self._most_guessed = 0

    def expect(self, tasks: Sequence[Task], size: CallSize, *, keeps_outputs: bool) -> ExpectedActivations:
        """What the next call takes: proportional to its rows, as `rp_sched.host_bytes` counts them."""
        widths = held_at_once(tasks, self._inputs)
        guessed = size.rows * size.microbatches * (widths + (self._outputs if keeps_outputs else 0))
        if math.isinf(self._factor) or guessed > _KNOWN_UP_TO * self._most_guessed:
            return ExpectedActivations(guessed, guessed, is_measured=False)
        return ExpectedActivations(int(guessed * self._factor), guessed, is_measured=True)

    def note_launched(self, expected: ExpectedActivations) -> None:
        """This call was not refused."""
        self._most_guessed = max(self._most_guessed, expected.guessed_bytes)

    def note(self, pool_bytes: int) -> None:
        """Correct the guesses, before a call, by the pool of pinned buffers: it keeps the peak of all calls.

        The least correction counts: outputs that the caller holds, and calls under way together, add to the pool.
        """
        if not self._most_guessed:
            self._before = pool_bytes
        elif pool_bytes > self._before:
            self._factor = min(self._factor, (pool_bytes - self._before) / self._most_guessed)


def held_at_once(tasks: Sequence[Task], input_bytes: Sequence[int]) -> int:
    """Bytes of activations on the host, of one microbatch in each task, where layers have inputs of `input_bytes`.

    >>> tasks = [Task("F", range(0, 2), range(1), 0), Task("FB", range(2, 3), range(1), 0)]
    >>> held_at_once(tasks, [1, 10, 100])
    200
    """
    entered = {task.layers.start for task in tasks if task.layers.start > 0}
    saved = {task.layers.start for task in tasks if task.layers.start > 0 and task.runs_backward}
    return sum(input_bytes[at] for at in saved) + max((input_bytes[at] for at in entered), default=0)


def _width(layer: LayerState, *, of_output: bool = False) -> int:
    """Bytes of a row of the layer's input: most of its matrices multiply just that. 0 for a layer without any."""
    matrices = [tensor for block in layer.blocks for tensor in block.tensors if tensor.ndim > 1]
    if not matrices:
        return 0
    if of_output:
        return matrices[-1].shape[0] * matrices[-1].element_size()
    return median_low(tensor.shape[1] * tensor.element_size() for tensor in matrices)
