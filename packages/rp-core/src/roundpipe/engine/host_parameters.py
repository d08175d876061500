"""One model's host state between calls: weights, gradients, master weights, steps and late errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

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
from roundpipe.engine.foresight import Foresight
from roundpipe.engine.shared_call import checksum, fingerprint, telling
from roundpipe.errors import (
    AloneOnly,
    RoundPipeError,
    add_note,
    in_words,
)
from roundpipe.optimizer.step_part import Part
from roundpipe.optimizer.updates import Updates
from roundpipe.runtime.runtime import Runtime
from roundpipe.runtime.tickets import Take, own_turn
from roundpipe.state.block import Block
from roundpipe.state.grad_attribute import Exposure
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
    """One model's parameters on the host.

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
        check_wrapping = partial(
            self.foresight.check_wrapping,
            options=options,
            in_training_mode=any(module.training for module in modules()),
        )
        group = runtime.group
        if group is not None and options.steps_in_backward:
            raise AloneOnly(
                f"step_in_backward=True is for one machine, but there are {group.size}, which add their gradients "
                "before a step reads them; leave it out"
            )
        shards = None if group is None else Shards(group.rank, group.size)
        # Names may be the same: those of models that are wrapped in a loop are.
        self._number = 0 if group is None else group.new_model()
        # On several machines: tells the values that code outside has written from others.
        self._written = 0
        with telling(group, self._wrapping):
            self.state = ModelState(name, runtime.backend, modules(), options, check_wrapping, shards)
        if group is not None:
            group.calls.same(self._wrapping, fingerprint(self.state))
        runtime.states.add(self.state)
        self._updates = Updates(name, self.state, runtime)
        self._exposure = Exposure()
        # How many tasks launched since the last step add to a block's gradients.
        self._additions: Counter[Block] = Counter()
        self._under_way = UnderWay(self._note_over)
        # On several machines, since the last step: the parameters whose ``.grad`` from outside was collected.
        self._collected: set[str] = set()
        # Likewise: steps, and what `_num_events` was when gradients were last dropped outside of step functions.
        self._num_steps = self._dropped_at = 0

    @property
    def _num_events(self) -> int:
        """Calls and steps so far: what may add to gradients, and what may leave some."""
        return self.state.num_runs + self._num_steps

    @property
    def _wrapping(self) -> str:
        return f"wrapping model {self.name!r}"

    def facts(self) -> dict[str, Any]:
        """What must be the same on all machines whenever the model is called or stepped."""
        return {
            **self._which,
            "trained parameters": self.state.digest,
            "training mode of the layers": checksum(self.state.flags),
            "version of the weights": self.state.version,
            "what was written to weights and buffers": self._note_fixed_written(),
            "whether a step's result is not published yet": self.state.unpublished,
            "gradients from code outside of the engine": sorted(self._collected),
            "calls and steps since gradients were dropped outside of step functions": self._num_events
            - self._dropped_at,
        }

    @property
    def _which(self) -> dict[str, Any]:
        return {"the model's number in the order of wrapping": self._number}

    def _note_fixed_written(self) -> int:
        """Note what code outside has written to frozen weights and buffers; return what tells all its writes."""
        for block in self.state.blocks:
            if block.kind != "trainable" and (changed := block.changed_outside()):
                self._written = checksum([changed, [block.tensors[index] for index in changed]], self._written)
        return self._written

    def check_call(self, tasks: Sequence[Task], activations: int, *, is_measured: bool) -> None:
        """Raise `HostMemoryShort` if what these tasks leave on the host does not fit."""
        additions = self._additions + Counter(
            block for task in tasks if task.adds_gradients for block in self._trained_in(task.layers)
        )
        self.foresight.check_call(self.state, additions, activations, is_measured=is_measured)
        self._additions = additions

    def _trained_in(self, layers: range) -> set[Block]:
        blocks = {block for layer in layers for block in self.state.layers[layer].blocks}
        return {block for block in blocks if block.kind == "trainable"}

    def masters(self) -> Mapping[torch.Tensor, nn.Parameter]:
        """The master weight of each trainable parameter."""
        # A step function sees the parameters that existed at its launch.
        if not self._runtime.optimizer.is_current() and self._has_changed():
            self._runtime.launch(partial(self.get_ready, training=False))
        self.state.make_masters()
        return self.state.masters

    def has_trained(self) -> bool:
        """Whether any parameter of the layers requires grad now."""
        return any(parameter.requires_grad for module in self._modules() for parameter in module.parameters())

    # One model's share of the methods of `Joint`

    def begin_consuming(self) -> None:
        """Wait for all work, and drop what is left of earlier calls, before one in which the optimizer steps."""
        self.drain()
        self.raise_late_errors()
        if self.state.failed is None:
            # What a failed call has left that no step has read.
            self._drop_gradients()

    def keep_divided_apart(self, tasks: Sequence[Task]) -> None:
        """Where the optimizer steps in this call: what several of its tasks add to needs memory of its own."""
        added = Counter(block for task in tasks if task.adds_gradients for block in self._trained_in(task.layers))
        if self.state.options.steps_in_backward:
            self.state.keep_apart(block for block, count in added.items() if count > 1)

    def prepare_step(self, take: Take, *, is_async: bool) -> Part:
        """Take a step's turns."""
        self._note_stepped()
        return self._updates.prepare(take, is_async=is_async)

    def prepare_consuming(self, take: Take, gradients: Mapping[Block, Ticket]) -> Part:
        """Take the turns of a step during a call, which has taken those on `gradients`."""
        self._note_stepped()
        return self._updates.prepare(take, is_async=False, gradients=gradients)

    def _note_stepped(self) -> None:
        self._additions.clear()
        self._collected.clear()
        self._num_steps += 1

    def decide_second_blocks(self, *, is_async: bool) -> None:
        """With masters in halves, an asynchronous step needs second blocks; a synchronous one does without.

        Raises `ValueError` if it cannot have them.
        """
        if not is_async or not self.state.trains_halves():
            return
        if self.state.double_buffer is False or any(block.memory is None for block in self.state.trainable):
            raise ValueError(
                f'an asynchronous step of model {self.name!r} needs second weight blocks with master="split", '
                "since calls still read the weights that it would overwrite, but "
                + (
                    "double_buffer is False"
                    if self.state.double_buffer is False
                    else f"pin_model is {self.state.options.pin!r}, which has none"
                )
                + '; take synchronous steps (is_async=False), change that setting, or wrap with master="whole"'
            )
        self.state.double_buffer = True

    def prepare_capture(self, take: Take) -> Capture:
        """Take a reader's turn of all blocks, after taking over what was written outside."""
        self.raise_late_errors()
        refuse_failed(self.name, self.state)
        self._refresh()
        blocks = {block: take(block.turns, write=False) for block in self.state.blocks}
        gathering = self._updates.gathering
        return Capture(self.state, blocks, has_gradients=bool(self._additions), gathering=gathering)

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
            group.calls.same(kind, self._which)
        self._updates.publish()
        self._updates.wait()
        self.raise_late_errors()

    def show_gradients(self) -> None:
        """Wait for all gradients, then set ``.grad`` on every trainable parameter."""
        self._settle()
        # Runs may have ended only now: raise their errors, and drop the references to them and their memory.
        self.raise_late_errors()
        # With several machines these are parts of sums that their owners have.
        if self.state.broken is None and self._runtime.group is None and not self.state.options.steps_in_backward:
            self._exposure.show(self.state.trainable)

    def drop_gradients(self) -> None:
        """Wait for all gradients, then drop them."""
        self._settle()
        self._drop_gradients()

    def reset(self) -> None:
        """Drop gradients, pending errors and a failed step's result; keep the published weights."""
        self._settle()
        self._late_errors()
        self._drop_gradients()
        refuse_torn(self.name, self.state)
        self._forget_failed_step()

    def make_current(self) -> None:
        """Wait for all work and publish the last result, so that the caller may write the weights."""
        self.drain()
        self._late_errors()
        if self._runtime.group is not None:
            self._runtime.group.calls.same(f"loading a state into model {self.name!r}", self._which)
        self._updates.publish()
        self._updates.wait()

    def take_over(self) -> None:
        """Update the masters from weights that the caller has written."""
        self._refresh()
        self._forget_failed_step()
        self.state.mixed = self.state.torn = None

    def replaced(self, parameters: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Give replaced parameters the masters of the old ones; call it before `take_over`.

        `parameters`: the new parameter for each old one.
        """
        for old, new in parameters.items():
            if new is not old and (master := self.state.masters.pop(old, None)) is not None:
                self.state.masters[new] = master
            if new is not old and self.state.shards is not None:
                self.state.shards.replace(old, new)
        self._masters_from_weights(list(parameters.values()))

    def decide_restoring(self, *, is_behind: bool) -> None:
        """Decide whether a checkpoint is loaded into second blocks. `is_behind`: see `Captured`.

        Halves of masters whose result calls do not read yet go there, unless second blocks are not wanted.
        """
        self._refresh()
        if is_behind and self.state.may_be_behind():
            self.state.double_buffer = True

    def begin_restoring(self, *, is_behind: bool) -> None:
        """Make the masters and second blocks that a checkpoint is loaded into; nothing is overwritten yet."""
        self.state.make_masters()
        if is_behind and self.state.may_be_behind():
            self.state.make_backs()

    def refuse_until_restored(self, *, is_behind: bool) -> None:
        """From now on the caller writes weights and masters; until `restored` the model refuses to train."""
        self.state.failed = "a checkpoint was loaded only in part"
        self.state.place_halves(behind=is_behind)

    def restored(self, *, is_behind: bool) -> None:
        """Drop gradients and go on from the values that the caller wrote. `is_behind`: see `Captured`."""
        self._drop_gradients()
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
        """On several machines, the last step's result of each parameter if calls do not read it yet.

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
        self._refresh()
        return gathering.results()

    def _forget_failed_step(self) -> None:
        if self.state.failed is not None:
            self.state.failed = None
            self.state.unpublished = False
            self._masters_from_weights(self.state.trainable_tensors())

    # Before a call or a step

    def get_ready(self, *, training: bool) -> None:
        """Raise errors of earlier work, and take over changes made outside the engine.

        `training`: also refuse to continue after a failed step or with incomplete gradients.
        """
        self.raise_late_errors()
        refuse_mixed(self.name, self.state)
        if training:
            refuse_half_made(self.name, self.state)
        self._exposure.take_back()
        self._collect_gradients()
        self._refresh()
        self.state.note_flags()
        if self.state.note_attributes() and self._observer is not None:
            self._observer.note_altered()

    def note_read(self) -> None:
        """Record which step's weights the call that is launched now reads; call it after `get_ready`."""
        self.read_delay = int(self.state.unpublished)

    def raise_late_errors(self) -> None:
        """Raise the errors of work that has ended since the last call of this."""
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

    def _collect_gradients(self) -> None:
        # Gradients that code outside the engine, such as a penalty on the weights, put on the model's parameters.
        for block in self.state.trainable:
            found = [index for index, tensor in enumerate(block.tensors) if tensor.grad is not None]
            if found and self.state.options.steps_in_backward:
                raise RoundPipeError(
                    f"a parameter of {block} of model {self.name!r} has a .grad from code outside of the "
                    "engine, but with step_in_backward=True gradients are consumed as they arrive, and nothing "
                    "can be added to them; set it to None, or wrap the model without step_in_backward"
                )
            if found and self._runtime.group is not None:
                # All machines have computed the same: it counts once.
                self._collected.update(f"{index} of {block}" for index in found)
                if self._runtime.group.rank:
                    for index in found:
                        block.tensors[index].grad = None
                    continue
            if found and block.gradient is not None:
                with own_turn(block.gradient.turns, write=True):
                    block.gradient.collect(found, block.tensors)

    def _refresh(self) -> None:
        written = self.state.written_outside()
        changed = self._has_changed()
        if changed:
            self.drain()
            written += self.state.moved_outside()
        if written:
            self._updates.wait()
            self._masters_from_weights(written)
            if self._runtime.group is not None:
                self._written = checksum(written, self._written)
        if changed:
            # A parameter that is no longer trained would never receive the last step's result.
            if self._runtime.group is not None and self.state.unpublished:
                self._runtime.group.calls.same(
                    f"rebuilding model {self.name!r}, whose tensors changed", self._which
                )
            self._updates.publish()
            self._updates.wait()
            self._claim.take(self.state.modules)
            self.state.rebuild(partial(self.foresight.check_rebuilding, self.state))
            self._additions.clear()
            if self._observer is not None:
                self._observer.note_rebuilt()
        # An earlier forward read other weights than its backward would.
        self.state.version += changed or bool(written)

    def _has_changed(self) -> bool:
        self.state.modules = tuple(self._modules())
        return self.state.changed()

    def _masters_from_weights(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self.state.set_master(tensor)
        if self._updates.gathering is not None:
            self._updates.gathering.take_over(tensors)

    def _settle(self) -> None:
        self.drain()
        for lane in self._runtime.lanes:
            lane.settle()

    def _drop_gradients(self) -> None:
        self._additions.clear()
        self._collected.clear()
        self.state.stepped_runs = self.state.num_runs
        self._dropped_at = self._num_events
        self._exposure.take_back()
        self.state.broken = None
        for block in self.state.trainable:
            if block.gradient is not None:
                block.gradient.drop()
