"""One model's parameters on the host between calls and steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from rp_optim.jobs import Outcome
from rp_sched import Task
from rp_transfer import Ticket
from torch import nn

from roundpipe.engine.aftermath.launched import Launched, UnderWay
from roundpipe.engine.aftermath.refusals import (
    refuse_failed,
    refuse_half_made,
    refuse_mixed,
    refuse_stale,
    refuse_torn,
)
from roundpipe.engine.capture import Capture
from roundpipe.engine.host_gradients import HostGradients
from roundpipe.engine.machines.facts import Facts, fingerprint
from roundpipe.engine.machines.telling import telling
from roundpipe.engine.memory.foresight import Foresight
from roundpipe.errors import AloneOnly, add_note, in_words
from roundpipe.optimizer.step_part import Part
from roundpipe.optimizer.updates import Updates
from roundpipe.runtime.runtime import Runtime
from roundpipe.runtime.tickets import Take, own_turn
from roundpipe.state.block import Block
from roundpipe.state.model_state import HostOptions, ModelState
from roundpipe.state.ownership import Claim
from roundpipe.state.shards import Shards
from roundpipe.telemetry.tracing import Tracer


class Observer(Protocol):
    """Receives notice of changes on the host; implemented by the owner of the layers' device copies."""

    def note_over(self, work: Launched) -> None:
        """This work has ended."""
        ...

    def note_altered(self) -> None:
        """Plain attributes of the layers have changed."""
        ...

    def note_rebuilt(self) -> None:
        """The blocks were rebuilt."""
        ...


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
        observer: Observer | None = None,
    ) -> None:
        self.name = name
        self.predicted_bytes: int | None = None
        self.read_delay = 0
        self._runtime = runtime
        self._modules = modules
        self._observer = observer
        runtime.refuse_forked()
        self._claim = Claim(name)
        self._claim.take(modules())
        self.foresight = Foresight(name, runtime)
        _refuse_consuming(runtime, options)
        number = 0 if runtime.group is None else runtime.group.new_model()
        with telling(runtime.group, self._wrapping):
            self.state = self._build(modules(), options)
        if runtime.group is not None:
            runtime.group.calls.same(self._wrapping, fingerprint(self.state))
        runtime.states.add(self.state)
        self.facts = Facts(self.state, number)
        self.gradients = HostGradients(name, self.state, runtime, self.facts)
        self._updates = Updates(name, self.state, runtime)
        self._under_way = UnderWay(self._note_over)

    def _build(self, modules: Sequence[nn.Module], options: HostOptions) -> ModelState:
        check_wrapping = partial(
            self.foresight.check_wrapping,
            options=options,
            in_training_mode=any(module.training for module in modules),
        )
        group = self._runtime.group
        shards = None if group is None else Shards(group.rank, group.size)
        return ModelState(self.name, self._runtime.backend, modules, options, check_wrapping, shards)

    @property
    def _wrapping(self) -> str:
        return f"wrapping model {self.name!r}"

    def check_call(self, tasks: Sequence[Task], activations: int, *, is_measured: bool) -> None:
        """Raise `HostMemoryShort` if what these tasks leave on the host does not fit."""
        additions = self.gradients.additions + self.gradients.added_by(tasks)
        self.foresight.check_call(self.state, additions, activations, is_measured=is_measured)
        self.gradients.additions = additions

    def masters(self) -> Mapping[torch.Tensor, nn.Parameter]:
        """Return the master weight of each trainable parameter."""
        # A step function sees the parameters that existed at its launch.
        if not self._runtime.optimizer.is_current() and self._has_changed():
            self._runtime.launch(partial(self.get_ready, training=False))
        self.state.make_masters()
        return self.state.masters

    def has_trained(self) -> bool:
        """Return whether any parameter of the layers requires grad now."""
        return any(parameter.requires_grad for module in self._modules() for parameter in module.parameters())

    # One model's share of the methods of `WholeModel`

    def begin_consuming(self) -> None:
        """Wait for all work, and drop what is left of earlier calls, before one in which the optimizer steps."""
        self.drain()
        self.raise_late_errors()
        if self.state.failed is None:
            # What a failed call has left that no step has read.
            self.gradients.drop()

    def prepare_step(self, take: Take, *, is_async: bool) -> Part:
        """Take a step's turns."""
        self.gradients.note_stepped()
        return self._updates.prepare(take, is_async=is_async)

    def prepare_consuming(self, take: Take, gradients: Mapping[Block, Ticket]) -> Part:
        """Take the turns of a step during a call, which has taken those on `gradients`."""
        self.gradients.note_stepped()
        return self._updates.prepare(take, is_async=False, gradients=gradients)

    def prepare_capture(self, take: Take) -> Capture:
        """Take a reader's turn of all blocks, after taking over what was written outside."""
        self.raise_late_errors()
        refuse_failed(self.name, self.state)
        self.refresh()
        blocks = {block: take(block.turns, write=False) for block in self.state.blocks}
        gathering = self._updates.gathering
        return Capture(self.state, blocks, has_gradients=bool(self.gradients.additions), gathering=gathering)

    def submit_step(self, job: Callable[[Tracer], None]) -> Outcome[None]:
        """Queue a step's job."""
        return self._updates.submit(job)

    def share_steps(self, other: HostParameters) -> None:
        """Step both models together from now on."""
        self._updates.share(other._updates)
        self.state.is_part = other.state.is_part = True

    def drain(self) -> None:
        """Wait for all steps and tasks launched before."""
        self._updates.wait()
        for line in self.state.lines():
            with own_turn(line, write=True):
                pass

    def publish(self) -> None:
        """Publish the last step's result, if calls do not read it yet, and wait until it is published."""
        group = self._runtime.group if self.state.unpublished else None
        kind = f"publishing the weights of model {self.name!r} (synchronize or the like)"
        with telling(group, kind):
            self.get_ready(training=False)
        if group is not None:
            group.calls.same(kind, self.facts.which)
        self._updates.publish()
        self._updates.wait()
        self.raise_late_errors()

    def show_gradients(self) -> None:
        """Wait for all gradients, then set ``.grad`` on every trainable parameter."""
        self._settle()
        # Runs may have ended only now: raise their errors, and drop the references to them and their memory.
        self.raise_late_errors()
        self.gradients.show()

    def drop_gradients(self) -> None:
        """Wait for all gradients, then drop them."""
        self._settle()
        self.gradients.drop()

    def reset(self) -> None:
        """Drop gradients, pending errors and a failed step's result; keep the published weights."""
        self._settle()
        self._late_errors()
        self.gradients.drop()
        refuse_torn(self.name, self.state)
        self._forget_failed_step()

    def make_current(self) -> None:
        """Wait for all work and publish the last result, so that the caller may write the weights."""
        self.drain()
        self._late_errors()
        if self._runtime.group is not None:
            self._runtime.group.calls.same(f"loading a state into model {self.name!r}", self.facts.which)
        self._updates.publish()
        self._updates.wait()

    def take_over(self) -> None:
        """Update the masters from weights that the caller has written."""
        self.refresh()
        self._forget_failed_step()
        self.state.mixed = self.state.torn = None

    def restored(self, *, is_behind: bool) -> None:
        """Drop gradients and go on from the values that the caller wrote. `is_behind`: see `Captured`."""
        self.gradients.drop()
        for block in self.state.trainable:
            block.complete = {}
        self.state.unpublished = is_behind and bool(self.state.trainable)
        if not self.state.has_results_apart():
            self.state.unpublished = False
        self.state.failed = None
        self.state.mixed = self.state.torn = None
        self.state.version += 1

    def settle_weights(self) -> None:
        """Publish the last step's result, if calls do not read it yet, and wait for all who write weights.

        On several machines wait for the result, without a word to the others: see `results`.
        """
        self.raise_late_errors()
        refuse_mixed(self.name, self.state)
        if self.state.unpublished and self._runtime.group is None:
            self.publish()
        self.results()
        for block in self.state.blocks:
            with own_turn(block.turns, write=False):
                self.state.backend.host_touch(read=block.host_tensors(), what="a state dict")
        # A step that goes on after Ctrl-C may have failed meanwhile.
        refuse_mixed(self.name, self.state)

    def results(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return, on several machines, the last step's result of each parameter if calls do not read it yet.

        Other machines need not ask. Raises `AloneOnly` if this machine does not have it before all publish it.
        """
        gathering = self._updates.gathering
        if gathering is None or not self.state.unpublished:
            return {}
        self._updates.wait()
        self.raise_late_errors()
        if self.state.failed is not None:
            # Calls read the weights of the step before, which are whole.
            return {}
        if self._has_changed():
            raise AloneOnly(
                f"tensors of model {self.name!r} were added, replaced or frozen while a step's result is not "
                "published yet, which all machines do together: call synchronize() on all of them first"
            )
        self.refresh()
        return gathering.results()

    def _forget_failed_step(self) -> None:
        if self.state.failed is not None:
            self.state.failed = None
            self.state.unpublished = False
            self.set_masters(self.state.trainable_tensors())

    # Before a call or a step

    def get_ready(self, *, training: bool) -> None:
        """Raise errors of earlier work, and take over changes made outside the engine.

        `training`: also refuse to continue after a failed step or with incomplete gradients.
        """
        self.raise_late_errors()
        refuse_mixed(self.name, self.state)
        if training:
            refuse_half_made(self.name, self.state)
        self.gradients.collect()
        self.refresh()
        self.state.note_flags()
        if self.state.note_attributes() and self._observer is not None:
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

    def follow(self, work: Launched) -> None:
        """Track this work: if it fails after the launching call has returned, a later call raises its error."""
        self._under_way.follow(work)

    def _late_errors(self) -> list[BaseException]:
        return self._under_way.errors() + self._updates.errors()

    def _note_over(self, work: Launched) -> None:
        if self._observer is not None:
            self._observer.note_over(work)

    def check_version(self, version: int) -> None:
        """Raise `Stale` if weights newer than `version` were published."""
        refuse_stale(self.name, self.state, version)

    def refresh(self) -> None:
        """Take over changes of modules and weights made outside the engine."""
        written = self.state.written_outside()
        changed = self._has_changed()
        if changed:
            self.drain()
            written += self.state.moved_outside()
        if written:
            self._updates.wait()
            self.set_masters(written)
            if self._runtime.group is not None:
                self.facts.note_written(written)
        if changed:
            self._rebuild()
        # An earlier forward read other weights than its backward would.
        self.state.version += changed or bool(written)

    def _rebuild(self) -> None:
        """Rebuild the blocks over the layers' current tensors; nobody may use the old ones."""
        # A parameter that is no longer trained would never receive the last step's result.
        if self._runtime.group is not None and self.state.unpublished:
            kind = f"rebuilding model {self.name!r}, whose tensors changed"
            self._runtime.group.calls.same(kind, self.facts.which)
        self._updates.publish()
        self._updates.wait()
        self._claim.take(self.state.modules)
        self.state.rebuild(lambda groups, _: self.foresight.check_rebuilding(self.state, groups))
        self.gradients.additions.clear()
        if self._observer is not None:
            self._observer.note_rebuilt()

    def _has_changed(self) -> bool:
        self.state.modules = tuple(self._modules())
        return self.state.changed()

    def set_masters(self, tensors: Sequence[torch.Tensor]) -> None:
        """Set the masters of these parameters from their weights."""
        for tensor in tensors:
            self.state.set_master(tensor)
        if self._updates.gathering is not None:
            self._updates.gathering.take_over(tensors)

    def _settle(self) -> None:
        self.drain()
        for lane in self._runtime.lanes:
            lane.settle()


def _refuse_consuming(runtime: Runtime, options: HostOptions) -> None:
    if runtime.group is not None and options.steps_in_backward:
        raise AloneOnly(
            f"step_in_backward=True is for one machine, but there are {runtime.group.size}, which add their "
            "gradients before a step reads them; leave it out"
        )
