"""Runs of single layers: one layer of a task, for one microbatch, forward or in a recomputation."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import rp_batch
import torch
from rp_recompute.attributes import ModuleCopy, attributes_of, changes
from rp_recompute.bits import names_of, sums_of_bits
from rp_recompute.copies import copied
from rp_recompute.examination import ExaminedLayer, examined
from rp_recompute.precision import least_precise
from rp_recompute.randomness import RngConsumer, unseeded
from rp_recompute.widening import Widening
from rp_state.modules.content import WRITTEN
from rp_telemetry.tracing import NOTHING

from rp_engine.context import RecomputeCtx
from rp_engine.device.activations import enter
from rp_engine.device.saved_data import Data, SavedData
from rp_engine.errors import ImpureLayer
from rp_engine.execution.effects.boundary import BoundaryArguments, BoundaryChecks
from rp_engine.execution.effects.buffers import LayerBuffers
from rp_engine.execution.effects.sampled_comparison import SampledComparison
from rp_engine.execution.lazy import computed
from rp_engine.execution.stage.layer_facts import LayerFacts, wants_examination
from rp_engine.execution.stage.running_task import RunningTask

_FORWARD = "in {0}, forward, microbatch {1}"
_COMPARISON = "in {0}, recomputation to compare with forward, microbatch {1}"
_RECOMPUTATION = "in {0}, recomputation, microbatch {1}"
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(slots=True)
class _Run:
    """One run of a layer on a microbatch. `given`: its arguments as they were. `has_begun`: it is run again."""

    facts: LayerFacts
    microbatch: int
    twin: torch.nn.Module
    call: _Arguments
    given: BoundaryArguments
    recomputes: bool
    has_begun: bool = False

    def output(self) -> Any:
        """Call the layer."""
        return self.twin(*self.call[0], **self.call[1])


class LayerRuns:
    """Runs a task's layers with their seeds, buffers and saved data."""

    def __init__(self, running: RunningTask) -> None:
        place, task, times = running.place, running.task, running.times
        weights, copier, slots = running.weights, running.copier, running.slots
        self._place = place
        self._call = place.call
        # Read once: the next lines of each layer and microbatch count.
        self._widening = place.call.widening
        self._twins = place.twins
        self._device = place.lane.device
        self._abilities = place.backend.abilities
        self._task = task
        self._weights = weights
        self._times = times
        self._activity = running.activity
        self._saved_data = SavedData(self._device.torch_device, copier, slots)
        self._boundary = BoundaryChecks(place.call, running.aliases)
        self._facts = {layer: LayerFacts.of(place, task, layer, self._boundary, times) for layer in task.layers}
        self._sampled = SampledComparison(place.call, copier, slots, self._device.torch_device)
        self._buffers = LayerBuffers(place.call, task, weights, copier, slots, self._sampled)

    def run(self, layer: int, microbatch: int, tree: Any, *, recomputes: bool) -> Any:
        """Run a layer whose weights are bound; return its output. `recomputes`: recompute it."""
        self._activity.current = (_RECOMPUTATION if recomputes else _FORWARD, layer, microbatch)
        facts = self._facts[layer]
        twin = self._twins.module(layer, facts.training)
        call: _Arguments = tree if layer == 0 else ((tree,), {})
        if facts.looks_at_input:
            self._boundary.check_input(call)
        # Most later layers take one tensor, which is flattened in no time.
        run = _Run(facts, microbatch, twin, call, BoundaryArguments(call if layer == 0 else tree), recomputes)
        if facts.prepares:
            run.call = (call[0], {**call[1], "prepared": self._prepared(run)})
        is_examined = facts.may_be_examined and not recomputes and wants_examination(self._call, layer)
        body = self._examined if is_examined else self._once
        output = self._compared(run, body) if self._call.compares and microbatch == 0 else body(run)
        if facts.has_buffers or microbatch == self._task.microbatches.start:
            self._twins.check(layer)
        if facts.is_for_loss:
            return output
        return computed(output) if facts.view is None else facts.view(tree, computed(output))

    def has_seen_enough(self, layer: int, *, recomputes: bool) -> bool:
        """Whether a run of a layer whose graphs were tried may be nothing but its forward: it is not examined."""
        return recomputes or not (self._facts[layer].may_be_examined and wants_examination(self._call, layer))

    def _compared(self, run: _Run, body: Callable[[_Run], Any]) -> Any:
        """Run a layer; note samples of its output and weights, which are compared when the call is over."""
        layer, dtype = run.facts.index, self._precision(run.twin)
        weights = self._twins.weights(layer)
        before = self._sums(weights)
        output = body(run)
        self._sampled.see_weights(layer, weights, self._sums(weights) - before)
        self._sampled.see(layer, run.microbatch, output, dtype, recomputes=run.recomputes)
        return output

    def _sums(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return sums_of_bits(list(weights.values()), self._device.torch_device)

    def _once(self, run: _Run, also: Callable[[Data], None] | None = None) -> Any:
        """Run a layer forward or recompute it. `also`: see `SavedData.first`."""
        facts, given = run.facts, run.given
        body = partial(self._body, run, also)
        if facts.has_buffers:
            seeded = partial(self.seeded, facts.consumer, run.microbatch, recomputes=run.recomputes)
            output = self._buffers.run(facts.index, run.microbatch, body, seeded, recomputes=run.recomputes)
        else:
            output = self.seeded(facts.consumer, run.microbatch, body, recomputes=run.recomputes)
        if given.written():
            self._boundary.check_written(facts.index, given)
            self._call.habits.writers.add(facts.consumer)
            self._call.habits.not_drawing.discard(facts.consumer)
        if facts.looks_at_output:
            self._boundary.check_output(facts.index, output)
        return output

    def _body(self, run: _Run, also: Callable[[Data], None] | None) -> Any:
        layer = run.facts.index
        if run.has_begun:
            self._boundary.check_run_again(layer, run.given)
        run.has_begun = True
        memory = (
            self._saved_data.recompute(layer, run.microbatch)
            if run.recomputes
            else self._saved_data.first(layer, run.microbatch, also)
        )
        if self._widening is not None:
            memory = _both(memory, self._widened(run, self._widening))
        with memory:
            return self._watched(run) if run.facts.is_watched else run.output()

    @contextmanager
    def _widened(self, run: _Run, widening: Widening) -> Generator[None]:
        """Let a layer compute in more bits; what it keeps of that, such as a cached table, goes with its twin."""
        layer = run.facts.index
        before = attributes_of(self._parts(layer))
        try:
            with widening.of(run.twin):
                yield
        finally:
            if changes(before, attributes_of(self._parts(layer))):
                self._twins.spoil(layer)

    def _parts(self, layer: int) -> list[ModuleCopy]:
        return [ModuleCopy(*each) for each in self._twins.parts(layer)]

    def _watched(self, run: _Run) -> Any:
        layer = run.facts.index
        with (
            self._place.span("forward of {}", run.facts.state),
            self._timed(layer, run.recomputes),
            self._twins.expanded(layer),
        ):
            return self._twins.outside(layer, run.output())

    # Its first runs are examined

    def _examined(self, run: _Run) -> Any:
        """Run a layer forward; run it once more, and raise `ImpureLayer` if anything differs that should not."""
        layer, saved = run.facts.index, cast("Data", ())

        def keep(data: Data) -> None:
            nonlocal saved
            saved = copied(data)

        def first() -> Any:
            weights = self._twins.weights(layer)
            before = self._sums(weights)
            output = self._once(run, keep)
            self._twins.check(layer)
            if written := names_of(weights, self._sums(weights) - before):
                self._twins.spoil(layer)
                raise TypeError(WRITTEN.format(layer, written[0]))
            return output

        def rerun(arguments: _Arguments, *, anew: bool = False) -> Any:
            self._activity.current = (_COMPARISON, layer, run.microbatch)
            with self._buffers.starting_from(layer, buffers):
                return self._recompute(run, arguments, copied(saved), anew=anew)

        def compare_inputs(before: _Arguments) -> None:
            self._boundary.check_unseen(layer, run.given, rp_batch.flatten(before)[0])

        buffers = self._buffers.values(layer)
        try:
            subject = self._subject(layer, run.twin)
            output, is_done = examined(subject, run.call, first, rerun, enter, compare_inputs)
        except ImpureLayer:
            self._twins.spoil(layer)
            raise
        # What the comparison took is no workspace of later calls, for which plans leave room.
        self._device.reset_peak_memory()
        if is_done:
            self._call.habits.examined[layer, self._call.with_grad] += 1
        return output

    def _recompute(self, run: _Run, call: _Arguments, saved: Data, *, anew: bool) -> Any:
        """Run a layer as a recomputation would, for nothing but its output. `anew`: with other random numbers."""
        facts = run.facts

        def body() -> Any:
            with (
                self._place.span("comparison of {}", facts.state),
                RecomputeCtx(saved),
                self._twins.expanded(facts.index),
            ):
                return self._twins.outside(facts.index, run.twin(*call[0], **call[1]))

        if self._call.randomness is None:
            # The caller's generators stay as they are.
            return unseeded(self._device.generator(), body, seed=int(anew))
        # Those of a microbatch that there is not.
        microbatch = run.microbatch + self._call.num_microbatches * anew
        return self.seeded(facts.consumer, microbatch, body, recomputes=not anew)

    def _subject(self, layer: int, twin: torch.nn.Module) -> ExaminedLayer:
        call = self._call
        is_first = not call.habits.examined[layer, call.with_grad]
        return ExaminedLayer(
            name=call.where(layer),
            modules=self._parts(layer),
            dtype=self._precision(twin),
            is_exact=self._abilities.repeats_exactly,
            compares=call.with_grad and call.randomness is not None and is_first,
        )

    def _precision(self, twin: torch.nn.Module) -> torch.dtype:
        kind, rounds = self._device.torch_device.type, self._abilities.rounds_fp32
        return least_precise(twin, self._call.autocast, kind, rounds_fp32=rounds)

    def check(self) -> None:
        """Refuse layers that have changed what they must not, after the last microbatch."""
        if len(self._task.microbatches) == 1 and not self._task.adds_gradients:
            # Each was looked at as it ran, and nothing of it has run since.
            return
        for layer in self._task.layers:
            self._activity.current = ("in {0}, after its last microbatch", layer, -1)
            self._twins.check(layer)

    def seeded(self, consumer: RngConsumer, microbatch: int, body: Callable[[], Any], *, recomputes: bool) -> Any:
        """Run `body` with the seed of its consumer and microbatch, if the call draws random numbers."""
        randomness = self._call.randomness
        if randomness is None:
            return body()
        return randomness.run(self._device.generator(), consumer, microbatch, body, recomputes=recomputes)

    def is_for_loss(self, layer: int) -> bool:
        """Whether the loss function is what reads a layer's output."""
        return self._facts[layer].is_for_loss

    def _timed(self, layer: int, recomputes: bool) -> AbstractContextManager[None]:
        times, stream = self._times, self._device.compute
        return NOTHING if times is None else times.forward(layer, stream, recomputes=recomputes)

    def _prepared(self, run: _Run) -> Any:
        layer, twin, (args, kwargs) = run.facts.index, run.twin, run.call
        if run.recomputes:
            return self._saved_data.prepared(layer, run.microbatch)
        prepare = cast("Callable[..., Any]", twin.prepare)
        buffers = self._weights.buffers(run.facts.state)
        versions = self._weights.versions(buffers)
        # A seed of its own: the recomputation skips `prepare` and must still draw the numbers of forward.

        def body() -> Any:
            wide = NOTHING if self._widening is None else self._widened(run, self._widening)
            with wide, self._twins.expanded(layer):
                return prepare(*args, **kwargs)

        found = self.seeded(RngConsumer("prepare", layer), run.microbatch, body, recomputes=False)
        if self._weights.versions(buffers) != versions:
            raise TypeError("prepare wrote a buffer, but recomputation does not call it; write it in forward")
        return self._saved_data.keep_prepared(layer, run.microbatch, found)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Generator[None]:
    with outer, inner:
        yield
