"""The engine of one model: launches its calls and returns their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import rp_batch
import torch
from rp_sched import LayerCost, Mode, Plan, Task
from rp_transfer import Ticket
from torch import nn

from roundpipe.device.compiling import CompileOptions, Compiler
from roundpipe.device.packet import Packet
from roundpipe.device.randomness import Randomness, draw_seed
from roundpipe.device.replica import Twins
from roundpipe.engine.aftermath.launched import Launched
from roundpipe.engine.boundaries import Boundaries
from roundpipe.engine.host_parameters import HostParameters
from roundpipe.engine.shared_call import (
    Numbers,
    SharedCall,
    forward_call,
    norm_of,
    telling,
    telling_early,
    training_call,
)
from roundpipe.errors import AloneOnly, DeviceMemoryWarning, RoundPipeError, in_words
from roundpipe.execution.autograd import Gradients, connect
from roundpipe.execution.batch import Batch
from roundpipe.execution.call import Call, LossFn, Streams
from roundpipe.execution.losses import Losses, sum_losses
from roundpipe.execution.packed_data import Arrivals, RoundPipePackedData
from roundpipe.execution.run import Run
from roundpipe.planning.call_log import CallTime
from roundpipe.planning.planner import Planner
from roundpipe.runtime.launcher import warn_user
from roundpipe.runtime.runtime import Runtime
from roundpipe.settings.run_config import RoundPipeRunConfig
from roundpipe.state.block import Block
from roundpipe.state.model_state import HostOptions
from roundpipe.telemetry.tracing import in_call


class CallStep(Protocol):
    """An optimizer's step during a training call."""

    def prepare(self) -> None:
        """Make all that the step takes, and refuse what it cannot do, before the call is launched."""
        ...

    def launch(self, turns: Mapping[Block, Ticket]) -> None:
        """Queue the step, right after the call's tasks. `turns`: see `Run.step_turns`."""
        ...

    def finish(self) -> None:
        """Wait for the step. Raises its error."""
        ...

    def explain(self, error: BaseException, *, is_over: bool) -> None:
        """Say on the call's error what has become of the weights. `is_over`: the step ends by itself."""
        ...


