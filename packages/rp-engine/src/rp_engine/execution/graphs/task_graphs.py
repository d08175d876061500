"""Which layers of a task graphs launch: captured when a shape comes again, tried a call later, then replayed."""

from __future__ import annotations

import logging
from collections.abc import Generator, Hashable, Sequence
from contextlib import contextmanager
from typing import Any, cast

import rp_batch
import torch
from rp_recompute.attributes import Attributes, ModuleCopy, attributes_of, changes
from rp_recompute.randomness import RngConsumer
from rp_transfer import NotCapturable, is_out_of_memory

from rp_engine.device.memory.graph_store import Entry
from rp_engine.errors import ImpureLayer
from rp_engine.execution.call import USUAL
from rp_engine.execution.graphs.graph_memory import NoRoom, TaskGraphMemory
from rp_engine.execution.graphs.graphable import Graphable, task_reason
from rp_engine.execution.graphs.layer_graphs import CaptureWork, LayerGraphs
from rp_engine.execution.graphs.replay_steps import LayerCallback, Replays, Steps, divided, ignore
from rp_engine.execution.graphs.trial import Trial
from rp_engine.execution.lazy import is_lazy
from rp_engine.execution.stage.layer_runs import LayerRuns
from rp_engine.execution.stage.running_task import RunningTask

