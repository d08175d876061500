"""Device memory of activations and workspace: guessed from the weights' shapes, then measured.

For each layer: the bytes of activations that it keeps from its forward to its backward pass. Once for the model:
the workspace, which is what layers allocate temporarily. Activations grow with the rows of a microbatch (its
tokens, samples or pixels); a part of them, such as autocast's casts of weights, does not.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

from rp_packing import expansion_bytes
from rp_sched import LayerCost, Task
from rp_state.block import Block
from rp_state.gradient import sum_dtype
from rp_state.layers import LayerState

# For backward a matrix product keeps its input and the next operation its output; layers keep more than these.
_GUESSED_FACTOR = 2
# After a shortage, a task may be predicted to take this part of what did not fit.
_RETREAT = 0.75
# The most numbers of rows whose measured workspace is kept.
_MOST_POINTS = 8
# Relative change of a measurement below which plans are not remade.
_NEWS = 0.05


class Footprint:
    """Memory measurements of one model.

    `version` counts the measurements that matter to plans, `num_shortages` those of tasks that did not fit.
    `knows_peak`: whether the workspace was measured. `most_rows`: the most rows of microbatches whose layers were
    measured; 0 before. `graphed`: layers of which devices have graphs, whatever calls these launch.
    """

    def __init__(self, layers: Sequence[LayerState]) -> None:
        self.version = 0
        self.num_shortages = 0
        self.knows_peak = False
        self.most_rows = 0
        self.graphed = frozenset[int]()
        # The workspace by rows, where it was measured.
        self._working: dict[int, int] = {}
        # The bytes predicted for tasks that ran out of memory, by the rows of their microbatches.
        self._too_much: dict[int, int] = {}
        # Only one layer's packed weights are expanded at a time.
        self._expanding = max((expansion_bytes(layer.module) for layer in layers), default=0)
        # Workspace that does not fall with the rows, as far as it follows from the weights.
        self._constant = self._expanding + max(map(_bytes_without_rows, layers), default=0)
        self._guessed = [_guessed_bytes_per_row(layer) for layer in layers]
        # For each layer, kept bytes by rows, for the fewest and the most rows measured.
        self._measured: dict[int, dict[int, int]] = {}
        # By layer, bytes of the codes of weights that are multiplied in FP8, from upload to release.
        self._codes: dict[int, int] = {}
        # By layer, how many bytes fewer are uploaded, since codes travel in place of weights.
        self._spared: dict[int, int] = {}
        # The bytes that graphs keep on the device that has most; None before any is captured.
        self._by_graphs: int | None = None

    @property
    def is_measured(self) -> bool:
        """Whether all layers were measured that run backward."""
        return self.most_rows > 0

    def kept_bytes(self, layer: int, rows: int) -> int:
        """Return the bytes that a layer keeps for a backward; 0 if other layers were measured, but not it."""
        codes = self._codes.get(layer, 0)
        if layer in self._measured:
            return codes + _on_line(self._measured[layer], rows)
        return codes if self.is_measured else codes + self._guessed[layer] * rows

    def note_codes(self, codes: Mapping[int, int]) -> None:
        """Record the bytes of weights' codes by layer, which tasks with a backward have beside the weights."""
        if codes != self._codes:
            self._codes = dict(codes)
            self.version += 1

    def note_uploads(self, coded: Iterable[Block]) -> None:
        """Record which blocks travel with codes in place of some weights."""
        spared: dict[int, int] = {}
        for block in coded:
            # As in costs: a block of several layers counts for the last one.
            layer = max(block.users)
            spared[layer] = spared.get(layer, 0) + block.nbytes - coded_nbytes(block)
        if spared != self._spared:
            self._spared = spared
            self.version += 1

    def spared_bytes(self, layers: Iterable[int]) -> int:
        """Return how many bytes fewer than these layers' weights are uploaded."""
        return sum(self._spared.get(layer, 0) for layer in layers)

    def note_graphs(self, nbytes: int) -> None:
        """Record what graphs keep on the device that has most."""
        if self._by_graphs is None or abs(nbytes - self._by_graphs) > self._by_graphs * _NEWS:
            self._by_graphs = nbytes
            self.version += 1

    def graph_bytes(self, costs: Sequence[LayerCost], rows: int, graphed: frozenset[int] | None = None) -> int:
        """Return what graphs keep on a device beside what tasks take (`resident_bytes`).

        For calls whose layers have graphs themselves, that is what layers work in, in a pool of their own, and the
        codes of weights that these multiply. For others it is all that graphs of `graphed` layers keep, or by
        default of those that have any now.
        """
        own = [layer for layer, cost in enumerate(costs) if cost.has_graphs]
        if own:
            return self.working_at(rows) + sum(self._codes.get(layer, 0) for layer in own)
        layers = [costs[layer] for layer in (self.graphed if graphed is None else graphed)]
        if not layers:
            return 0
        fixed = sum(cost.weight_bytes + cost.gradient_bytes + cost.kept_bytes for cost in layers)
        return fixed + self.working_at(rows) if self._by_graphs is None else self._by_graphs

    def taken_bytes(self, rows: int, layers: range) -> int:
        """Return what a microbatch takes in these layers beside weights, with what they keep for backward."""
        return sum(self.kept_bytes(layer, rows) for layer in layers) + self.working_at(rows)

    def working_at(self, rows: int) -> int:
        """Return the workspace for `rows`: on a line between measured ones; beyond the largest, in proportion.

        Below the smallest, on a line to what a layer may need for its weights alone. Before any measurement, that
        of expanding weights.
        """
        if not self._working:
            return self._expanding
        most = self._most_working_rows
        if rows > most:
            return self._working[most] * rows // most
        points = [(0, min(self._constant, *self._working.values())), *self._working.items()]
        after = max(bisect_left(points, rows, key=itemgetter(0)), 1)
        return _on_line(dict(points[after - 1 : after + 1]), rows)

    def note_kept(self, kept: Mapping[int, int], rows: int, *, is_whole: bool = True) -> None:
        """Record measured bytes by layer; smaller values count only for more rows than were measured before.

        `is_whole`: `kept` has all layers that run backward.
        """
        if is_whole and kept:
            self.most_rows = max(rows, self.most_rows)
        for layer, nbytes in kept.items():
            ends = self._measured.get(layer, {})
            if not ends or _is_news(ends, rows, nbytes):
                self._measured[layer] = _joined(ends, rows, max(nbytes, 0))
                self.version += 1

    def note_peak(self, peak_bytes: int, tasks: Sequence[Task], costs: Sequence[LayerCost], rows: int = 1) -> None:
        """Record a device's peak: what exceeds the resident bytes of these tasks is workspace."""
        working = max(peak_bytes - resident_bytes(tasks, costs), 0)
        expected = self.working_at(rows)
        if rows > self._most_working_rows or working > expected:
            self._set_working(rows, working)
        if not self.knows_peak or abs(self.working_at(rows) - expected) > expected * _NEWS:
            self.knows_peak = True
            self.version += 1

    def note_no_peak(self, peak_bytes: int, tasks: Sequence[Task], costs: Sequence[LayerCost], rows: int) -> None:
        """Record that these tasks stayed below an earlier peak, which bounds the workspace of more rows."""
        most = self._most_working_rows
        working = max(peak_bytes - resident_bytes(tasks, costs), self.working_at(most))
        if self.knows_peak and rows > most and working < self.working_at(rows):
            self._set_working(rows, working)
            self.version += 1

    @property
    def _most_working_rows(self) -> int:
        return max(self._working, default=0)

    def _set_working(self, rows: int, working: int) -> None:
        # More rows never need less workspace than fewer.
        known = {**self._working, rows: working}
        self._working = {
            each: max(nbytes for fewer, nbytes in known.items() if fewer <= each) for each in sorted(known)
        }
        if len(self._working) > _MOST_POINTS:
            del self._working[_least_missed(self._working)]

    def note_shortage(self, task: Task, costs: Sequence[LayerCost], rows: int) -> None:
        """Note that a task of several layers ran out of memory: later ones must be predicted to take less."""
        if len(task.layers) > 1:
            nbytes = _task_bytes(task, costs)
            self._too_much[rows] = min(nbytes, self._too_much.get(rows, nbytes))
            self.num_shortages += 1
            self.version += 1

    def most_bytes(self, rows: int) -> float:
        """Return the most bytes that a task may be predicted to take; infinite if every task has fit so far."""
        return min((nbytes for few, nbytes in self._too_much.items() if few <= rows), default=math.inf) * _RETREAT


