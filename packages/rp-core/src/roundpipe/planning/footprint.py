"""Device memory of activations and workspace: guessed from the weights' shapes, then measured.

For each layer: the bytes of activations that it keeps from its forward to its backward pass. Once for the model:
the workspace, which is what layers allocate temporarily. Activations grow with the rows of a microbatch (its
tokens, samples or pixels); a part of them, such as autocast's casts of weights, does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import rp_batch
import torch
from rp_sched import LayerCost, Task

from roundpipe.state.model_state import LayerState

# For backward a matrix product keeps its input and the next operation its output; layers keep more than these.
_GUESSED_FACTOR = 2
# Relative change of a measurement below which plans are not remade.
_NEWS = 0.05


def rows_of(parts: Sequence[Any]) -> int:
    """The rows of the largest microbatch: the most elements of an input, or vectors of a floating-point one.

    >>> rows_of([(torch.zeros(4, 7, dtype=torch.int64),), (torch.zeros(3, 7, dtype=torch.int64),)])
    28
    >>> rows_of([(torch.zeros(4, 7, 5),)])
    28
    """
    leaves = [
        leaf for part in parts for leaf in rp_batch.flatten(tuple(part))[0] if isinstance(leaf, torch.Tensor)
    ]
    return max((_rows(leaf) for leaf in leaves), default=1)


def _rows(leaf: torch.Tensor) -> int:
    width = leaf.shape[-1] if leaf.ndim and leaf.is_floating_point() else 1
    return max(leaf.numel() // max(width, 1), 1)


class Footprint:
    """Memory measurements of one model.

    `version` counts the measurements that require new plans. `working_bytes`: the workspace. `knows_peak`: whether
    the workspace was measured.
    """

    def __init__(self, layers: Sequence[LayerState]) -> None:
        self.version = 0
        self.working_bytes = 0
        self.knows_peak = False
        self._guessed = [_guessed_bytes_per_row(layer) for layer in layers]
        # For each layer, kept bytes by rows, for the fewest and the most rows measured.
        self._measured: dict[int, dict[int, int]] = {}

    @property
    def is_measured(self) -> bool:
        """Whether any layer was measured."""
        return bool(self._measured)

    def kept_bytes(self, layer: int, rows: int) -> int:
        """Bytes that a layer keeps for a microbatch's backward; 0 for a layer never measured where others were."""
        if not self.is_measured:
            return self._guessed[layer] * rows
        ends = self._measured.get(layer)
        return 0 if ends is None else _on_line(ends, rows)

    def note_kept(self, kept: Mapping[int, int], rows: int) -> None:
        """Record measured bytes by layer; smaller values count only for more rows than were measured before."""
        for layer, nbytes in kept.items():
            ends = self._measured.get(layer, {})
            if not ends or _is_news(ends, rows, nbytes):
                self._measured[layer] = _joined(ends, rows, max(nbytes, 0))
                self.version += 1

    def note_peak(self, peak_bytes: int, tasks: Sequence[Task], costs: Sequence[LayerCost]) -> None:
        """Record a device's peak: what exceeds the resident bytes of these tasks is workspace."""
        found = peak_bytes - resident_bytes(tasks, costs)
        if found > self.working_bytes * (1 + _NEWS) or not self.knows_peak:
            self.working_bytes = max(found, 0)
            self.knows_peak = True
            self.version += 1


def resident_bytes(tasks: Sequence[Task], costs: Sequence[LayerCost]) -> int:
    """The most bytes of weights, gradients and kept activations on a device, including the prefetched weights.

    >>> layers = [LayerCost(1, weight_bytes=10, kept_bytes=5), LayerCost(1, weight_bytes=10, kept_bytes=7)]
    >>> resident_bytes([Task("F", range(0, 1), range(2), 0), Task("FB", range(1, 2), range(2), 0)], layers)
    47
    """
    weights = [sum(costs[layer].weight_bytes for layer in task.layers) for task in tasks]
    rest = [
        sum(costs[i].gradient_bytes for i in task.layers if task.adds_gradients)
        + sum(costs[i].kept_bytes for i in task.layers if task.keeps_activations)
        for task in tasks
    ]
    return max(map(sum, zip(weights, rest, strict=True)), default=0) + max(weights, default=0)


def _on_line(ends: Mapping[int, int], rows: int) -> int:
    (few, least), (many, most) = min(ends.items()), max(ends.items())
    slope = most / many if few == many else max((most - least) / (many - few), 0.0)
    return max(int(most + slope * (rows - many)), 0)


def _is_news(ends: Mapping[int, int], rows: int, nbytes: int) -> bool:
    expected = _on_line(ends, rows)
    # Extrapolated from few rows, the estimate for many is too high: correct it downwards only from more rows.
    is_less = rows > max(ends) and nbytes < expected * (1 - _NEWS)
    return is_less or nbytes > expected * (1 + _NEWS)


def _joined(ends: Mapping[int, int], rows: int, nbytes: int) -> dict[int, int]:
    if ends and min(ends) < rows < max(ends):
        return {end: max(known, nbytes) for end, known in ends.items()}
    found = {**ends, rows: nbytes}
    return {end: found[end] for end in (min(found), max(found))}


def _guessed_bytes_per_row(layer: LayerState) -> int:
    widths = sum(
        tensor.shape[0] + tensor[0].numel()
        for block in layer.blocks
        for tensor in block.tensors
        if tensor.ndim > 1 and tensor.numel()
    )
    sizes = [tensor.element_size() for block in layer.blocks for tensor in block.tensors]
    return _GUESSED_FACTOR * widths * max(sizes, default=1)