class Engine:
    """Launches one model's calls, in the order in which they are made. `host`: the model's state on the host."""

    def __init__(
        self,
        name: str,
        modules: Callable[[], Sequence[nn.Module]],
        runtime: Runtime,
        options: HostOptions,
        compile_options: CompileOptions | None,
    ) -> None:
        self._name = name
        self._runtime = runtime
        self.host = HostParameters(name, modules, runtime, options, self)
        state, foresight = self.host.state, self.host.foresight
        self._planner = Planner(name, state, runtime, partial(foresight.has_room_for_pairs, state))
        self._boundaries = Boundaries(self.host.state.layers)
        self._compiler = None if compile_options is None else Compiler(compile_options, len(runtime.lanes))
        self._twins = self._new_twins()

    def telling(self) -> AbstractContextManager[None]:
        """Tell the other machines, which wait for this one's training call, of an error before its launch."""
        return telling_early(self._runtime, training_call(self._name))

    def telling_forward(self, config: RoundPipeRunConfig, arguments: Any) -> AbstractContextManager[None]:
        """Likewise, if this call of the model is one that machines share."""
        is_shared = torch.is_grad_enabled() and config.requires_grad is not False
        if self._runtime.group is None or not is_shared or not (self.host.has_trained() or _track(arguments)):
            return nullcontext()
        return telling_early(self._runtime, forward_call(self._name))

    def call_times(self) -> list[CallTime]:
        """What plans promise that calls take, and what they took."""
        return self._planner.log.times()

    def plans(self) -> dict[tuple[Mode, int], Plan]:
        """The latest plan of each kind of call and number of microbatches."""
        return self._planner.log.plans()

    def layer_costs(self, mode: Mode) -> list[LayerCost]:
        """The planner's cost estimate for each layer."""
        return self._planner.costs(mode)

    def microbatches(self, mode: Mode, batch_size: int, rows: int) -> int:
        """The number of microbatches that is chosen for calls of this mode; see `Planner.microbatches`."""
        machines = 1 if self._runtime.group is None or mode != "fused" else self._runtime.group.size
        if (chosen := self._planner.chosen.get(mode)) is not None:
            return min(machines * chosen, batch_size)
        found = self._runtime.launch(partial(self._microbatches, mode, batch_size, rows, machines))
        return min(machines * found, batch_size)

    def _microbatches(self, mode: Mode, batch_size: int, rows: int, machines: int) -> int:
        """The number of each machine's microbatches, if all have the same."""
        kind, group = "choosing the number of microbatches", self._runtime.group if machines > 1 else None
        with telling(group, kind):
            found = self._planner.microbatches(mode, max(batch_size // machines, 1), max(rows // machines, 1))
        if group is not None:
            self._planner.chosen[mode] = found = max(group.calls.say(kind, found))
        return found

    # Bodies of the model's methods: the public half on the caller's thread, the private half on the launcher's

    def forward(
        self, parts: rp_batch.Parts[Any], arrivals: Arrivals, config: RoundPipeRunConfig, *, wants_grad: bool
    ) -> list[Any]:
        """Return the outputs of all microbatches, on the host; connected to autograd if they can require grad."""
        batch = Batch.of(parts, arrivals, wants_grad=wants_grad)
        group, shared, own = self._runtime.group, None, batch
        if group is not None and wants_grad and (batch.inputs or self.host.has_trained()):
            kind = forward_call(self._name)
            with telling_early(self._runtime, kind):
                _refuse_in_parts(config)
                shared = SharedCall.of(group, kind, parts)
                own = Batch.of(shared.own_parts(parts), arrivals)
        launch = partial(self._forward, own, config, wants_grad=wants_grad, shared=shared)
        run, outputs, version, number = self._runtime.launch(launch)
        if not run.call.with_grad:
            return self._returned([packet.tree() for packet in outputs], outputs, batch, config)

        def run_backward(grads: Gradients, for_weights: bool) -> Gradients:
            if not for_weights:
                run.drop_gradients()
            streams = Streams.current(grads)
            launch = partial(self._backward, run, own, config, outputs, grads, streams, version, shared)
            if shared is not None:
                launch = partial(shared.end, number, launch)
            return self._runtime.launch(launch)

        return self._returned(connect(outputs, batch.inputs, run_backward), outputs, batch, config)

    def _forward(
        self, batch: Batch, config: RoundPipeRunConfig, *, wants_grad: bool, shared: SharedCall | None
    ) -> tuple[Run, list[Packet], int, int]:
        """Return the run, its outputs, the version of the weights that it read, and the call's number.

        `shared`: the call of several machines that `batch` is this one's share of; the outputs are those of all,
        and the number tells the call from others.
        """
        with in_call("forward", self._name):
            with telling(None if shared is None else shared.group, "" if shared is None else shared.kind):
                numbers = None if shared is None else Numbers(shared.share.start, draw_seed())
                self.host.get_ready(training=False)
                with_grad = bool(batch.inputs) or (wants_grad and bool(self.host.state.trainable))
                run = self._start("train" if with_grad else "infer", batch, config, numbers=numbers)
                outputs = run.outputs(wait=config.merge_output is not False)
                _warn_of_shortages(run)
            number = 0
            if shared is not None:
                outputs = self._with_others(run, shared, outputs)
                number = shared.group.calls.begin()
            return run, outputs, self.host.state.version, number

    def _with_others(self, run: Run, shared: SharedCall, outputs: Sequence[Packet]) -> list[Packet]:
        try:
            return shared.outputs_of_all(outputs, {**self.host.facts(), "random seed": run.seed})
        except BaseException as error:
            run.abort(error, "together with other machines")
            run.finish()
            raise

    def _backward(
        self,
        run: Run,
        batch: Batch,
        config: RoundPipeRunConfig,
        outputs: Sequence[Packet],
        grads: Gradients,
        streams: Streams,
        version: int,
        shared: SharedCall | None,
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the inputs."""
        if self.host.state.options.steps_in_backward and self.host.has_trained():
            raise RoundPipeError(
                f"model {self._name!r} was wrapped with step_in_backward=True, so its gradients are consumed "
                "inside forward_backward(optimizer=...), and backward() of a forward has no step for them; call "
                "that, or wrap the model without step_in_backward"
            )
        with in_call("backward", self._name):
            group, kind = (None, "") if shared is None else (shared.group, shared.backward_kind)
            with telling(group, kind):
                self.host.get_ready(training=True)
                self.host.check_version(version)
                batch.arrivals.refuse_written()
                self.host.check_call(run.later_tasks, 0, is_measured=True)
                self.host.follow(run)
                times = self._planner.watch(config, "train", batch.parts, run.later_tasks)
                norm = 0.0
                if shared is not None:
                    norm = norm_of(grads)
                    grads, outputs = shared.own_grads(outputs, grads), shared.own(outputs)
                run.backward(outputs, grads, streams, times)
                packets = run.input_grads()
                run.finish()
                _warn_of_shortages(run)
                returned = batch.grads(packets) if batch.inputs else []
            return returned if shared is None else self._grads_with_others(run, shared, norm, returned)

    def _grads_with_others(
        self, run: Run, shared: SharedCall, norm: float, grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        try:
            return shared.input_grads_of_all(grads, norm, self.host.facts())
        except BaseException as error:
            self.host.state.note_broken(run.number, in_words(error))
            raise

    def forward_backward(
        self,
        parts: rp_batch.Parts[Any],
        labels: Sequence[Any],
        arrivals: Arrivals,
        loss_fn: LossFn,
        config: RoundPipeRunConfig,
        *,
        keep: bool,
        step: CallStep | None = None,
    ) -> tuple[Losses, list[Any]]:
        """Return the sums of the losses, and the outputs of all microbatches if `keep`.

        `step`: what consumes the gradients as they arrive; None: they are kept.
        """
        if self._runtime.group is not None:
            with self.telling():
                shared = SharedCall.of(self._runtime.group, training_call(self._name), parts, labels)
                batch = Batch.of(shared.own_parts(parts), arrivals, shared.own(labels))
            return self._runtime.launch(partial(self._share, shared, batch, config, loss_fn, keep=keep)), []
        batch = Batch.of(parts, arrivals, labels)
        launch = partial(self._forward_backward, batch, config, loss_fn, keep=keep, step=step)
        losses, outputs, grads = self._runtime.launch(launch)
        if batch.inputs:
            # Outside the launch lock: the inputs may come from another RoundPipe model, whose backward takes it.
            batch.backpropagate(grads)
        trees = [packet.tree() for packet in outputs]
        return sum_losses(losses), self._returned(trees, outputs, batch, config) if keep else []

    def _share(
        self, shared: SharedCall, batch: Batch, config: RoundPipeRunConfig, loss_fn: LossFn, *, keep: bool
    ) -> Losses:
        """Run this machine's microbatches; return the losses of the whole batch."""
        with in_call("forward_backward", self._name):
            with telling(shared.group, shared.kind):
                # Before anything that may fail on one machine alone: the generators stay the same.
                numbers = Numbers(shared.share.start, draw_seed())
                _refuse_divided(batch, keep=keep)
                run = self._begin(batch, config, loss_fn, keep=False, numbers=numbers)
                losses = run.losses()
                _warn_of_shortages(run)
            try:
                return shared.sum_losses(losses, {**self.host.facts(), "random seed": run.seed})
            except BaseException as error:
                run.abort(error, "together with other machines")
                run.finish()
                raise

    def _forward_backward(
        self,
        batch: Batch,
        config: RoundPipeRunConfig,
        loss_fn: LossFn,
        *,
        keep: bool,
        step: CallStep | None,
    ) -> tuple[list[Packet], list[Packet], list[Packet]]:
        """Return the losses, the outputs if `keep`, and the gradients of the inputs that require grad."""
        with in_call("forward_backward", self._name):
            if step is not None:
                step.prepare()
            run = self._begin(batch, config, loss_fn, keep=keep, step=step)
            try:
                found = run.losses(), run.outputs(wait=config.merge_output is not False), run.input_grads()
                if step is not None:
                    step.finish()
            except BaseException as error:
                if step is not None:
                    step.explain(error, is_over=run.aborted)
                raise
            _warn_of_shortages(run)
            return found

    def _begin(
        self,
        batch: Batch,
        config: RoundPipeRunConfig,
        loss_fn: LossFn,
        *,
        keep: bool,
        numbers: Numbers | None = None,
        step: CallStep | None = None,
    ) -> Run:
        """Launch a training call."""
        self.host.get_ready(training=True)
        if not batch.inputs and not self.host.state.trainable:
            raise RoundPipeError(
                f"model {self._name!r} has no trainable parameter, and no input requires grad, so "
                "forward_backward would train nothing; unfreeze parameters, or call the model instead"
            )
        run = self._start("fused", batch, config, loss_fn, keep=keep, numbers=numbers, step=step)
        self._planner.improve_while(config, "fused", batch.parts, run.wait_for_any)
        return run

    def _returned(
        self, trees: list[Any], outputs: Sequence[Packet], batch: Batch, config: RoundPipeRunConfig
    ) -> list[Any]:
        if config.merge_output is not False:
            return trees
        events = [(packet.events[0], None) for packet in outputs]
        return RoundPipePackedData(trees, events, sizes=batch.parts.sizes, backend=self._runtime.backend)

    # Launching: plans tasks for a batch and its settings, then starts a run, which decides nothing more

    def _start(
        self,
        mode: Mode,
        batch: Batch,
        config: RoundPipeRunConfig,
        loss_fn: LossFn | None = None,
        *,
        keep: bool = True,
        numbers: Numbers | None = None,
        step: CallStep | None = None,
    ) -> Run:
        tasks = self._planner.tasks(config, mode, batch.parts, input_grads=bool(batch.inputs))
        self.host.predicted_bytes = self._planner.predicted_bytes
        self.host.keep_divided_apart(tasks)
        self._check_host_memory(mode, tasks, batch, keeps_outputs=keep)
        self.host.note_read()
        call = self._call(mode, batch, config, loss_fn, keep=keep, numbers=numbers)
        run = Run(call, tasks, batch, self._runtime, self._twins)
        self.host.follow(run)
        run.start(self._planner.watch(config, mode, batch.parts, run.first_tasks))
        if step is not None:
            # At once: tasks wait until it has read the gradients of those before them.
            step.launch(run.step_turns)
        return run

    def _check_host_memory(self, mode: Mode, tasks: Sequence[Task], batch: Batch, *, keeps_outputs: bool) -> None:
        # CPU devices have no pool. That of several models tells of none of them.
        if self._has_pool and len(self._runtime.states) == 1:
            self._boundaries.note(self.host.foresight.pool_bytes())
        expected = self._boundaries.expect(tasks, batch.parts, keeps_outputs=keeps_outputs)
        # The backward of a forward may never be called: its gradients are checked when it is.
        adding = tasks if mode == "fused" else ()
        self.host.check_call(adding, expected.nbytes, is_measured=expected.is_measured)
        self._boundaries.note_launched(expected)

    @property
    def _has_pool(self) -> bool:
        return self._runtime.lanes[0].device.torch_device.type != "cpu"

    def _call(
        self,
        mode: Mode,
        batch: Batch,
        config: RoundPipeRunConfig,
        loss_fn: LossFn | None,
        *,
        keep: bool,
        numbers: Numbers | None,
    ) -> Call:
        state, with_grad = self.host.state, mode != "infer"
        random = with_grad or any(flag for flags in state.flags for flag in flags)
        randomness = None
        if random and config.preserve_rng_state is not False:
            numbers = numbers or Numbers(0, draw_seed())
            randomness = Randomness(numbers.seed, len(state.layers), state.quiet, numbers.first)
        return Call(
            name=self._name,
            mode=mode,
            state=state,
            flags=state.flags,
            with_grad=with_grad,
            grain=config.recompute_grain or "stage",
            is_planned=config.execute_plan is None,
            num_microbatches=len(batch.parts),
            randomness=randomness,
            autocast=batch.autocast,
            spare_bytes=self._planner.spare_bytes,
            loss_fn=loss_fn,
            keep_outputs=keep,
            waits=config.merge_output is not False,
            first_microbatch=0 if numbers is None else numbers.first,
        )

    # Notices of changes on the host: see `Observer`

    def note_over(self, work: Launched) -> None:
        """Give what was measured of a run and of its layers to the planner; tell of memory that ran out."""
        if not isinstance(work, Run):
            return
        self._planner.note_shortages([shortage.task for shortage in work.shortages], work.parts)
        if not work.aborted:
            for times in work.take_times():
                self._planner.take(times, is_whole=not work.shortages)
            if not work.shortages:
                self._planner.log.note(work.call.mode, work.call.num_microbatches, work.span)
        _warn_of_shortages(work)

    def note_altered(self) -> None:
        """Replace the device copies of the layers."""
        self._twins = self._new_twins()

    def note_rebuilt(self) -> None:
        """Replace the device copies of the layers, and discard plans made for the old layers."""
        self._twins = self._new_twins()
        self._planner.forget()
        self._boundaries = Boundaries(self.host.state.layers)

    def _new_twins(self) -> list[Twins]:
        layers, compiler = self.host.state.layers, self._compiler
        return [Twins(lane.device.torch_device, layers, compiler) for lane in self._runtime.lanes]


def _track(arguments: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in rp_batch.flatten(arguments)[0])


def _refuse_in_parts(config: RoundPipeRunConfig) -> None:
    if config.merge_output is False:
        raise AloneOnly(
            "merge_output=False leaves outputs in microbatches, of which each machine has its own; leave it out, "
            "or train on one machine"
        )


def _refuse_divided(batch: Batch, *, keep: bool) -> None:
    if keep:
        raise AloneOnly(
            "return_outputs=True needs the outputs of the whole batch, but each machine has those of its own "
            "microbatches; compute what you need of them in loss_fn, which may return several losses"
        )
    if batch.inputs:
        raise AloneOnly(
            "an input requires grad, but each machine has the gradients of its own microbatches; detach it, or "
            "make what computes it the model's first layer"
        )


def _warn_of_shortages(run: Run) -> None:
    if not run.aborted and (words := run.explain_shortages()) is not None:
        warn_user(words, DeviceMemoryWarning)
