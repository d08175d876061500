"""The engine of one model: launches its calls and returns their results."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import rp_batch
import torch
from rp_sched import LayerCost, Mode, Plan
from torch import nn

from roundpipe.device.compiling import CompileOptions
from roundpipe.device.packet import Packet
from roundpipe.device.randomness import draw_seed
from roundpipe.engine.machines.shared_call import Numbers, SharedCall, forward_call, norm_of, training_call
from roundpipe.engine.machines.telling import telling, telling_early
from roundpipe.engine.runs import Runs, warn_of_shortages
from roundpipe.engine.step_during import StepDuring
from roundpipe.errors import AloneOnly, RoundPipeError, in_words
from roundpipe.execution.autograd import Gradients, connect
from roundpipe.execution.batch import Batch
from roundpipe.execution.call import LossFn, Streams
from roundpipe.execution.losses import Losses, sum_losses
from roundpipe.execution.packed_data import Arrivals, RoundPipePackedData
from roundpipe.execution.run import Run
from roundpipe.planning.call_log import CallTime
from roundpipe.runtime.runtime import Runtime
from roundpipe.settings.run_config import RoundPipeRunConfig
from roundpipe.state.model_state import HostOptions
from roundpipe.telemetry.tracing import in_call


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
        self._runs = Runs(name, modules, runtime, options, compile_options)
        self.host = self._runs.host
        self._planner = self._runs.planner

    def telling(self) -> AbstractContextManager[None]:
        """Return a context that tells machines waiting for this training call of an error before its launch."""
        return telling_early(self._runtime, training_call(self._name))

    def telling_forward(self, config: RoundPipeRunConfig, arguments: Any) -> AbstractContextManager[None]:
        """Return the same for a forward, if it is one that machines share."""
        is_shared = torch.is_grad_enabled() and config.requires_grad is not False
        if (
            self._runtime.group is None
            or not is_shared
            or not (self.host.has_trained() or _requires_grad(arguments))
        ):
            return nullcontext()
        return telling_early(self._runtime, forward_call(self._name))

    def call_times(self) -> list[CallTime]:
        """Return what plans promise that calls take, and what calls took."""
        return self._planner.log.times()

    def plans(self) -> dict[tuple[Mode, int], Plan]:
        """Return the latest plan of each kind of call and number of microbatches."""
        return self._planner.log.plans()

    def layer_costs(self, mode: Mode) -> list[LayerCost]:
        """Return the planner's cost estimate for each layer."""
        return self._planner.costs(mode)

    def microbatches(self, mode: Mode, batch_size: int, rows: int) -> int:
        """Return the number of microbatches chosen for calls of this mode; see `Planner.microbatches`."""
        machines = 1 if self._runtime.group is None or mode != "fused" else self._runtime.group.size
        if (chosen := self._planner.chosen.get(mode)) is not None:
            return min(machines * chosen, batch_size)
        count = self._runtime.launch(partial(self._microbatches, mode, batch_size, rows, machines))
        return min(machines * count, batch_size)

    def _microbatches(self, mode: Mode, batch_size: int, rows: int, machines: int) -> int:
        """Return the number of each machine's microbatches, the same on all of them."""
        kind, group = "choosing the number of microbatches", self._runtime.group if machines > 1 else None
        with telling(group, kind):
            count = self._planner.microbatches(mode, max(batch_size // machines, 1), max(rows // machines, 1))
        if group is not None:
            self._planner.chosen[mode] = count = max(group.calls.say(kind, count))
        return count

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

        `shared`: the call of several machines, of which `batch` is this one's share. The outputs are those of all
        machines, and the number is the call's among those of all machines.
        """
        with in_call("forward", self._name):
            with telling(None if shared is None else shared.group, "" if shared is None else shared.kind):
                numbers = None if shared is None else Numbers(shared.share.start, draw_seed())
                self.host.get_ready(training=False)
                with_grad = bool(batch.inputs) or (wants_grad and bool(self.host.state.trainable))
                run = self._runs.start("train" if with_grad else "infer", batch, config, numbers=numbers)
                outputs = run.outputs(wait=config.merge_output is not False)
                warn_of_shortages(run)
            number = 0
            if shared is not None:
                with _aborting(run):
                    outputs = shared.outputs_of_all(outputs, {**self.host.facts.now(), "random seed": run.seed})
                number = shared.group.calls.begin()
            return run, outputs, self.host.state.version, number

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
        self._refuse_consumed()
        with in_call("backward", self._name):
            group, kind = (None, "") if shared is None else (shared.group, shared.backward_kind)
            with telling(group, kind):
                self.host.get_ready(training=True)
                self.host.check_version(version)
                batch.arrivals.refuse_written()
                norm = 0.0
                if shared is not None:
                    norm = norm_of(grads)
                    grads, outputs = shared.own_grads(outputs, grads), shared.own(outputs)
                self._runs.start_backward(run, batch, config, outputs, grads, streams)
                packets = run.input_grads()
                run.finish()
                warn_of_shortages(run)
                returned = batch.grads(packets) if batch.inputs else []
            return returned if shared is None else self._grads_with_others(run, shared, norm, returned)

    def _refuse_consumed(self) -> None:
        if self.host.state.options.steps_in_backward and self.host.has_trained():
            raise RoundPipeError(
                f"model {self._name!r} was wrapped with step_in_backward=True, so its gradients are consumed "
                "inside forward_backward(optimizer=...), and backward() of a forward has no step for them; call "
                "that, or wrap the model without step_in_backward"
            )

    def _grads_with_others(
        self, run: Run, shared: SharedCall, norm: float, grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        try:
            return shared.input_grads_of_all(grads, norm, self.host.facts.now())
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
        step: StepDuring | None = None,
    ) -> tuple[Losses, list[Any]]:
        """Return the sums of the losses, and the outputs of all microbatches if `keep`.

        `step`: the step that takes the gradients as they arrive; None: they are kept.
        """
        if self._runtime.group is not None:
            with self.telling():
                shared = SharedCall.of(self._runtime.group, training_call(self._name), parts, labels)
                batch = Batch.of(shared.own_parts(parts), arrivals, shared.own(labels))
            return self._runtime.launch(partial(self._run_share, shared, batch, config, loss_fn, keep=keep)), []
        batch = Batch.of(parts, arrivals, labels)
        launch = partial(self._forward_backward, batch, config, loss_fn, keep=keep, step=step)
        losses, outputs, grads = self._runtime.launch(launch)
        if batch.inputs:
            # Outside the launch lock: the inputs may come from another RoundPipe model, whose backward takes it.
            batch.backpropagate(grads)
        trees = [packet.tree() for packet in outputs]
        return sum_losses(losses), self._returned(trees, outputs, batch, config) if keep else []

    def _run_share(
        self, shared: SharedCall, batch: Batch, config: RoundPipeRunConfig, loss_fn: LossFn, *, keep: bool
    ) -> Losses:
        """Run this machine's microbatches; return the losses of the whole batch."""
        with in_call("forward_backward", self._name):
            with telling(shared.group, shared.kind):
                # Before anything that may fail on one machine alone: the generators stay the same.
                numbers = Numbers(shared.share.start, draw_seed())
                _refuse_divided(batch, keep=keep)
                run = self._start_training(batch, config, loss_fn, keep=False, numbers=numbers)
                losses = run.losses()
                warn_of_shortages(run)
            with _aborting(run):
                return shared.sum_losses(losses, {**self.host.facts.now(), "random seed": run.seed})

    def _forward_backward(
        self,
        batch: Batch,
        config: RoundPipeRunConfig,
        loss_fn: LossFn,
        *,
        keep: bool,
        step: StepDuring | None,
    ) -> tuple[list[Packet], list[Packet], list[Packet]]:
        """Return the losses, the outputs if `keep`, and the gradients of the inputs that require grad."""
        with in_call("forward_backward", self._name):
            if step is not None:
                step.prepare()
            run = self._start_training(batch, config, loss_fn, keep=keep, step=step)
            try:
                results = run.losses(), run.outputs(wait=config.merge_output is not False), run.input_grads()
                if step is not None:
                    step.finish()
            except BaseException as error:
                if step is not None:
                    step.explain(error, is_over=run.aborted)
                raise
            warn_of_shortages(run)
            return results

    def _start_training(
        self,
        batch: Batch,
        config: RoundPipeRunConfig,
        loss_fn: LossFn,
        *,
        keep: bool,
        numbers: Numbers | None = None,
        step: StepDuring | None = None,
    ) -> Run:
        """Start a training call. Raises `RoundPipeError` if there is nothing to train."""
        self.host.get_ready(training=True)
        if not batch.inputs and not self.host.state.trainable:
            raise RoundPipeError(
                f"model {self._name!r} has no trainable parameter, and no input requires grad, so "
                "forward_backward would train nothing; unfreeze parameters, or call the model instead"
            )
        run = self._runs.start("fused", batch, config, loss_fn, keep=keep, numbers=numbers, step=step)
        self._planner.improve_while(config, "fused", batch.parts, run.wait_for_any)
        return run

    def _returned(
        self, trees: list[Any], outputs: Sequence[Packet], batch: Batch, config: RoundPipeRunConfig
    ) -> list[Any]:
        if config.merge_output is not False:
            return trees
        events = [(packet.events[0], None) for packet in outputs]
        return RoundPipePackedData(trees, events, sizes=batch.parts.sizes, backend=self._runtime.backend)


def _requires_grad(arguments: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in rp_batch.flatten(arguments)[0])


@contextmanager
def _aborting(run: Run) -> Generator[None]:
    """Abort the run if what machines do together with its results fails."""
    try:
        yield
    except BaseException as error:
        run.abort(error, "together with other machines")
        run.finish()
        raise


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
