"""The engine of one model: every call and step is launched here, under the runtime's launch lock."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import rp_batch
import torch
from rp_optim.jobs import Outcome
from rp_sched import LayerCost, Mode, Task
from torch import nn

from roundpipe.device.compiling import CompileOptions, Compiler
from roundpipe.device.packet import Packet
from roundpipe.device.randomness import Randomness, draw_seed
from roundpipe.device.replica import Twins
from roundpipe.errors import GradientsIncomplete, Stale, StepFailed, add_note, in_words
from roundpipe.execution.autograd import Gradients, connect
from roundpipe.execution.call import Autocast, Call, LossFn, Streams
from roundpipe.execution.packed_data import Arrivals, RoundPipePackedData
from roundpipe.execution.run import Key, Run, sum_losses
from roundpipe.optimizer.steps import Part, Updates
from roundpipe.planning.planner import Planner
from roundpipe.runtime.runtime import Runtime
from roundpipe.runtime.tickets import Take, own_turn
from roundpipe.settings.run_config import RoundPipeRunConfig
from roundpipe.state.grad_attribute import Exposure
from roundpipe.state.model_state import ModelState, PinMode
from roundpipe.state.ownership import Claim
from roundpipe.telemetry import tracing
from roundpipe.telemetry.layer_times import LayerTimes
from roundpipe.telemetry.tracing import CALLER, Tracer


@contextmanager
def told(name: str, what: str) -> Generator[None]:
    """Whoever watches is told of what is launched within."""
    with tracing.current().on_host(CALLER, "call", f"{what} of {name}"):
        yield


Losses = torch.Tensor | list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Given:
    """What a caller has given, and its settings that belong to threads."""

    parts: rp_batch.Parts[Any]
    arrivals: Arrivals
    config: RoundPipeRunConfig
    autocast: tuple[Autocast, ...]
    streams: Streams


class Engine:
    """Runs one model's calls and steps in the order in which they are made."""

    def __init__(
        self,
        name: str,
        modules: Callable[[], Sequence[nn.Module]],
        runtime: Runtime,
        pin: PinMode,
        optim_dtype: torch.dtype | None,
        compile_options: CompileOptions | None = None,
        double_buffer: bool | None = False,
    ) -> None:
        self._name = name
        self._runtime = runtime
        self._modules = modules
        self._claim = Claim(name)
        self._claim.take(modules())
        self._state = ModelState(runtime.backend, modules(), pin, optim_dtype, double_buffer)
        runtime.states.add(self._state)
        self._planner = Planner(name, self._state, runtime)
        self._compiler = None if compile_options is None else Compiler(compile_options, len(runtime.lanes))
        self._twins = self._new_twins()
        self._updates = Updates(name, self._state, runtime)
        self._exposure = Exposure()
        self._runs: list[Run] = []

    # What the model's methods do

    @property
    def state(self) -> ModelState:
        """What the model keeps on the host."""
        return self._state

    @property
    def predicted_bytes(self) -> int | None:
        """What the last call was to take on a device, foreseen from those before it."""
        return self._planner.predicted_bytes

    def layer_costs(self, mode: Mode) -> list[LayerCost]:
        """What the planner takes each layer to cost."""
        return self._planner.costs(mode)

    def masters(self) -> Mapping[torch.Tensor, nn.Parameter]:
        """The optimizer's parameter of each trainable one."""
        # A step function sees what was there when it was launched.
        if not self._runtime.optimizer.is_current() and self._has_changed():
            self._runtime.launch(partial(self.get_ready, training=False))
        self._state.make_masters()
        return self._state.masters

    def forward(
        self, parts: rp_batch.Parts[Any], arrivals: Arrivals, config: RoundPipeRunConfig, *, wants_grad: bool
    ) -> list[Any]:
        """The outputs of all microbatches, on the host and joined to autograd if they can require grad."""
        inputs = _requiring_grad(parts) if wants_grad else []
        given = Given(parts, arrivals, config, Autocast.current(), Streams.current(parts))
        launch = partial(self._forward, given, input_grads=bool(inputs), wants_grad=wants_grad)
        run, backward_tasks, packets, version = self._runtime.launch(launch)
        if not run.call.with_grad:
            return self._returned([packet.tree() for packet in packets], packets, parts, config)

        def run_backward(grads: Gradients) -> Gradients:
            launch = partial(self._backward, given, run, backward_tasks, packets, grads, Streams.current(grads))
            returned = self._runtime.launch(partial(launch, version, input_grads=bool(inputs)))
            return _grads_of_inputs(parts, returned) if inputs else []

        return self._returned(connect(packets, inputs, run_backward), packets, parts, config)

    def _forward(
        self, given: Given, *, input_grads: bool, wants_grad: bool
    ) -> tuple[Run, list[Task], list[Packet], int]:
        """The run, the tasks of its backward, the outputs, and the version of the weights that it read."""
        with told(self._name, "forward"):
            self.get_ready(training=False)
            with_grad = input_grads or (wants_grad and bool(self._state.trainable))
            run, backward_tasks = self._launch_forward(given, with_grad=with_grad, input_grads=input_grads)
            packets = run.collect(self._outputs(len(given.parts)), wait=given.config.merge_output is not False)
            return run, backward_tasks, packets, self._state.version

    def _backward(
        self,
        given: Given,
        run: Run,
        tasks: list[Task],
        packets: list[Packet],
        grads: Gradients,
        streams: Streams,
        version: int,
        *,
        input_grads: bool,
    ) -> list[Packet]:
        with told(self._name, "backward"):
            self.get_ready(training=True)
            self._check_version(version)
            given.arrivals.refuse_written()
            times = self._planner.watch(given.config, "train", given.parts, tasks)
            with streams.current_here():
                self._launch_backward(run, tasks, packets, grads, times)
            returned = run.collect(_keys("grad", 0, len(given.parts))) if input_grads else []
            run.finish()
            return returned

    def _returned(
        self,
        trees: list[Any],
        packets: Sequence[Packet],
        parts: rp_batch.Parts[Any],
        config: RoundPipeRunConfig,
    ) -> list[Any]:
        if config.merge_output is not False:
            return trees
        events = [(packet.events[0], None) for packet in packets]
        return RoundPipePackedData(trees, events, sizes=parts.sizes, backend=self._runtime.backend)

    def forward_backward(
        self,
        parts: rp_batch.Parts[Any],
        labels: Sequence[Any],
        arrivals: Arrivals,
        loss_fn: LossFn,
        config: RoundPipeRunConfig,
        *,
        keep: bool,
    ) -> tuple[Losses, list[Any]]:
        """The sums of the losses, and the outputs of all microbatches if they are to be kept."""
        inputs = _requiring_grad(parts)
        given = Given(parts, arrivals, config, Autocast.current(), Streams.current((parts, labels)))
        launch = partial(self._forward_backward, given, labels, loss_fn, keep=keep, input_grads=bool(inputs))
        losses, outputs, grads = self._runtime.launch(launch)
        if inputs:
            # Outside the lock: what made the inputs may be a RoundPipe model, too.
            _backpropagate(inputs, _grads_of_inputs(parts, grads))
        if not keep:
            return sum_losses(losses), []
        return sum_losses(losses), self._returned([packet.tree() for packet in outputs], outputs, parts, config)

    def _forward_backward(
        self, given: Given, labels: Sequence[Any], loss_fn: LossFn, *, keep: bool, input_grads: bool
    ) -> tuple[list[Packet], list[Packet], list[Packet]]:
        """The losses, the outputs if they are to be kept, and the gradients of the inputs if these want any."""
        with told(self._name, "forward_backward"):
            self.get_ready(training=True)
            run = self._launch_fused(given, labels, loss_fn, keep=keep)
            self._planner.improve_while(given.config, "fused", given.parts, run.wait_for_any)
            count = len(given.parts)
            losses = run.collect(_keys("loss", 0, count))
            wait = given.config.merge_output is not False
            outputs = run.collect(self._outputs(count), wait=wait) if keep else []
            grads = run.collect(_keys("grad", 0, count)) if input_grads else []
            return losses, outputs, grads

    # Parts of what `Joint` does; on the launcher's thread

    def prepare_step(self, take: Take, *, is_async: bool) -> Part:
        """Take a step's turns."""
        return self._updates.prepare(take, is_async=is_async)

    def submit_step(self, job: Callable[[Tracer], None]) -> Outcome[None]:
        """Queue a step's job."""
        return self._updates.submit(job)

    def share_steps(self, other: Engine) -> None:
        """From now on both models are stepped together."""
        self._updates.share(other._updates)
        self._state.is_part = other._state.is_part = True

    def drain(self) -> None:
        """Wait for everything that was launched before."""
        self._updates.wait()
        for line in self._state.lines():
            with own_turn(line, write=True):
                pass

    def publish(self) -> None:
        """Publish the last result, if calls do not read it yet, and wait for it."""
        self.get_ready(training=False)
        self._updates.publish()
        self._updates.wait()
        self.raise_late_errors()

    def show_gradients(self) -> None:
        """Set ``.grad`` on every parameter, when all gradients have come."""
        self._settle()
        # Lanes are done with the last runs only now: nothing of these is kept.
        self.raise_late_errors()
        if self._state.broken is None:
            self._exposure.show(self._state.trainable)

    def drop_gradients(self) -> None:
        """Drop all gradients, when all have come."""
        self._settle()
        self._drop_gradients()

    def reset(self) -> None:
        """Drop gradients and go back to the published weights."""
        self._settle()
        self._late_errors()
        self._drop_gradients()
        self._forget_failed_step()

    def make_current(self) -> None:
        """Let the weights be current, so that the caller may write them."""
        self.drain()
        self._late_errors()
        self._updates.publish()
        self._updates.wait()

    def take_over(self) -> None:
        """The caller has written the weights: the masters follow."""
        self._refresh()
        self._forget_failed_step()

    def replaced(self, parameters: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Before `take_over`: new parameters, by the old ones, keep the optimizer's masters."""
        for old, new in parameters.items():
            if new is not old and (master := self._state.masters.pop(old, None)) is not None:
                self._state.masters[new] = master
        self._masters_from_weights(list(parameters.values()))

    def _forget_failed_step(self) -> None:
        if self._state.failed is not None:
            self._state.failed = None
            self._state.unpublished = False
            self._masters_from_weights(self._state.trainable_tensors())

    # Getting ready; on the launcher's thread

    def get_ready(self, *, training: bool) -> None:
        """Raise what failed meanwhile, and take over what was changed outside."""
        self.raise_late_errors()
        if training:
            self._refuse_half_made()
        self._exposure.take_back()
        self._collect_gradients()
        self._refresh()
        self._state.note_flags()
        if self._state.note_attributes():
            self._twins = self._new_twins()

    def raise_late_errors(self) -> None:
        """Raise what failed since this was last asked."""
        errors = self._late_errors()
        for another in errors[1:]:
            add_note(errors[0], f"RoundPipe: besides, {in_words(another)}")
        if errors:
            raise errors[0]

    def _late_errors(self) -> list[BaseException]:
        over = [run for run in self._runs if run.over()]
        self._runs = [run for run in self._runs if run not in over]
        for times in [times for run in over for times in run.take_times()]:
            self._planner.take(times)
        return [error for run in over if (error := run.outcome()) is not None] + self._updates.errors()

    def _refuse_half_made(self) -> None:
        failed, broken = self._state.failed, self._state.broken
        if failed is not None:
            raise StepFailed(
                f"an earlier step of model {self._name!r} failed half-way ({failed}); load a state with "
                "load_state_dict() or go back to the last published weights with reset()"
            )
        if broken is not None:
            raise GradientsIncomplete(
                f"an earlier call of model {self._name!r} failed ({broken.error}) and left part of its gradients; "
                "drop them with zero_grad() or reset()"
            )

    def _check_version(self, version: int) -> None:
        if version != self._state.version:
            raise Stale(
                f"model {self._name!r}: newer weights were published since this forward, so its backward would "
                "mix two versions; call backward() before the next step, or use forward_backward()"
            )

    def _collect_gradients(self) -> None:
        # What code outside, such as a penalty on the weights, has put on the model's own parameters.
        for block in self._state.trainable:
            found = [index for index, tensor in enumerate(block.tensors) if tensor.grad is not None]
            if found and block.gradient is not None:
                with own_turn(block.gradient.turns, write=True):
                    block.gradient.collect(found, block.tensors)

    def _refresh(self) -> None:
        written = self._state.written_outside()
        changed = self._has_changed()
        if changed:
            self.drain()
            written += self._state.moved_outside()
        if written:
            self._updates.wait()
            self._masters_from_weights(written)
        if changed:
            # A parameter that is trained no more would never get the last step's result.
            self._updates.publish()
            self._updates.wait()
            self._claim.take(self._state.modules)
            self._state.rebuild()
            self._twins = self._new_twins()
            self._planner.forget()
        # A forward from before read other weights than its backward would.
        self._state.version += changed or bool(written)

    def _has_changed(self) -> bool:
        self._state.modules = tuple(self._modules())
        return self._state.changed()

    def _masters_from_weights(self, tensors: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for tensor in tensors:
                if tensor in self._state.masters:
                    self._state.masters[tensor].copy_(tensor)

    def _new_twins(self) -> list[Twins]:
        layers, compiler = self._state.layers, self._compiler
        return [Twins(lane.device.torch_device, layers, compiler) for lane in self._runtime.lanes]

    def _settle(self) -> None:
        self.drain()
        for lane in self._runtime.lanes:
            lane.settle()

    def _drop_gradients(self) -> None:
        self._exposure.take_back()
        self._state.broken = None
        for block in self._state.trainable:
            if block.gradient is not None:
                block.gradient.drop()

    # Launching; on the launcher's thread

    def _call(self, given: Given, *, with_grad: bool, loss_fn: LossFn | None = None, keep: bool = False) -> Call:
        config = given.config
        state = self._state
        random = with_grad or any(flag for flags in state.flags for flag in flags)
        randomness = None
        if random and config.preserve_rng_state is not False:
            randomness = Randomness(draw_seed(), state.quiet)
        return Call(
            name=self._name,
            state=state,
            flags=state.flags,
            with_grad=with_grad,
            grain=config.recompute_grain or "stage",
            is_planned=config.execute_plan is None,
            num_microbatches=len(given.parts),
            randomness=randomness,
            autocast=given.autocast,
            spare_bytes=self._planner.spare_bytes,
            loss_fn=loss_fn,
            keep_outputs=keep,
        )

    def _new_run(self, call: Call, tasks: Sequence[Task], given: Given, *, outputs: bool) -> Run:
        run = Run(call, self._runtime, self._twins)
        run.expect(tasks)
        if outputs:
            run.reserve_all(self._outputs(len(given.parts)))
        if call.with_grad and _requiring_grad(given.parts):
            run.reserve_all(_keys("grad", 0, len(given.parts)))
        with given.streams.current_here():
            for m, part in enumerate(given.parts):
                what = f"inputs, microbatch {m}"
                packet = self._copied(tuple(part), what, given.arrivals, with_grads=call.with_grad)
                run.put(("input", 0, m), packet)
        return run

    def _copied(
        self, tree: Any, what: str, arrivals: Arrivals | None = None, *, with_grads: bool = False
    ) -> Packet:
        found = Arrivals(self._runtime.backend, ()) if arrivals is None else arrivals
        try:
            return Packet.of(self._runtime.backend, tree, with_grads=with_grads, arrival=found.of)
        except BaseException as error:
            add_note(error, f"RoundPipe: in model {self._name!r}, copying {what}")
            raise

    def _launch_fused(self, given: Given, labels: Sequence[Any], loss_fn: LossFn, *, keep: bool) -> Run:
        parts, config = given.parts, given.config
        tasks = self._planner.tasks(config, "fused", parts, input_grads=bool(_requiring_grad(parts)))
        call = self._call(given, with_grad=True, loss_fn=loss_fn, keep=keep)
        run = self._new_run(call, tasks, given, outputs=keep)
        with given.streams.current_here():
            for m, label in enumerate(labels):
                run.put(("label", 0, m), self._copied(label, f"labels, microbatch {m}", given.arrivals))
        run.add_gradients()
        self._launch(run, tasks, self._planner.watch(config, "fused", parts, tasks))
        return run

    def _launch_forward(self, given: Given, *, with_grad: bool, input_grads: bool) -> tuple[Run, list[Task]]:
        parts, config = given.parts, given.config
        mode: Mode = "train" if with_grad else "infer"
        tasks = self._planner.tasks(config, mode, parts, input_grads=input_grads)
        run = self._new_run(self._call(given, with_grad=with_grad), tasks, given, outputs=True)
        up = [task for task in tasks if task.kind == "F"]
        self._launch(run, up, self._planner.watch(config, mode, parts, up))
        return run, [task for task in tasks if task.kind == "B"]

    def _launch_backward(
        self,
        run: Run,
        tasks: Sequence[Task],
        packets: Sequence[Packet],
        grads: Gradients,
        times: LayerTimes | None,
    ) -> None:
        run.add_gradients()
        last = len(self._state.layers)
        remaining = iter(grads)
        for m, packet in enumerate(packets):
            found = [next(remaining) if grad else None for grad in packet.grads]
            if run.wants_grad(last, m):
                run.put(("grad", last, m), self._copied(found, f"gradients of outputs, microbatch {m}"))
        self._launch(run, tasks, times)

    def _launch(self, run: Run, tasks: Sequence[Task], times: LayerTimes | None) -> None:
        if run not in self._runs:
            self._runs.append(run)
        run.launch(tasks, times)

    def _outputs(self, microbatches: int) -> list[Key]:
        return _keys("input", len(self._state.layers), microbatches)


def _keys(kind: Any, boundary: int, microbatches: int) -> list[Key]:
    return [(kind, boundary, m) for m in range(microbatches)]


def _requiring_grad(parts: Sequence[Any]) -> list[torch.Tensor]:
    return [
        leaf
        for part in parts
        for leaf in rp_batch.flatten(tuple(part))[0]
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]


def _grads_of_inputs(parts: Sequence[Any], packets: Sequence[Packet]) -> list[torch.Tensor | None]:
    return [
        grad
        for part, packet in zip(parts, packets, strict=True)
        for leaf, grad in zip(rp_batch.flatten(tuple(part))[0], packet.leaves, strict=True)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]


def _backpropagate(inputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
    pairs = [(tensor, grad) for tensor, grad in zip(inputs, grads, strict=True) if grad is not None]
    torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