def coded_nbytes(block: Block) -> int:
    """Return the bytes on a device of a block that travels with codes in place of some weights."""
    numel, dtype = block.form(coded=True)
    return numel * dtype.itemsize


def resident_bytes(tasks: Sequence[Task], costs: Sequence[LayerCost]) -> int:
    """Return a device's most bytes of weights, gradients, kept activations and weights fetched ahead.

    While a task of several microbatches runs, its device fetches the weights of the next task on it. A task of one
    microbatch keeps nothing any more when they come. The last task's next one is the first task of the next call,
    on whichever device that will be; a call that computes losses returns only when no forward pass is left, and
    the next one begins after that. Weights of the task before, until the device has passed it, are not counted:
    where launching is that far ahead, they show as workspace. Nor is what graphs keep beside tasks
    (`Footprint.graph_bytes`).

    >>> layers = [LayerCost(1, weight_bytes=10, kept_bytes=5), LayerCost(1, weight_bytes=10, kept_bytes=17)]
    >>> resident_bytes([Task("F", range(0, 1), range(2), 0), Task("FB", range(1, 2), range(2), 0)], layers)
    47
    >>> resident_bytes([Task("FB", range(1, 2), range(2), 0), Task("B", range(0, 1), range(2), 0)], layers)
    57
    """
    queues: dict[int, list[Task]] = {}
    for task in tasks:
        queues.setdefault(task.device, []).append(task)
    first = max((_weight_bytes(queue[0], costs) for queue in queues.values()), default=0)
    by_graphs = _slot_bytes(tasks, costs) + max((_pool_bytes(task, costs) for task in tasks), default=0)
    return by_graphs + max((_queue_bytes(queue, costs, first) for queue in queues.values()), default=0)


