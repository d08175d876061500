"""One model's parameters on the host between calls and steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from rp_optim.jobs import Outcome
from rp_sched import Task
from rp_state.block import Block
from rp_state.model_state import ModelState
from rp_state.modules.ownership import Claim
from rp_state.options import HostOptions
from rp_telemetry.tracing import Tracer
from rp_transfer import Ticket
from torch import nn

from rp_engine.engine.host.changes import Forward, OutsideChanges
from rp_engine.engine.host.codes import HostCodes
from rp_engine.engine.host.gradients import HostGradients
from rp_engine.engine.memory.memory_check import HostMemoryCheck
from rp_engine.engine.model_read import ModelRead
from rp_engine.engine.under_way import Launched, UnderWay
from rp_engine.errors import AloneOnly, add_note, in_words
from rp_engine.optimizer.model_step import ModelStep
from rp_engine.optimizer.step_queue import StepQueue
from rp_engine.runtime.runtime import Runtime
from rp_engine.runtime.tickets import Take, own_turn


class Observer:
    """Receives notice of changes on the host, and ignores it: the owner of the layers' device copies does not."""

    def note_over(self, work: Launched) -> None:
        """This work has ended."""

    def note_stepping(self, take: Take) -> None:
        """A step is launched: `take` takes turns after its own."""

    def note_idle(self) -> None:
        """The caller waits for all work: it may be the last."""

    def note_altered(self) -> None:
        """Plain attributes of the layers have changed."""

    def note_rebuilt(self) -> None:
        """The blocks were rebuilt."""


_NOBODY = Observer()