_LOG = logging.getLogger(__name__)
# Weights that a graph awaits, and gradients that leave after it, are so many bytes or one layer's. As large as a
# departure of gradients.
SEGMENT_BYTES = 128 << 20
# Graphs are tried again after so many calls of a mode on a device, each time after twice as many, up to the second
# number: what changes at all usually does so soon.
_TRIED_AGAIN, TRIED_EACH = 4, 64
_CHANGED = (
    "a replay of {} gives something else than a run by Python: {}. Something that is no input of theirs has "
    "changed since they were captured, such as a number in a global; steps since then may have used the old one. "
    'Pass it as an input or keep it in a buffer, or use launch="eager"'
)
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class TaskGraphs:
    """Replays layers of one task where they have graphs; the others run as they are.

    In a task's first microbatch graphs are captured, or tried: a replay and a run by Python, from the same inputs
    and seeds, must give the same outputs and gradients. Then Python runs it, as where there is still something to
    see of a layer. Else it is replayed as weights arrive, and the last one while gradients leave.
    """

    def __init__(self, running: RunningTask, layers: LayerRuns) -> None:
        place, task, weights, times = running.place, running.task, running.weights, running.times
        self._place = place
        self._call = call = place.call
        self._device = place.lane.device
        self._twins = place.twins
        self._store = place.twins.graphs
        self._task = task
        self._weights = weights
        self._memory = TaskGraphMemory(place, task, weights)
        self._layers = layers
        self._call_number = self._store.number(call.mode, call.number) if call.manner is USUAL else 0
        # Tasks that add gradients run layers with a graph of autograd.
        self._trains = task.adds_gradients
        self._graphable = Graphable(place)
        self._may_capture: dict[int, bool] = {}
        self._places: dict[int, int] = {}
        self._kinds: dict[range, Hashable] = {}
        # The first layer beyond those that graphs are there for, or to be.
        self._prepared = 0
        self._replays = Replays(place, running.activity, times, weights.sums.count)
        call.graph_work.is_measured |= times is not None and not times.timer.VERBOSE
        # Calls that are measured for a plan by Python have no replays.
        is_asked = call.by_graphs and (times is None or bool(times.by_graphs))
        self.is_used = is_asked and call.manner is USUAL and not self._store.is_off
        is_whole = not (running.is_part or running.recomputes)
        if self.is_used and (reason := task_reason(place, is_whole=is_whole)) is not None:
            self._tell(task.layers, reason)
            self.is_used = False

    def run(
        self, layers: range, microbatch: int, tree: Any, *, recomputes: bool, passed: LayerCallback = ignore
    ) -> tuple[int, Any] | None:
        """Replay the first of these layers, if graphs launch them; return how many, and the output of the last.

        `recomputes`: a replay recomputes what forward has run. `passed`: see `Steps`.
        """
        span = self._span(layers) if self.is_used else layers[:0]
        if not span:
            return None
        is_first = microbatch == self._task.microbatches.start
        if is_first:
            if span.start < self._prepared:
                return None
            if self._prepare(span, microbatch, tree, recomputes=recomputes):
                self._prepared = span.stop
            if not self._may_replay_first(span, recomputes=recomputes):
                return None
        leaves, treedef = rp_batch.flatten(tree)
        entry = self._store.entries.get(self._key(span, leaves, treedef))
        if entry is None or entry.graphs is None or not entry.is_tried:
            return None
        self._call.graph_work.is_replayed = True
        steps = Steps(self._replays, microbatch, self._bind if is_first else None, passed)
        return len(span), self._replay(entry.graphs, leaves, steps)

    def begin(self) -> None:
        """Find what there is of graphs, as the task begins; free it if no later calls are to have any."""
        if self._call.frees_graphs and self._store.slots:
            self._store.clear()
        if self._call.manner is USUAL:
            self._store.tidy(self._call.mode, self._call_number)
        self.is_used = self.is_used and not self._store.is_off
        if self.is_used:
            self._memory.begin()

    def drop(self) -> None:
        """Free all graphs of the model on this device: its memory is short."""
        self.is_used = False
        self._memory.forget()
        if self._store.entries:
            self._store.drop()
            _LOG.info("model %r: layers run without graphs from now on: device memory ran out", self._call.name)

    def _may_replay_first(self, layers: range, *, recomputes: bool) -> bool:
        """Whether Python need not run these layers in the first microbatch."""
        return not self._call.compares and all(
            self._layers.has_seen_enough(layer, recomputes=recomputes) for layer in layers
        )

    def _replay(self, graphs: LayerGraphs, leaves: Sequence[Any], steps: Steps) -> Any:
        with self._place.span("replay from {} on", self._call.state.layers[graphs.layers.start]):
            return graphs.replay(leaves, steps)

    def _bind(self, layer: int) -> None:
        self._weights.bind(self._call.state.layers[layer], training=self._trains)

    # Which layers

    def _span(self, layers: range) -> range:
        """The first layers of a range that graphs may launch."""
        stop = layers.start
        while stop < layers.stop and self._asks_nothing(stop):
            stop += 1
        return range(layers.start, stop)

    def _asks_nothing(self, layer: int) -> bool:
        """Whether a layer's forward is all that there is to a run of it, by what was seen of it."""
        if layer in self._store.refused or self._layers.is_for_loss(layer):
            return False
        if layer not in self._may_capture:
            known = self._store.graphable
            # A call that compares looks anew at what layers draw, so it goes by what calls before it have seen.
            if not self._call.compares and self._graphable.is_known(layer):
                reason = self._graphable.reason(layer)
                known[layer] = reason is None
                if reason is not None:
                    self._tell(range(layer, layer + 1), reason)
            self._may_capture[layer] = known.get(layer, False)
        return self._may_capture[layer]

    def _key(self, layers: range, leaves: Sequence[Any], treedef: Any) -> Hashable:
        if layers not in self._kinds:
            self._kinds[layers] = self._kind(layers)
        return self._kinds[layers], treedef, tuple(map(_signature, leaves))

    def _kind(self, layers: range) -> Hashable:
        """What graphs of these layers depend on that is the same for all microbatches of the task."""
        call = self._call
        return (
            layers,
            # A forward without gradients makes what requires none, and one without seeds draws as the caller does.
            (self._trains, call.mode, call.randomness is None),
            call.flags[layers.start : layers.stop],
            call.products,
            self._memory.forms(layers),
            # Graphs that run in one task must not share a pool.
            self._places.get(layers.start),
            call.autocast,
            tuple(map(id, self._modules(layers))),
        )

    def _modules(self, layers: range) -> tuple[torch.nn.Module, ...]:
        return tuple(self._twins.module(layer, self._call.flags[layer]) for layer in layers)

    # Before they are used

    def _prepare(self, layers: range, microbatch: int, tree: Any, *, recomputes: bool) -> bool:
        """Capture or try graphs of some layers, if that is due; return whether those after the first need none."""
        leaves, treedef = rp_batch.flatten(tree)
        place = self._places[layers.start] = len(self._places)
        key = self._key(layers, leaves, treedef)
        entry = self._store.entry(key, self._modules(layers), self._call.mode, place)
        if entry.last_call != self._call_number:
            entry.num_seen += 1
        entry.last_call = self._call_number
        if entry.reason is None and entry.num_seen >= entry.num_awaited:
            self._bring_on(entry, layers, microbatch, leaves, treedef, recomputes=recomputes)
        elif entry.reason is None:
            self._call.graph_work.is_awaited = True
        return entry.reason is None or entry.is_short

    def _bring_on(
        self,
        entry: Entry,
        layers: range,
        microbatch: int,
        leaves: Sequence[Any],
        treedef: Any,
        *,
        recomputes: bool,
    ) -> None:
        try:
            if entry.graphs is None and not self._call.compares:
                self._call.graph_work.is_prepared = True
                entry.graphs = self._captured(layers, entry.place, leaves, treedef)
                entry.slots, entry.is_tried = self._memory.slots(layers), False
            elif entry.graphs is not None and (
                not entry.is_tried
                or self._call_number >= entry.tried_at + min(_TRIED_AGAIN << entry.num_trials, TRIED_EACH)
            ):
                self._try(entry.graphs, microbatch, leaves, treedef, recomputes=recomputes)
                entry.num_trials += entry.is_tried
                entry.is_tried, entry.tried_at = True, self._call_number
        except NotCapturable as error:
            if not entry.is_tried:
                entry.is_short = isinstance(error, NoRoom)
                self._refuse(entry, layers, str(error))
            # Where there is no room, graphs that were compared before stay, and are compared again later.
            elif not isinstance(error, NoRoom):
                raise ImpureLayer(_CHANGED.format(_words(layers), error)) from None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.drop()
            self._device.release_unused()

    def _refuse(self, entry: Entry, layers: range, reason: str) -> None:
        if entry.graphs is not None:
            entry.graphs.close()
        entry.graphs, entry.reason = None, reason
        self._tell(layers, reason)

    def _tell(self, layers: range, reason: str) -> None:
        """Log once for each model and reason why layers run without graphs."""
        told = self._call.habits.told
        if reason not in told:
            told.add(reason)
            _LOG.info("model %r: %s run without graphs: %s", self._call.name, _words(layers), reason)

    def _captured(self, layers: range, place: int, leaves: Sequence[Any], treedef: Any) -> LayerGraphs:
        for leaf in leaves:
            if is_lazy(leaf) or not (isinstance(leaf, torch.Tensor) or _is_value(leaf)):
                kind = type(leaf).__qualname__
                raise NotCapturable(
                    f"their inputs hold a {kind}, which is no tensor and has no hash of its contents"
                )
        # A pool holds what a run by Python takes beside weights, which follows.
        taken, pool = self._memory.taken_bytes(layers), self._memory.pool(place)
        self._memory.fix(layers, taken + max(taken - pool.nbytes, 0))
        before = self._attributes(layers)
        work = CaptureWork(
            divided(layers, lambda layer: self._call.state.layers[layer].blocks, SEGMENT_BYTES),
            self._plain,
            self._drawing(layers),
            self._trains,
            self._backward,
            self._weights.sums.counts,
        )
        try:
            # A cast that an earlier microbatch made is no memory of the graph's.
            with self._call.uncached_autocast():
                graphs = LayerGraphs(self._device, pool, work, leaves, treedef)
        finally:
            # What was added and counted while it was captured is no gradient.
            self._weights.sums.begin_again()
        if changes(before, self._attributes(layers)):
            graphs.close()
            raise NotCapturable("they change plain attributes, which a replay does not")
        return graphs

    def _plain(self, layer: int, tree: Any) -> Any:
        call: tuple[tuple[Any, ...], dict[str, Any]] = tree if layer == 0 else ((tree,), {})
        args, kwargs = call
        try:
            return self._twins.module(layer, self._call.flags[layer])(*args, **kwargs)
        except Exception as error:
            if not is_out_of_memory(error):
                # From the next call on those beside it are captured without it.
                self._store.refused.add(layer)
            raise

    def _try(
        self, graphs: LayerGraphs, microbatch: int, leaves: Sequence[Any], treedef: Any, *, recomputes: bool
    ) -> None:
        layers = graphs.layers
        # Its memory is there. A run by Python needs about what the pool holds.
        self._memory.fix(layers, min(self._memory.taken_bytes(layers), self._store.pool_bytes))
        self._call.graph_work.is_prepared = True

        def by_python(given: list[Any]) -> Any:
            tree = rp_batch.unflatten(treedef, given)
            for layer in layers:
                tree = self._layers.run(layer, microbatch, tree, recomputes=recomputes)
            return tree

        def replay(given: list[Any]) -> Any:
            return self._replay(graphs, given, Steps(self._replays, microbatch))

        device, backward = self._device.torch_device, self._backward if self._trains else None
        Trial(device, leaves, self._memory.blocks(layers), self._weights.sums, backward).compare(by_python, replay)

    @contextmanager
    def _backward(self) -> Generator[None]:
        with self._call.without_autocast(), self._weights.sums.adding():
            yield

    def _drawing(self, layers: range) -> frozenset[int]:
        drawing = () if self._call.randomness is None else self._call.habits.drawing_on_device
        return frozenset(layer for layer in layers if RngConsumer("layer", layer) in drawing)

    def _attributes(self, layers: range) -> Attributes:
        return attributes_of([ModuleCopy(*part) for layer in layers for part in self._twins.parts(layer)])


def _words(layers: range) -> str:
    return f"layers {layers.start} to {layers.stop - 1}" if len(layers) > 1 else f"layer {layers.start}"


def _signature(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, tuple(leaf.shape), tuple(leaf.stride()), leaf.requires_grad
    return type(cast("object", leaf)), leaf if _is_value(leaf) else None


def _is_value(leaf: object) -> bool:
    """Whether an equal object may stand for it: it has a hash of its contents, which thus do not change."""
    if isinstance(leaf, _VALUES):
        return True
    if type(leaf).__hash__ in (None, object.__hash__):
        return False
    try:
        hash(leaf)
    except TypeError:
        return False
    return True
