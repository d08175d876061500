"""Host memory of the activations between stages: guessed from layers' widths, then known from what calls took."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low
from typing import Any

from rp_sched import Task

from roundpipe.planning.footprint import rows_of
from roundpipe.state.model_state import LayerState


class Boundaries:
    """The activations that a model's calls have on the host at once, in bytes.

    Saved inputs of stages wait for backward, in all microbatches. Beside them are the activations, or gradients,
    at one boundary, and the outputs if the caller wants them. `is_measured`: a call's were measured.
    """

    def __init__(self, layers: Sequence[LayerState]) -> None:
        self._inputs = [_width(layer) for layer in layers]
        self._outputs = _width(layers[-1], of_output=True)
        self._factor = 1.0
        self._guessed = 0
        self.is_measured = False

    def expect(self, tasks: Sequence[Task], parts: Sequence[Any], *, keeps_outputs: bool) -> int:
        """Bytes of the next call: proportional to its rows, as `rp_sched.host_bytes` counts them."""
        entered = {task.layers.start for task in tasks if task.layers.start > 0}
        saved = {task.layers.start for task in tasks if task.layers.start > 0 and task.runs_backward}
        widths = sum(self._inputs[layer] for layer in saved) + max((self._inputs[at] for at in entered), default=0)
        self._guessed = rows_of(parts) * len(parts) * (widths + (self._outputs if keeps_outputs else 0))
        return int(self._guessed * self._factor)

    def note(self, pool_bytes: int) -> None:
        """Correct the guesses by what the last call has left in the pool of pinned buffers: its peak."""
        if self._guessed and pool_bytes:
            self._factor = pool_bytes / self._guessed
            self.is_measured = True


def _width(layer: LayerState, *, of_output: bool = False) -> int:
    """Bytes of a row of the layer's input: most of its matrices multiply just that. 0 for a layer without any."""
    matrices = [tensor for block in layer.blocks for tensor in block.tensors if tensor.ndim > 1]
    if not matrices:
        return 0
    if of_output:
        return matrices[-1].shape[0] * matrices[-1].element_size()
    return median_low(tensor.shape[1] * tensor.element_size() for tensor in matrices)