class HostParameters:
    """One model's parameters on the host, current and ready for the next call or step.

    Call every method but `masters` on the launcher's thread, between calls and steps. `predicted_bytes`: device
    memory predicted for the last call; None if unknown. `read_delay`: steps launched before the last call whose
    results it does not read.
    """

    def __init__(
        self,
        name: str,
        modules: Callable[[], Sequence[nn.Module]],
        runtime: Runtime,
        options: HostOptions,
        observer: Observer = _NOBODY,
    ) -> None:
        self.name = name
        self.predicted_bytes: int | None = None
        self.read_delay = 0
        self._runtime = runtime
        self._modules = modules
        self._observer = observer
        runtime.refuse_forked()
        claim = Claim(name)
        claim.take(modules())
        self.memory_check = HostMemoryCheck(name, runtime)
        _refuse_consuming(runtime, options)
        self.state, self.shared = runtime.peers.wrap(
            f"wrapping model {name!r}", lambda: self._build(modules(), options)
        )
        runtime.states.add(self.state)
        self.codes = HostCodes(self.state, self.memory_check, self.drain)
        self.gradients = HostGradients(name, self.state, runtime, self.shared)
        self._step_queue = StepQueue(name, self.state, runtime)
        self._under_way = UnderWay(observer.note_over)
        self._outside = OutsideChanges(
            name,
            modules,
            claim,
            runtime.peers,
            self.state,
            self.shared,
            self._step_queue,
            self.memory_check,
            self._note_rebuilt,
        )

    def _build(self, modules: Sequence[nn.Module], options: HostOptions) -> ModelState:
        check_wrapping = partial(
            self.memory_check.check_wrapping,
            options=options,
            in_training_mode=any(module.training for module in modules),
            coded=options.coded(modules),
        )
        shards = self._runtime.peers.shards()
        return ModelState(self.name, self._runtime.backend, modules, options, check_wrapping, shards)

    def check_call(self, tasks: Sequence[Task], activations: int, *, is_measured: bool) -> None:
        """Raise `HostMemoryShort` if what these tasks leave on the host does not fit."""
        additions = self.gradients.additions + self.gradients.added_by(tasks)
        self.memory_check.check_call(self.state, additions, activations, is_measured=is_measured)
        self.gradients.additions = additions

    def masters(self) -> Mapping[torch.Tensor, nn.Parameter]:
        """Return the master weight of each trainable parameter."""
        # A step function sees the parameters that existed at its launch.
        if not self._runtime.optimizer.is_current() and self._outside.are_there():
            self._runtime.launch(partial(self.get_ready, training=False))
        self.state.make_masters()
        return self.state.masters

    def has_trained(self) -> bool:
        """Return whether any parameter of the layers requires grad now."""
        return any(parameter.requires_grad for module in self._modules() for parameter in module.parameters())

    def draws_seed(self) -> bool:
        """Return whether a call draws a seed: a module trains now, or some draw in evaluation mode, too."""
        is_training = any(one.training for module in self._modules() for one in module.modules())
        return is_training or self.state.habits.evaluates_randomly is True

    # One model's share of the methods of `WholeModel`

    def begin_consuming(self) -> None:
        """Wait for all work, and drop what is left of earlier calls, before one in which the optimizer steps."""
        self.drain()
        self.raise_late_errors()
        if self.state.health.has_whole_step:
            # What a failed call has left that no step has read.
            self.gradients.drop()

    def prepare_step(self, take: Take, *, is_async: bool) -> ModelStep:
        """Take a step's turns."""
        self.gradients.note_stepped()
        return self._step_queue.prepare(take, is_async=is_async)

    def expect_next_call(self, take: Take) -> None:
        """Let the observer take turns for the next call, once those of a step are taken."""
        self._observer.note_stepping(take)

    def prepare_consuming(self, take: Take, gradients: Mapping[Block, Ticket]) -> ModelStep:
        """Take the turns of a step during a call, which has taken those on `gradients`."""
        self.gradients.note_stepped()
        return self._step_queue.prepare_consuming(take, gradients)

    def prepare_model_read(self, take: Take) -> ModelRead:
        """Take a reader's turn of all blocks, after taking over what was written outside."""
        self.raise_late_errors()
        self.state.health.refuse_failed_step()
        self.refresh()
        blocks = {block: take(block.turns, write=False) for block in self.state.blocks}
        has_gradients = bool(self.gradients.additions)
        return ModelRead(self.state, blocks, has_gradients=has_gradients, results=self._step_queue.results)

    def submit_step(self, job: Callable[[Tracer], None]) -> Outcome[None]:
        """Queue a step's job."""
        return self._step_queue.submit(job)

    def submit_read(self, job: Callable[[Tracer], None]) -> Outcome[None]:
        """Queue a job after the steps that only reads, see `prepare_model_read`."""
        return self._step_queue.submit(job, writes=False)

    def share_steps(self, other: HostParameters) -> None:
        """Step both models together from now on."""
        self._step_queue.share(other._step_queue)
        self.state.is_part = other.state.is_part = True

    def drain(self) -> None:
        """Wait for all steps and tasks launched before."""
        self._step_queue.drain()

    def publish(self) -> None:
        """Publish the last step's result, if calls do not read it yet, and wait until it is published."""
        if self.state.unpublished:
            kind = f"publishing the weights of model {self.name!r} (synchronize or the like)"
            with self._runtime.peers.telling(kind):
                self.get_ready(training=False)
            self.shared.same(kind)
        else:
            self.get_ready(training=False)
        self._step_queue.publish()
        self._step_queue.wait()
        self.raise_late_errors()

    def show_gradients(self) -> None:
        """Wait for all gradients, then set ``.grad`` on every trainable parameter."""
        self._settle()
        self._observer.note_idle()
        # Runs may have ended only now: raise their errors, and drop the references to them and their memory.
        self.raise_late_errors()
        self.gradients.show()

    def drop_gradients(self) -> None:
        """Wait for all gradients, then drop them."""
        self._settle()
        self.gradients.drop_all()

    def reset(self) -> None:
        """Drop gradients, pending errors and a failed step's result; keep the published weights."""
        self._settle()
        self._late_errors()
        self.gradients.drop_all()
        self.state.health.refuse_torn()
        self._forget_failed_step()

    def make_current(self) -> None:
        """Wait for all work and publish the last result, so that the caller may write the weights."""
        self.drain()
        self._late_errors()
        self.shared.same(f"loading a state into model {self.name!r}")
        self._step_queue.publish()
        self._step_queue.wait()

    def take_over(self) -> None:
        """Update the masters from weights that the caller has written."""
        self.refresh()
        self._forget_failed_step()
        self.state.health.forget_mixed()

    def restored(self, *, is_behind: bool) -> None:
        """Drop gradients and go on from the values that the caller wrote. `is_behind`: see `ModelBetweenSteps`."""
        self.gradients.drop_all()
        for block in self.state.trainable:
            block.begin_results()
            block.settle()
        self.state.note_rewritten()
        self.state.unpublished = is_behind and bool(self.state.trainable)
        if not self.state.has_results_apart():
            self.state.unpublished = False
        self.state.health.forget_step()
        self.state.health.forget_mixed()
        self.state.health.note_changed("a state was loaded")

    def settle_weights(self) -> None:
        """Publish the last step's result, if calls do not read it yet, and wait for all who write weights.

        On several machines wait for the result, without a word to the others: see `results`.
        """
        self.raise_late_errors()
        self.state.health.refuse_mixed()
        if self.state.unpublished and self._runtime.peers.is_alone:
            self.publish()
        self.results()
        for block in self.state.blocks:
            with own_turn(block.turns, write=False):
                self.state.backend.host_touch(read=block.host_tensors(), what="a state dict")
        # A step that goes on after Ctrl-C may have failed meanwhile.
        self.state.health.refuse_mixed()

    def results(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return, on several machines, the last step's result of each parameter if calls do not read it yet.

        Other machines need not ask. Raises `AloneOnly` if this machine does not have it before all publish it.
        """
        if not self.state.unpublished:
            return {}
        self._step_queue.wait()
        self.raise_late_errors()
        if not self.state.health.has_whole_step:
            # Calls read the weights of the step before, which are whole.
            return {}
        if self._outside.are_there():
            raise AloneOnly(
                f"tensors of model {self.name!r} were added, replaced or frozen while a step's result is not "
                "published yet, which all machines do together: call synchronize() on all of them first"
            )
        self.refresh()
        return self._step_queue.results.apart()

    def _forget_failed_step(self) -> None:
        if not self.state.health.has_whole_step:
            self.state.health.forget_step()
            self.state.unpublished = False
            self.set_masters(self.state.trainable_tensors())
            self.state.note_rewritten()

    # Before a call or a step

    def get_ready(self, *, training: bool, regroups: bool = True, samples: bool = True) -> None:
        """Raise errors of earlier work, and take over changes made outside the engine.

        `training`: also refuse to continue after a failed step or with incomplete gradients, and take `samples`.
        `regroups`, `samples`: see `refresh`.
        """
        self.raise_late_errors()
        self.state.health.refuse_mixed()
        if training:
            self.state.health.refuse_half_made()
        self.gradients.collect()
        self.refresh(regroups=regroups, samples=training and samples)
        self.state.note_flags()
        if self.state.note_attributes():
            self._observer.note_altered()

    def note_read(self) -> None:
        """Record which step's weights the call that is launched now reads; call it after `get_ready`."""
        self.read_delay = int(self.state.unpublished)

    def raise_late_errors(self) -> None:
        """Raise the first error of work that has ended since this was last called; the others are notes on it."""
        errors = self._late_errors()
        for another in errors[1:]:
            add_note(errors[0], f"RoundPipe: another error was {in_words(another)}")
        if errors:
            raise errors[0]

    def wait_for_calls(self) -> None:
        """Wait for all work of earlier calls, but not for steps; raise its errors."""
        self._under_way.wait()
        self.raise_late_errors()

    def follow(self, work: Launched) -> None:
        """Track this work: if it fails after the launching call has returned, a later call raises its error."""
        self._under_way.follow(work)

    def _late_errors(self) -> list[BaseException]:
        return self._under_way.errors() + self._step_queue.errors()

    def check_version(self, version: int) -> None:
        """Raise `Stale` if the weights are no longer those of `version`."""
        self.state.health.refuse_stale(version)

    def refresh(self, *, regroups: bool = True, samples: bool = False) -> None:
        """Take over changes of modules and weights made outside the engine, see `OutsideChanges.take_over`."""
        self._outside.take_over(regroups=regroups, samples=samples)

    def expect_backward(self, forward: Forward) -> None:
        """Keep the blocks that this forward's backward trains, for as long as it may come."""
        self._outside.expect_backward(forward)

    def set_masters(self, tensors: Sequence[torch.Tensor]) -> None:
        """Set the masters of these parameters from their weights."""
        self._outside.set_masters(tensors)

    def _note_rebuilt(self, kept: Sequence[Block]) -> None:
        self.gradients.keep_additions(kept)
        # What stands in ``.grad`` of parameters that are new.
        self.gradients.collect()
        self._observer.note_rebuilt()

    def _settle(self) -> None:
        self.drain()
        for lane in self._runtime.lanes:
            lane.settle()


def _refuse_consuming(runtime: Runtime, options: HostOptions) -> None:
    if options.steps_in_backward:
        runtime.peers.refuse(
            f"step_in_backward=True is for one machine, but there are {runtime.peers.size}, which add their "
            "gradients before a step reads them; leave it out"
        )