def _queue_bytes(queue: Sequence[Task], costs: Sequence[LayerCost], first: int) -> int:
    ahead = [*(_weight_bytes(task, costs) for task in queue[1:]), first]
    return max(
        _bytes_during(task, costs, fetched, is_last_loss=task is queue[-1] and task.computes_loss)
        for task, fetched in zip(queue, ahead, strict=True)
    )


def _slot_bytes(tasks: Sequence[Task], costs: Sequence[LayerCost]) -> int:
    """Return what the weights and sums of layers with graphs take, for which all tasks share slots.

    As many layers of one size as a task has at most: what is as large is taken to have one layout.
    """
    most = Counter[tuple[int, int]]()
    trains = any(task.adds_gradients for task in tasks)
    for task in tasks:
        own = (costs[layer] for layer in task.layers if costs[layer].has_graphs)
        most |= Counter((cost.weight_bytes, cost.gradient_bytes * trains) for cost in own)
    return sum((weights + gradients) * count for (weights, gradients), count in most.items())


def _pool_bytes(task: Task, costs: Sequence[LayerCost]) -> int:
    """Return what layers with graphs keep for backward, in a pool beside that of Python's runs."""
    own = (costs[layer] for layer in task.layers if task.keeps_activations and costs[layer].has_graphs)
    return sum(cost.kept_bytes for cost in own)


