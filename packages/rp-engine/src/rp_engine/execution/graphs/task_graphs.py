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

from rp_engine.device.memory.graph_store import Entry, HeldState
from rp_engine.errors import ImpureLayer
from rp_engine.execution.call import USUAL
from rp_engine.execution.graphs.graph_memory import KeptGraphMemory, NoRoom, TaskGraphMemory, graphs_of
from rp_engine.execution.graphs.graphable import Graphable, task_reason
from rp_engine.execution.graphs.held_state import held_in
from rp_engine.execution.graphs.layer_graphs import CaptureWork, LayerGraphs
from rp_engine.execution.graphs.replay_steps import LayerCallback, MicrobatchSteps, Replays, divided, ignore
from rp_engine.execution.graphs.trial import GraphTrial
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
# State that was elsewhere in so many calls has no place that graphs could know.
_MOST_MOVES = 4
_GROWS = (
    'their cache has its keys elsewhere after each token; generate(..., cache_implementation="static") makes one '
    "of fixed size"
)
_MOVES = "their cache is elsewhere, or has other numbers in Python, after each token, as where beams are reordered"
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
        self._store = graphs_of(place, task)
        self._task = task
        self._weights = weights
        self._memory = (KeptGraphMemory if call.holds_state else TaskGraphMemory)(place, task, weights)
        self._layers = layers
        # Other calls aside have none.
        may_have = call.manner is USUAL or (call.holds_state and not self._store.is_off)
        self._call_number = self._store.number(call.mode, call.number) if may_have else 0
        # Tasks that add gradients run layers with a graph of autograd.
        self._trains = task.adds_gradients
        self._graphable = Graphable(place)
        self._may_capture: dict[int, bool] = {}
        self._places: dict[int, int] = {}
        self._kinds: dict[range, Hashable] = {}
        # The first layer beyond those that graphs are there for, or to be.
        self._prepared = 0
        # In calls with state, of which each microbatch has its own, each is prepared.
        self._latest_microbatch = -1
        self._replays = Replays(place, running.activity, times, weights.sums.count)
        call.graph_work.is_measured |= times is not None and not times.timer.VERBOSE
        # Calls that are measured for a plan by Python have no replays.
        is_asked = call.by_graphs and (times is None or bool(times.by_graphs))
        self.is_used = is_asked and may_have and not self._store.is_off
        is_whole = not (running.is_part or running.recomputes)
        if self.is_used and (reason := task_reason(place, is_whole=is_whole)) is not None:
            self._tell(task.layers, reason)
            self.is_used = False

    def run(
        self, layers: range, microbatch: int, tree: Any, *, recomputes: bool, passed: LayerCallback = ignore
    ) -> tuple[int, Any] | None:
        """Replay the first of these layers, if graphs launch them; return how many, and the output of the last.

        `recomputes`: a replay recomputes what forward has run. `passed`: see `MicrobatchSteps`.
        """
        span = self._span(layers) if self.is_used else layers[:0]
        if not span:
            return None
        is_first = microbatch == self._task.microbatches.start or self._call.holds_state
        if is_first:
            if microbatch != self._latest_microbatch:
                self._latest_microbatch, self._prepared = microbatch, 0
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
        steps = MicrobatchSteps(self._replays, microbatch, self._bind if is_first else None, passed)
        return len(span), self._replay(entry.graphs, leaves, steps)

    def begin(self) -> None:
        """Find what there is of graphs, as the task begins; free it if no later calls are to have any."""
        if self._call.frees_graphs and self._store.slots:
            self._store.clear()
        self.is_used = self.is_used and not self._store.is_off
        if self.is_used or self._call.manner is USUAL:
            self._store.tidy(self._call.mode, self._call_number)
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

    def _replay(self, graphs: LayerGraphs, leaves: Sequence[Any], steps: MicrobatchSteps) -> Any:
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
        if layer in self._store.refused or self._layers.is_for_loss(layer) or not self._memory.stays(layer):
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
        # Those of another microbatch's state are replayed after these.
        place = self._places.setdefault(layers.start, len(self._places))
        key = self._key(layers, leaves, treedef)
        entry = self._store.entry(key, self._modules(layers), self._call.mode, place)
        if self._call.holds_state and not self._has_state(entry, layers, leaves):
            return False
        if entry.last_call != self._call_number:
            entry.num_seen += 1
        entry.last_call = self._call_number
        if entry.reason is None and entry.num_seen >= entry.num_awaited:
            self._bring_on(entry, layers, microbatch, leaves, treedef, recomputes=recomputes)
        elif entry.reason is None:
            self._call.graph_work.is_awaited = True
        return entry.reason is None or entry.is_short

    def _has_state(self, entry: Entry, layers: range, leaves: Sequence[Any]) -> bool:
        """Note where state that layers write is; return whether it is where graphs can know it."""
        if entry.reason is None:
            state = held_in(leaves)
            if state is not None:
                entry.note_state(state)
                if entry.num_moved < _MOST_MOVES:
                    return True
            entry.state = None
            self._refuse(entry, layers, _GROWS if state is None else _MOVES)
        self.is_used, self._store.is_off = False, True
        return False

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
                entry.graphs = self._captured(layers, entry.place, leaves, treedef, entry.state)
                entry.slots, entry.is_tried = self._memory.slots(layers), False
            elif entry.graphs is not None and (
                not entry.is_tried
                or self._call_number >= entry.tried_at + min(_TRIED_AGAIN << entry.num_trials, TRIED_EACH)
            ):
                self._try(entry.graphs, microbatch, leaves, treedef, self._of_state(entry), recomputes=recomputes)
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

    def _of_state(self, entry: Entry) -> list[torch.Tensor]:
        """The tensors of state on this device."""
        tensors = () if entry.state is None else entry.state.tensors
        return [tensor for tensor in tensors if tensor.device == self._device.torch_device]

    def _captured(
        self, layers: range, place: int, leaves: Sequence[Any], treedef: Any, state: HeldState | None
    ) -> LayerGraphs:
        _check_inputs(leaves)
        # A pool holds what a run by Python takes beside weights, which follows.
        taken, pool = self._memory.taken_bytes(layers), self._memory.pool(place)
        self._memory.fix(layers, taken + max(taken - pool.nbytes, 0))
        before = self._attributes(layers)
        try:
            # A cast that an earlier microbatch made is no memory of the graph's.
            with self._call.uncached_autocast():
                graphs = LayerGraphs(self._device, pool, self._work(layers), leaves, treedef)
        finally:
            # What was added and counted while it was captured is no gradient.
            self._weights.sums.begin_again()
            now = held_in(leaves) if state is not None else None
            has_changed = state is not None and (now is None or now.facts != state.facts)
            if state is not None and has_changed:
                state.set_back()
        if changes(before, self._attributes(layers)):
            graphs.close()
            raise NotCapturable("they change plain attributes, which a replay does not")
        if has_changed:
            graphs.close()
            raise NotCapturable("they change what their cache holds beside its tensors, which a replay does not")
        return graphs

    def _work(self, layers: range) -> CaptureWork:
        return CaptureWork(
            divided(layers, lambda layer: self._call.state.layers[layer].blocks, SEGMENT_BYTES),
            self._plain,
            self._drawing(layers),
            self._trains,
            self._backward,
            self._weights.sums.counts,
        )

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
        self,
        graphs: LayerGraphs,
        microbatch: int,
        leaves: Sequence[Any],
        treedef: Any,
        state: Sequence[torch.Tensor],
        *,
        recomputes: bool,
    ) -> None:
        layers = graphs.layers
        # Its memory is there. A run by Python needs about what the pool holds. State is copied, and its largest
        # tensor twice more.
        copies = sum(tensor.nbytes for tensor in state) + 2 * max((tensor.nbytes for tensor in state), default=0)
        needed = min(self._memory.taken_bytes(layers), self._store.pool_bytes)
        self._memory.fix(layers, needed + copies)
        self._call.graph_work.is_prepared = True

        def by_python(given: list[Any]) -> Any:
            tree = rp_batch.unflatten(treedef, given)
            for layer in layers:
                tree = self._layers.run(layer, microbatch, tree, recomputes=recomputes)
            return tree

        def replay(given: list[Any]) -> Any:
            return self._replay(graphs, given, MicrobatchSteps(self._replays, microbatch))

        device, backward = self._device.torch_device, self._backward if self._trains else None
        blocks = self._memory.blocks(layers)
        GraphTrial(device, leaves, blocks, self._weights.sums, backward, state).compare(by_python, replay)
        if state:
            # It is no workspace of later calls, for which weights would leave.
            self._device.reset_peak_memory()

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


def _check_inputs(leaves: Sequence[Any]) -> None:
    """Raise `NotCapturable` if the next call's inputs could differ in what is neither a tensor nor in the key."""
    for leaf in leaves:
        if is_lazy(leaf) or not (isinstance(leaf, torch.Tensor) or _is_value(leaf)):
            kind = type(leaf).__qualname__
            raise NotCapturable(f"their inputs hold a {kind}, which is no tensor and has no hash of its contents")


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
