"""The engine of one model: launches its calls and returns their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import rp_batch
import torch
from rp_sched import LaunchDecision, LayerCost, Mode, Plan
from rp_state.grad_attribute.wanted import TrainedWeights
from rp_state.options import HostOptions
from rp_telemetry.calls.call_time import CallTime
from rp_telemetry.tracing import in_call
from torch import nn

from rp_engine.device.compiling import compiler_of
from rp_engine.device.packet import Packet
from rp_engine.device.whole_process.forward_mode import take_turns_in_levels
from rp_engine.engine.beside.calls_aside import CallsAside
from rp_engine.engine.runs import Runs, warn_of_shortages
from rp_engine.engine.shared_results import SharedResults, refuse_divided, refuse_in_parts
from rp_engine.engine.step_during import NO_STEP, NoStep
from rp_engine.errors import RoundPipeError
from rp_engine.execution.autograd import Gradients, connect
from rp_engine.execution.batch import Batch
from rp_engine.execution.call import LossFn, Streams
from rp_engine.execution.losses import Losses
from rp_engine.execution.packed_data import Arrivals, RoundPipePackedData
from rp_engine.execution.run import Run
from rp_engine.peers.alone import ALONE
from rp_engine.peers.call import CallShare, Numbers
from rp_engine.runtime.runtime import Runtime
from rp_engine.settings.run_config import RoundPipeRunConfig

_Result = TypeVar("_Result")


class Engine:
    """Launches one model's calls, in the order in which they are made.

    `host`: the model's state on the host. `aside`: its calls beside training. `is_compiled`: whether its layers
    are compiled, with these arguments of `torch.compile` if there are any. `auto_compute`: what ``compute="auto"``
    is in its calls.

    Raises `TypeError` for a `compile_layers` that is neither a bool nor a dict.
    """

    def __init__(
        self,
        name: str,
        modules: Callable[[], Sequence[nn.Module]],
        runtime: Runtime,
        options: HostOptions | None = None,
        *,
        compile_layers: bool | Mapping[str, Any] = False,
    ) -> None:
        compiler = compiler_of(compile_layers, len(runtime.lanes))
        take_turns_in_levels()
        self._name = name
        self._runtime = runtime
        self.is_compiled = compiler.compiles
        self._runs = Runs(name, modules, runtime, options or HostOptions(), compiler)
        self.aside = CallsAside(name, runtime, self._runs)
        self.host = self._runs.host
        self.planner = self._runs.planner
        self.auto_compute = self._runs.auto_compute

    def telling(self) -> AbstractContextManager[None]:
        """Return a context that tells machines waiting for this training call of an error before its launch."""
        return self._telling_early(self._training_call, _always)

    def telling_loss(self) -> AbstractContextManager[None]:
        """Return the same for a loss without gradients, which may draw no seed."""
        return self._telling_early(self._loss_call, self.host.draws_seed)

    def telling_forward(self, config: RoundPipeRunConfig, arguments: Any) -> AbstractContextManager[None]:
        """Return the same for a forward, if it is one that machines share."""
        if self._runtime.peers.is_alone or not self.trains(config, arguments):
            return nullcontext()
        return self._telling_early(self._forward_call, _always)

    def _telling_early(self, kind: str, draws: Callable[[], bool]) -> AbstractContextManager[None]:
        return self._runtime.peers.telling_early(kind, self._runtime.launch, draws)

    # What machines say that they do

    @property
    def _training_call(self) -> str:
        return f"forward_backward of model {self._name!r}"

    @property
    def _loss_call(self) -> str:
        return f"loss of model {self._name!r}"

    @property
    def _forward_call(self) -> str:
        return f"forward of model {self._name!r}"

    def trains(self, config: RoundPipeRunConfig, arguments: Any) -> bool:
        """Return whether a forward with these arguments may have a backward; several machines share it then."""
        is_wanted = torch.is_grad_enabled() and config.requires_grad is not False
        return is_wanted and (self.host.has_trained() or _requires_grad(arguments))

    def decide_together(
        self, kind: str, decide: Callable[[], _Result], words: Callable[[_Result], str]
    ) -> tuple[_Result, bool]:
        """Return what this machine decides before a call that machines share, and whether all decide alike.

        `kind`: what they do, told to each other. `words`: what tells one decision from another.
        """
        return self._runtime.peers.decide(kind, self._runtime.launch, decide, words)

    def call_times(self) -> list[CallTime]:
        """Return what plans promise that calls take, and what calls took."""
        return self.planner.log.times()

    @property
    def launch_decision(self) -> LaunchDecision | None:
        """How the last training call was launched, and why; None where there is no choice, or not yet."""
        return self.planner.launching.of_training

    def plans(self) -> dict[tuple[Mode, int], Plan]:
        """Return the latest plan of each kind of call and number of microbatches."""
        return self.planner.log.plans()

    def layer_costs(self, mode: Mode) -> list[LayerCost]:
        """Return the planner's cost estimate for each layer."""
        return self.planner.records.costs(mode)

    def microbatches(self, mode: Mode, batch_size: int, rows: int) -> int:
        """Return the number of microbatches chosen for calls of this mode; see `Planner.microbatches`."""
        machines = 1 if mode == "train" else self._runtime.peers.size
        if mode in self.planner.chosen:
            return min(machines * self.planner.chosen[mode], batch_size)
        count = self._runtime.launch(partial(self._microbatches, mode, batch_size, rows, machines))
        return min(machines * count, batch_size)

    def _microbatches(self, mode: Mode, batch_size: int, rows: int, machines: int) -> int:
        """Return the number of each machine's microbatches, the same on all of them."""
        own = partial(self.planner.microbatches, mode, max(batch_size // machines, 1), max(rows // machines, 1))
        if machines == 1:
            return own()
        count = self._runtime.peers.most("choosing the number of microbatches", own)
        self.planner.chosen[mode] = count
        return count

    # Bodies of the model's methods: the public half on the caller's thread, the private half on the launcher's

    def forward(
        self, parts: rp_batch.Parts[Any], arrivals: Arrivals, config: RoundPipeRunConfig, *, wants_grad: bool
    ) -> list[Any]:
        """Return the outputs of all microbatches, on the host; connected to autograd if they can require grad."""
        batch = Batch.of(parts, arrivals, wants_grad=wants_grad)
        # Without a backward to come, a forward is each machine's own.
        peers = self._runtime.peers if wants_grad and (batch.inputs or self.host.has_trained()) else ALONE
        with peers.telling_early(self._forward_call, self._runtime.launch, _always):
            refuse_in_parts(config, peers)
            shared = peers.share(self._forward_call, batch)
            own = shared.own_batch(batch)
        launch = partial(self._forward, own, config, wants_grad=wants_grad, shared=shared)
        run, outputs, version, number = self._runtime.launch(launch)
        if not run.call.with_grad:
            return self._returned([packet.tree() for packet in outputs], outputs, batch, config)

        def run_backward(grads: Gradients, for_weights: bool) -> Gradients:
            if not for_weights:
                run.drop_gradients()
            streams = Streams.current(grads)
            launch = partial(self._backward, run, own, config, outputs, grads, streams, version, shared)
            return self._runtime.launch(partial(shared.end, number, launch))

        state = self.host.state
        weights = TrainedWeights(self._name, state.trainable_tensors(), state.masters)
        return self._returned(connect(outputs, batch.inputs, run_backward, weights), outputs, batch, config)

    def _forward(
        self, batch: Batch, config: RoundPipeRunConfig, *, wants_grad: bool, shared: CallShare
    ) -> tuple[Run, list[Packet], int, int]:
        """Return the run, its outputs, the version of the weights that it read, and the call's number.

        `batch`: this machine's share of the call. The outputs are those of all machines, and the number is the
        call's among those of all machines.
        """
        with in_call("forward", self._name):
            with shared.telling():
                numbers = shared.numbers(_always)
                with_grad = bool(batch.inputs) or (wants_grad and self.host.has_trained())
                self.host.get_ready(training=False, regroups=with_grad)
                if with_grad:
                    self._runs.decide_compute(batch, config)
                run = self._runs.start("train" if with_grad else "infer", batch, config, numbers=numbers)
                outputs = run.outputs(wait=config.merge_output is not False)
                self._runs.settle_draws(run, numbers)
                warn_of_shortages(run)
            outputs = SharedResults(run, shared, self.host).outputs(outputs)
            return run, outputs, self.host.state.version, shared.begin()

    def _backward(
        self,
        run: Run,
        batch: Batch,
        config: RoundPipeRunConfig,
        outputs: Sequence[Packet],
        grads: Gradients,
        streams: Streams,
        version: int,
        shared: CallShare,
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the inputs."""
        self._refuse_consumed()
        with in_call("backward", self._name):
            with shared.telling_backward():
                # The forward has read what was written past version counters before it; the step takes it over.
                self.host.get_ready(training=True, regroups=False, samples=False)
                self.host.check_version(version)
                batch.arrivals.refuse_written()
                norm = shared.norm_of(grads)
                grads = shared.own_grads([sum(packet.grads) for packet in outputs], grads)
                outputs = shared.own(outputs)
                self._runs.start_backward(run, batch, config, outputs, grads, streams)
                packets = run.input_grads()
                run.finish()
                warn_of_shortages(run)
                returned = batch.grads(packets) if batch.inputs else []
            return SharedResults(run, shared, self.host).input_grads(returned, norm)

    def _refuse_consumed(self) -> None:
        if self.host.state.options.steps_in_backward and self.host.has_trained():
            raise RoundPipeError(
                f"model {self._name!r} was wrapped with step_in_backward=True, so its gradients are consumed "
                "inside forward_backward(optimizer=...), and backward() of a forward has no step for them; call "
                "that, or wrap the model without step_in_backward"
            )

    def forward_backward(
        self,
        parts: rp_batch.Parts[Any],
        labels: Sequence[Any],
        arrivals: Arrivals,
        loss_fn: LossFn,
        config: RoundPipeRunConfig,
        *,
        keep: bool,
        step: NoStep = NO_STEP,
    ) -> tuple[Losses, list[Any]]:
        """Return the sums of the losses, and the outputs of all microbatches if `keep`.

        `step`: the step that takes the gradients as they arrive, if there is one.
        """
        with self.telling():
            whole = Batch.of(parts, arrivals, labels)
            shared = self._runtime.peers.share(self._training_call, whole)
            batch = shared.own_batch(whole)
        launch = partial(self._forward_backward, shared, batch, config, loss_fn, keep=keep, step=step)
        losses, outputs, grads = self._runtime.launch(launch)
        if batch.inputs:
            # Outside the launch lock: the inputs may come from another RoundPipe model, whose backward takes it.
            batch.backpropagate(grads)
        trees = [packet.tree() for packet in outputs]
        return losses(), self._returned(trees, outputs, batch, config) if keep else []

    def _forward_backward(
        self,
        shared: CallShare,
        batch: Batch,
        config: RoundPipeRunConfig,
        loss_fn: LossFn,
        *,
        keep: bool,
        step: NoStep,
    ) -> tuple[Callable[[], Losses], list[Packet], list[Packet]]:
        """Return what sums the losses, the outputs if `keep`, and the gradients of the inputs that require grad.

        `batch`: this machine's share of the call. The losses are those of all machines.
        """
        with in_call("forward_backward", self._name):
            with shared.telling():
                numbers = shared.numbers(_always)
                refuse_divided(batch, shared, keep=keep)
                step.prepare()
                run = self._start_training(batch, config, loss_fn, keep=keep, numbers=numbers, step=step)
                try:
                    losses, outputs = run.losses(), run.outputs(wait=config.merge_output is not False)
                    grads = run.input_grads()
                    step.finish()
                except BaseException as error:
                    step.explain(error, is_over=run.aborted)
                    raise
                warn_of_shortages(run)
            return SharedResults(run, shared, self.host).losses(losses), outputs, grads

    def _start_training(
        self,
        batch: Batch,
        config: RoundPipeRunConfig,
        loss_fn: LossFn,
        numbers: Numbers,
        *,
        keep: bool,
        step: NoStep,
    ) -> Run:
        """Start a training call. Raises `RoundPipeError` if there is nothing to train."""
        self.host.get_ready(training=True)
        if not batch.inputs and not self.host.has_trained():
            raise RoundPipeError(
                f"model {self._name!r} has no trainable parameter, and no input requires grad, so "
                "forward_backward would train nothing; unfreeze parameters, or call the model instead"
            )
        self._runs.decide_compute(batch, config)
        return self._runs.start("fused", batch, config, loss_fn, keep=keep, numbers=numbers, step=step)

    def loss(
        self,
        parts: rp_batch.Parts[Any],
        labels: Sequence[Any],
        arrivals: Arrivals,
        loss_fn: LossFn,
        config: RoundPipeRunConfig,
        *,
        keep: bool,
    ) -> tuple[Losses, list[Any]]:
        """Return the sums of the losses without gradients, and the outputs of all microbatches if `keep`."""
        with self.telling_loss():
            whole = Batch.of(parts, arrivals, labels, wants_grad=False)
            shared = self._runtime.peers.share(self._loss_call, whole)
            batch = shared.own_batch(whole)
        losses, outputs = self._runtime.launch(partial(self._loss, shared, batch, config, loss_fn, keep=keep))
        trees = [packet.tree() for packet in outputs]
        return losses(), self._returned(trees, outputs, batch, config) if keep else []

    def _loss(
        self, shared: CallShare, batch: Batch, config: RoundPipeRunConfig, loss_fn: LossFn, *, keep: bool
    ) -> tuple[Callable[[], Losses], list[Packet]]:
        """Return what sums the losses of all machines, and the outputs if `keep`."""
        with in_call("loss", self._name):
            with shared.telling():
                numbers = shared.numbers(self.host.draws_seed)
                refuse_divided(batch, shared, keep=keep)
                self.host.get_ready(training=False, regroups=False)
                run = self._runs.start("infer", batch, config, loss_fn, keep=keep, numbers=numbers)
                losses, outputs = run.losses(), run.outputs(wait=config.merge_output is not False)
                self._runs.settle_draws(run, numbers)
                warn_of_shortages(run)
            return SharedResults(run, shared, self.host).losses(losses), outputs

    def _returned(
        self, trees: list[Any], outputs: Sequence[Packet], batch: Batch, config: RoundPipeRunConfig
    ) -> list[Any]:
        if config.merge_output is not False:
            return trees
        events = [(packet.events[0], None) for packet in outputs]
        return RoundPipePackedData(trees, events, sizes=batch.sizes, backend=self._runtime.backend)


def _always() -> bool:
    return True


def _requires_grad(arguments: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in rp_batch.flatten(arguments)[0])
