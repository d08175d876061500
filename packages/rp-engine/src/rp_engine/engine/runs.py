"""The runs of one model's calls: planned, started, and learned from when they are over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from rp_errors import warn_user
from rp_packing import Fp8
from rp_recompute.randomness import Randomness, draw_seed, may_draw_seed, peek_seed
from rp_sched import Mode, Task
from rp_state.block import Block
from rp_state.layers import LayerState
from rp_state.options import HostOptions, code_none
from torch import nn

from rp_engine.device.compiling import Eager
from rp_engine.device.memory.fp8_twins import Fp8Products
from rp_engine.device.packet import Packet
from rp_engine.device.replica import Twins
from rp_engine.engine.host.parameters import HostParameters, Observer
from rp_engine.engine.memory.activation_memory import ActivationMemory
from rp_engine.engine.next_call import NextCall
from rp_engine.engine.step_during import NO_STEP, NoStep
from rp_engine.engine.under_way import Launched
from rp_engine.errors import DeviceMemoryWarning
from rp_engine.execution.autograd import Gradients
from rp_engine.execution.batch import Batch
from rp_engine.execution.call import USUAL, Aside, Call, LossFn, Streams
from rp_engine.execution.graphs.graphable import has_drawn, layer_reason
from rp_engine.execution.run import Run
from rp_engine.peers.call import UNDRAWN, Numbers
from rp_engine.planning.auto_compute import AutoCompute, autocast_refusal
from rp_engine.planning.fp8_layers import Fp8Layers, coded_by
from rp_engine.planning.planner import Planner
from rp_engine.runtime.runtime import Runtime
from rp_engine.runtime.tickets import Take
from rp_engine.settings.fp16_sums import refuse_call
from rp_engine.settings.run_config import Compute, RoundPipeRunConfig

# In one of so many training calls, what layers recompute is compared with what their forward gave: a layer may
# cease to compute the same after its first calls, in which it is examined.
_COMPARED_EACH = 64
# Whether a call in evaluation mode draws a seed, by what was seen of earlier ones.
_DRAWS: dict[bool | None, Literal["surely", "perhaps", "never"]] = {
    True: "surely",
    None: "perhaps",
    False: "never",
}


class Runs(Observer):
    """Plans tasks for a batch and its settings, then starts a run, which decides nothing more.

    `host`: the model's state on the host, whose observer this is. `planner`: plans by what earlier runs took.
    """

    def __init__(
        self,
        name: str,
        modules: Callable[[], Sequence[nn.Module]],
        runtime: Runtime,
        options: HostOptions,
        compiler: Eager,
    ) -> None:
        self._name = name
        self._runtime = runtime
        self.host = HostParameters(name, modules, runtime, options, self)
        state, memory_check = self.host.state, self.host.memory_check
        has_room = partial(memory_check.has_room_for_pairs, state)
        self.planner = Planner(name, state, runtime, has_room, self._graphable, is_compiled=compiler.compiles)
        self._activations = ActivationMemory(self.host.state.layers)
        self._compiler = compiler
        self._twins = self._new_twins()
        self._fp8_layers = self._new_fp8_layers()
        self._next_call = NextCall(runtime)
        state.publications = self._next_call
        self.auto_compute = AutoCompute(name, runtime, compiler)

    def start(
        self,
        mode: Mode,
        batch: Batch,
        config: RoundPipeRunConfig,
        loss_fn: LossFn | None = None,
        *,
        keep: bool = True,
        numbers: Numbers = UNDRAWN,
        step: NoStep = NO_STEP,
    ) -> Run:
        """Start the run of a call. `step`: an optimizer's, which takes the gradients as they arrive."""
        if mode != "infer":
            self.host.state.refuse_given()
        if self.planner.looks_back(config, mode, batch.size):
            self.host.wait_for_calls()
        tasks = self.planner.tasks(config, mode, batch.size, input_grads=bool(batch.inputs))
        self._admit(mode, tasks, batch, keeps_outputs=keep)
        call = self._call(mode, batch, config, loss_fn, keep=keep, numbers=numbers)
        run = self._followed(call, tasks, batch)
        if mode == "train":
            self.host.expect_backward(run)
        times = self.planner.records.watch(mode, batch.size, run.first_tasks, is_planned=config.is_planned)
        run.start(times)
        self._next_call.note(call, run.first_tasks, is_measured=times is not None)
        # At once: tasks wait until it has read the gradients of those before them.
        step.launch(run.step_turns)
        return run

    def start_aside(self, batch: Batch, config: RoundPipeRunConfig, aside: Aside) -> Run:
        """Start the run of an inference call from which no plan learns."""
        # It measures what memory there is for weights that stay.
        self._next_call.clear()
        if aside.holds_state:
            tasks = self.planner.tasks_with_state(batch.size, aside.kept)
        else:
            tasks = self.planner.tasks_aside(config, batch.size)
        self._admit("infer", tasks, batch, keeps_outputs=aside.view is None)
        call = self._call("infer", batch, config, None, keep=True, numbers=UNDRAWN, manner=aside)
        run = self._followed(call, tasks, batch)
        run.start(None)
        return run

    def _admit(self, mode: Mode, tasks: Sequence[Task], batch: Batch, *, keeps_outputs: bool) -> None:
        """Check that host memory suffices for a call that reads the weights."""
        self.host.predicted_bytes = self.planner.records.predicted_bytes
        self.host.gradients.keep_divided_apart(tasks)
        self._check_host_memory(mode, tasks, batch, keeps_outputs=keeps_outputs)
        self.host.note_read()

    def _followed(self, call: Call, tasks: Sequence[Task], batch: Batch) -> Run:
        run = Run(call, tasks, batch, self._runtime, self._twins)
        self.host.follow(run)
        return run

    def start_backward(
        self,
        run: Run,
        batch: Batch,
        config: RoundPipeRunConfig,
        outputs: Sequence[Packet],
        grads: Gradients,
        streams: Streams,
    ) -> None:
        """Start the backward tasks of a run. `outputs`, `grads`, `streams`: see `Run.backward`."""
        self.host.check_call(run.later_tasks, 0, is_measured=True)
        self.host.follow(run)
        times = self.planner.records.watch("train", batch.size, run.later_tasks, is_planned=config.is_planned)
        run.backward(outputs, grads, streams, times)

    def _check_host_memory(self, mode: Mode, tasks: Sequence[Task], batch: Batch, *, keeps_outputs: bool) -> None:
        # The pool of several models tells of none of them.
        if self._runtime.backend.abilities.pools_host_memory and len(self._runtime.states) == 1:
            self._activations.note(self.host.memory_check.pool_bytes())
        expected = self._activations.expect(tasks, batch.size, keeps_outputs=keeps_outputs)
        # The backward of a forward may never be called: its gradients are checked when it is.
        adding = tasks if mode == "fused" else ()
        self.host.check_call(adding, expected.nbytes, is_measured=expected.is_measured)
        self._activations.note_launched(expected)

    def _call(
        self,
        mode: Mode,
        batch: Batch,
        config: RoundPipeRunConfig,
        loss_fn: LossFn | None,
        *,
        keep: bool,
        numbers: Numbers,
        manner: Aside = USUAL,
    ) -> Call:
        state, with_grad = self.host.state, mode != "infer"
        # In fp32 nothing multiplies in FP8.
        products = self._products(config) if manner.widening is None else None
        coded = self._coded(products, mode) if products and manner is USUAL else frozenset[Block]()
        compares = with_grad and state.num_runs % _COMPARED_EACH == _COMPARED_EACH // 2
        if compares:
            # Also whether layers draw from Python's generators is looked at anew.
            state.habits = replace(state.habits, not_drawing=set(), sources={})
        draws = "never" if config.preserve_rng_state is False else self._draws(manner, with_grad=with_grad)
        randomness = self._randomness(draws, numbers)
        return Call(
            name=self._name,
            mode=mode,
            state=state,
            flags=state.flags,
            with_grad=with_grad,
            grain=config.recompute_grain or "stage",
            is_planned=config.is_planned,
            num_microbatches=batch.size.microbatches,
            randomness=randomness,
            autocast=batch.autocast,
            spare_bytes=self.planner.records.spare_bytes,
            loss_fn=loss_fn,
            keep_outputs=keep,
            waits=config.merge_output is not False,
            habits=state.habits,
            looks=draws == "perhaps",
            compares=compares and randomness is not None,
            manner=manner,
            # Later calls have no seed, so graphs of this one would not be theirs.
            by_graphs=draws != "perhaps" and self._launches_by_graphs(manner, config, draws),
            frees_graphs=self.planner.launching.frees_graphs,
            taken_bytes=partial(self.planner.footprint.taken_bytes, batch.size.rows),
            products=products,
            coded=coded,
            ahead=self._next_call.stores if mode == "fused" else (),
            first_microbatch=numbers.first,
        )

    def _randomness(self, draws: Literal["surely", "perhaps", "never"], numbers: Numbers) -> Randomness | None:
        if draws == "never":
            return None
        if not numbers.is_drawn:
            numbers = Numbers(0, draw_seed() if draws == "surely" else peek_seed())
        state = self.host.state
        return Randomness(numbers.seed, len(state.layers), state.habits, numbers.first)

    def _launches_by_graphs(self, manner: Aside, config: RoundPipeRunConfig, draws: str) -> bool:
        if not manner.holds_state:
            return manner is USUAL and self.planner.launching.by_graphs
        # Not where that is left to measuring: what they gain was not measured yet. In training mode layers draw.
        return draws == "never" and config.launch == "graphs"

    def _draws(self, manner: Aside, *, with_grad: bool) -> Literal["surely", "perhaps", "never"]:
        """Return whether a call draws a seed: perhaps in evaluation mode, if it turns out that anything draws."""
        if with_grad or any(flag for flags in self.host.state.flags for flag in flags):
            return "surely"
        # A layer that draws unexpectedly runs again, which state that it writes does not allow. And the layer of
        # another model inside of which this call is made has the generators to itself.
        if manner.holds_state or not may_draw_seed():
            return "never"
        return _DRAWS[self.host.state.habits.evaluates_randomly]

    def settle_draws(self, run: Run, numbers: Numbers = UNDRAWN) -> None:
        """After a call that looks: note what it has shown, and draw its seed if that was used.

        `numbers`: those that the call was given.
        """
        call = run.call
        if not call.looks or call.randomness is None:
            return
        call.habits.evaluates_randomly = call.randomness.has_drawn()
        if call.habits.evaluates_randomly and not numbers.is_drawn:
            draw_seed()

    def decide_compute(self, batch: Batch, config: RoundPipeRunConfig) -> None:
        """Decide what ``compute="auto"`` is, before the first call that trains; at one place on all machines."""
        if config.compute == "auto" and self.auto_compute.decision is None:
            refused = autocast_refusal([(each.enabled, each.dtype) for each in batch.autocast])
            modules = [layer.module for layer in self.host.state.layers]
            self.auto_compute.decide(modules, batch.size, refused, self._runtime.peers)

    def _compute(self, config: RoundPipeRunConfig) -> Compute | Fp8 | None:
        """Return how layers multiply; once that is decided for FP8, have codes of weights published."""
        refuse_call(config.compute)
        found, state = self.auto_compute.resolved(config.compute), self.host.state
        is_new = config.compute == "auto" and state.options.coded is code_none
        if not (is_new and isinstance(found, Fp8) and found.uploads_codes):
            return found
        state.publish_codes(coded_by(found))
        if self.host.memory_check.has_room_for_codes(state):
            return found
        state.publish_codes(code_none)
        reason = "; weights travel in bf16, since host memory has no room for their codes"
        cast = replace(found, uploads="bf16")
        self.auto_compute.amend(cast, reason)
        return cast

    def _products(self, config: RoundPipeRunConfig) -> Fp8Products | None:
        found = self._fp8_layers.products(self._compute(config))
        if found is not None:
            uploaded = self.host.state.coded if found.recipe.uploads_codes else frozenset[int]()
            self.planner.footprint.note_codes(self._fp8_layers.codes_bytes(found, uploaded))
        return found

    def _coded(self, products: Fp8Products, mode: Mode) -> frozenset[Block]:
        """Return the blocks that travel with codes in a call, whose codes are those of the weights now."""
        state = self.host.state
        found = self._fp8_layers.coded(products, state.trainable, state.coded)
        self.host.codes.ready(found, training=mode != "infer")
        self.planner.footprint.note_uploads(found)
        return found

    # Notices of changes on the host: see `Observer`

    def note_stepping(self, take: Take) -> None:
        """Have weights travel to the devices as they are published."""
        self._next_call.expect(self.host.state.layers, self.host.state.version, take)

    def note_over(self, work: Launched) -> None:
        """Give what was measured of a run and of its layers to the planner; tell of memory that ran out."""
        if not isinstance(work, Run) or work.call.manner is not USUAL:
            return
        self.planner.records.note_shortages([shortage.task for shortage in work.shortages], work.size.rows)
        if not work.aborted:
            for times in work.take_times():
                self.planner.records.take(times, is_whole=not work.shortages)
            if not work.shortages:
                self.planner.note_over(
                    work.call.mode, work.size, work.span, work.call.graph_work, self._graph_bytes
                )
        warn_of_shortages(work)

    def _graph_bytes(self) -> int:
        return max(twins.graphs.nbytes for twins in self._twins)

    def _graphable(self, mode: Mode) -> frozenset[int]:
        """Return the layers that graphs could launch in calls of a mode, by what was seen of them."""
        stores, twins, state = [each.graphs for each in self._twins], self._twins[0], self.host.state
        if any(store.is_off for store in stores):
            return frozenset()
        refused = frozenset[int]().union(*(store.refused for store in stores))

        def may(layer: LayerState) -> bool:
            if mode != "infer" and not has_drawn(layer.index, state.habits):
                return stores[0].graphable.get(layer.index, False)
            return layer_reason(layer, state.habits, twins, is_seeded=mode != "infer") is None

        return frozenset(one.index for one in state.layers if one.index not in refused and may(one))

    def note_idle(self) -> None:
        """Leave the devices' memory to others."""
        self._next_call.clear()

    def note_altered(self) -> None:
        """Replace the device copies of the layers."""
        self._twins = self._new_twins()
        self._fp8_layers = self._new_fp8_layers()

    def note_rebuilt(self) -> None:
        """Replace the device copies of the layers, and discard plans made for the old layers."""
        self._next_call.clear()
        self._twins = self._new_twins()
        self._fp8_layers = self._new_fp8_layers()
        self.planner.forget()
        self._activations = ActivationMemory(self.host.state.layers)

    def _new_fp8_layers(self) -> Fp8Layers:
        return Fp8Layers(self._name, [layer.module for layer in self.host.state.layers], self._runtime)

    def _new_twins(self) -> list[Twins]:
        layers, compiler = self.host.state.layers, self._compiler
        return [Twins(lane.device.torch_device, layers, compiler) for lane in self._runtime.lanes]


def warn_of_shortages(run: Run) -> None:
    """Issue a `DeviceMemoryWarning` if tasks of the run ran out of device memory and were run in parts."""
    if not run.aborted and (words := run.explain_shortages()):
        warn_user(words, DeviceMemoryWarning)