def _bytes_during(task: Task, costs: Sequence[LayerCost], fetched: int, *, is_last_loss: bool = False) -> int:
    kept = _kept_bytes(task, costs)
    comes_late = is_last_loss or len(task.microbatches) == 1
    state = sum(_state_of(costs[layer], task) for layer in task.layers)
    return state + (max(kept, fetched) if comes_late else kept + fetched)


def _state_of(cost: LayerCost, task: Task) -> int:
    """Return a layer's weights and gradients; where they lie in slots, what copies that leave take for longer."""
    gradients = cost.gradient_bytes if task.adds_gradients else 0
    return max(gradients - cost.kept_bytes, 0) if cost.has_graphs else cost.weight_bytes + gradients


def _task_bytes(task: Task, costs: Sequence[LayerCost]) -> int:
    return _state_bytes(task, costs) + _kept_bytes(task, costs)


def _state_bytes(task: Task, costs: Sequence[LayerCost]) -> int:
    gradients = sum(costs[layer].gradient_bytes for layer in task.layers if task.adds_gradients)
    return _weight_bytes(task, costs) + gradients


def _kept_bytes(task: Task, costs: Sequence[LayerCost]) -> int:
    return sum(costs[layer].kept_bytes for layer in task.layers if task.keeps_activations)


def _weight_bytes(task: Task, costs: Sequence[LayerCost]) -> int:
    return sum(costs[layer].weight_bytes for layer in task.layers)


def _on_line(ends: Mapping[int, int], rows: int) -> int:
    (few, least), (many, most) = min(ends.items()), max(ends.items())
    slope = most / many if few == many else max((most - least) / (many - few), 0.0)
    return max(int(most + slope * (rows - many)), 0)


def _least_missed(points: Mapping[int, int]) -> int:
    """Return the rows, but not the fewest or most, whose point a line between its neighbours replaces best.

    Best is a line that is hardly above the point, and then one that is hardly below it.

    >>> _least_missed({1: 10, 2: 11, 3: 20, 4: 40})
    2
    """
    rows = list(points)
    above = {
        rows[i]: _on_line({end: points[end] for end in (rows[i - 1], rows[i + 1])}, rows[i]) - points[rows[i]]
        for i in range(1, len(rows) - 1)
    }
    return min(above, key=lambda one: (above[one] < 0, abs(above[one])))


def _is_news(ends: Mapping[int, int], rows: int, nbytes: int) -> bool:
    expected = _on_line(ends, rows)
    # Extrapolated from few rows, the estimate for many is too high: correct it downwards only from more rows.
    is_less = rows > max(ends) and nbytes < expected * (1 - _NEWS)
    return is_less or nbytes > expected * (1 + _NEWS)


def _joined(ends: Mapping[int, int], rows: int, nbytes: int) -> dict[int, int]:
    if ends and min(ends) < rows < max(ends):
        return {end: max(known, nbytes) for end, known in ends.items()}
    points = {**ends, rows: nbytes}
    return {end: points[end] for end in (min(points), max(points))}


def _bytes_without_rows(layer: LayerState) -> int:
    """Return what a layer may work in for its weights, however few the rows: a copy, and gradients in 32 bits."""
    gradients = sum(
        block.layout.numel * sum_dtype(block.layout.dtype).itemsize
        for block in layer.blocks
        if block.kind == "trainable"
    )
    return sum(block.nbytes for block in layer.blocks) + gradients


def _guessed_bytes_per_row(layer: LayerState) -> int:
    # Packed weights show the shapes and dtypes that they have when expanded.
    tensors = [*layer.module.parameters(), *layer.module.buffers()]
    widths = sum(
        tensor.shape[0] + math.prod(tensor.shape[1:]) for tensor in tensors if tensor.ndim > 1 and tensor.numel()
    )
    return _GUESSED_FACTOR * widths * max((tensor.dtype.itemsize for tensor in tensors), default=1)
