"""Operations on a whole model between calls, over one or several engines: steps, publication, gradients, reset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from weakref import WeakSet

import torch
from rp_optim.host import HostOptimizer
from rp_optim.jobs import Outcome
from rp_optim.worker import wait_for_steps
from rp_transfer import Ticket
from torch import nn
from torch.optim.optimizer import Optimizer

from roundpipe.engine.capture import Captured, Held, held_by, run_capture
from roundpipe.engine.forecast import MemoryForecast
from roundpipe.engine.foresight import Foresight
from roundpipe.engine.host_parameters import HostParameters
from roundpipe.engine.memory_report import MemoryReport, memory_report
from roundpipe.engine.shared_call import telling
from roundpipe.errors import RoundPipeError, add_note
from roundpipe.optimizer.shared_step import SharedStep
from roundpipe.optimizer.step_part import Part
from roundpipe.optimizer.steps import run_step, say_torn
from roundpipe.optimizer.watched import Watched, described, tell_thawed, watch_optimizers
from roundpipe.runtime.launcher import wait_until
from roundpipe.runtime.machines import check_same
from roundpipe.runtime.runtime import Runtime
from roundpipe.runtime.tickets import taking
from roundpipe.state.block import Block
from roundpipe.state.master import refuse_part
from roundpipe.state.model_state import ModelState
from roundpipe.telemetry.tracing import in_call


class Joint:
    """The host states of one model: a single one, or one for each part of a model wrapped in parts.

    Each method runs as one body on the runtime's launcher, for all of them.
    """

    def __init__(self, name: str, hosts: Sequence[HostParameters], runtime: Runtime) -> None:
        self._name = name
        self._hosts = tuple(hosts)
        self._runtime = runtime
        self._foresight = Foresight(name, runtime)
        self._watched = Watched(self._check_optimizer)
        watch_optimizers()
        # Of the last step.
        self._step_outcome: Outcome[None] | None = None
        # Torch's optimizers whose state dicts wait for steps.
        self._guarded: WeakSet[Optimizer] = WeakSet()
        # On several machines: what has stepped in the step function that runs; on the optimizer's thread.
        self._stepped: list[str] = []
        self._divided: WeakSet[Optimizer] = WeakSet()

    def masters(self) -> Mapping[torch.Tensor, nn.Parameter]:
        """The master weight of each trainable parameter."""
        self._foresight.check_training(self._states())
        return {parameter: master for host in self._hosts for parameter, master in host.masters().items()}

    def _states(self) -> list[ModelState]:
        return [host.state for host in self._hosts]

    @property
    def steps_in_backward(self) -> bool:
        """Whether optimizers step during training calls."""
        return any(state.options.steps_in_backward for state in self._states())

    def step(self, step_fn: Callable[[], object], *, is_async: bool) -> None:
        """Run a step function on the gradients of all calls so far. `is_async`: return before it has ended."""
        if self.steps_in_backward:
            raise RoundPipeError(
                f"model {self._name!r} was wrapped with step_in_backward=True, so forward_backward(optimizer=...) "
                "has stepped already and no gradients are left to step; leave this step out, or wrap the model "
                "without step_in_backward"
            )
        self._runtime.launch(partial(self._step, step_fn, is_async=is_async))

    def _step(self, step_fn: Callable[[], object], *, is_async: bool) -> None:
        with in_call("step", self._name):
            self._prepare_step(is_async=is_async)
            tell_thawed(self._name, self._states())
            with taking() as take:
                parts = [host.prepare_step(take, is_async=is_async) for host in self._hosts]
                is_idle = self._step_outcome is None or self._step_outcome.done()
                watched = self._watched.launch(self._counted(step_fn), is_async=is_async, is_idle=is_idle)
                self._step_outcome = outcome = self._hosts[0].submit_step(
                    partial(run_step, self._name, parts, watched, shared=self._shared(parts))
                )
            for part in parts:
                part.note_launched()
            if not is_async:
                wait_until(outcome.wait)
                self._raise_late_errors()

    def step_during(self, optimizer: object) -> StepDuring:
        """The step of an optimizer during the next training call. Raises `TypeError` for one that cannot."""
        if not isinstance(optimizer, HostOptimizer):
            raise TypeError(
                "an optimizer that steps during backward must be one of roundpipe.optim, which update parameters "
                f"as gradients arrive, but is a {type(optimizer).__name__} instead"
            )
        return StepDuring(self, optimizer)

    def begin_consuming(self, optimizer: HostOptimizer) -> None:
        """Make all that the optimizer's step during the next call takes; calls then read the latest weights."""
        for host in self._hosts:
            host.begin_consuming()
        self._prepare_step(is_async=False)
        for host, state in zip(self._hosts, self._states(), strict=True):
            # A step that published the last result would wait for tasks that wait for this step.
            if state.unpublished:
                host.publish()
            state.make_masters()
            state.make_backs()
        _refuse_left_out(self._name, self._states(), optimizer)
        self._foresight.check_step(self._states(), optimizer)

    def submit_consuming(self, optimizer: HostOptimizer, turns: Mapping[Block, Ticket]) -> Outcome[None]:
        """Queue the step of a call that has taken these turns for it."""
        (host,) = self._hosts
        with taking() as take:
            part = host.prepare_consuming(take, turns)
            watched = self._watched.launch(optimizer.step, is_async=False, is_idle=True)
            self._step_outcome = outcome = host.submit_step(partial(run_step, self._name, [part], watched))
        part.note_launched()
        return outcome

    def raise_late_errors(self) -> None:
        """Raise errors of steps and calls that have ended."""
        self._raise_late_errors()

    def note_ended(self, error: BaseException) -> None:
        """Say on the error of a call what the step during it, which has ended, has left of its update."""
        self._say_torn(error)
        for host in self._hosts:
            if host.state.failed is not None and host.state.torn is None:
                add_note(
                    error,
                    f"RoundPipe: the step of this call has ended half-way; the weights of model {host.name!r} are "
                    "those before it: go back to them with reset(), or load a state",
                )

    def _say_torn(self, error: BaseException) -> None:
        for host in self._hosts:
            if host.state.torn is not None:
                say_torn(host.name, error)

    def _prepare_step(self, *, is_async: bool) -> None:
        group, kind = self._runtime.group, f"a step of model {self._name!r}"
        with telling(group, kind):
            for host in self._hosts:
                host.get_ready(training=True)
            self._check_second_blocks(lambda host: host.decide_second_blocks(is_async=is_async))
        if group is not None:
            facts = [host.facts() for host in self._hosts]
            shared = {"is_async": is_async, **{key: [each[key] for each in facts] for key in facts[0]}}
            told = group.calls.say(kind, [shared, [state.double_buffer for state in self._states()]])
            check_same(kind, [each for each, _ in told])
            # Machines may differ in memory, and so in what they have decided by default.
            for state, *has_room in zip(self._states(), *(each for _, each in told), strict=True):
                # With masters in halves nothing is decided before the first asynchronous step.
                if None not in has_room:
                    state.double_buffer = all(has_room)

    def _check_second_blocks(self, decide: Callable[[HostParameters], None]) -> None:
        decided = [state.double_buffer for state in self._states()]
        try:
            self._for_each(decide)()
            self._foresight.check_training(self._states())
        except BaseException:
            # Synchronous steps may fit still.
            for state, before in zip(self._states(), decided, strict=True):
                state.double_buffer = before
            raise

    def _shared(self, parts: Sequence[Part]) -> SharedStep | None:
        group = self._runtime.group
        if group is None:
            return None
        return SharedStep(group, [each for part in parts for each in part.reduced()], self._take_stepped)

    def _counted(self, step_fn: Callable[[], object]) -> Callable[[], object]:
        if self._runtime.group is None:
            return step_fn

        def run() -> None:
            # Left over from a step that failed.
            self._take_stepped()
            step_fn()

        return run

    def _take_stepped(self) -> list[str]:
        stepped, self._stepped = self._stepped, []
        return stepped

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        """Check an optimizer that is about to step; from now on its state dicts are of one step."""
        # Before it makes its state.
        self._foresight.check_step(self._states(), optimizer)
        if optimizer not in self._guarded and not isinstance(optimizer, HostOptimizer):
            self._guarded.add(optimizer)
            optimizer.register_state_dict_pre_hook(_wait_for_steps)
            optimizer.register_load_state_dict_pre_hook(_wait_for_steps)
        if self._runtime.group is not None:
            self._note_divided(optimizer)

    def _note_divided(self, optimizer: Optimizer) -> None:
        places = {
            id(master): place
            for place, master in enumerate(master for state in self._states() for master in state.masters.values())
        }
        self._stepped.append(described(optimizer, places))
        if optimizer not in self._divided:
            self._divided.add(optimizer)
            optimizer.register_state_dict_pre_hook(refuse_part)

    def synchronize(self) -> None:
        """Wait for all work, publish the last step's result, and set ``.grad`` on the parameters."""
        self._runtime.launch(self._synchronize)

    def _synchronize(self) -> None:
        with in_call("synchronize", self._name):
            for host in self._hosts:
                host.drain()
                host.publish()
            for host in self._hosts:
                host.show_gradients()
            self._watched.settle()

    def sync_optim_param(self) -> None:
        """Publish the last step's result and wait for it.

        Inside a step function of this model it does nothing: the results of earlier steps are published already.
        """
        if self._runtime.optimizer.is_current() and all(host.state.is_stepping for host in self._hosts):
            return
        self._runtime.launch(self._sync_optim_param)

    def _sync_optim_param(self) -> None:
        with in_call("sync_optim_param", self._name):
            for host in self._hosts:
                host.raise_late_errors()
                # A model with nothing to publish keeps ``.grad`` set for code outside.
                if host.state.unpublished:
                    host.publish()

    def settle_weights(self) -> None:
        """Publish the last step's result, and wait for all who write weights or buffers, from any thread.

        On several machines nothing is published, so that one may read alone: see `results`.

        Inside a step function of this model it does nothing, see `sync_optim_param`. Where nothing can be waited
        for, inside layers and in forked processes, it does nothing unless there is something to publish.
        """
        if not (self._runtime.may_wait() or self.is_behind()):
            return
        self._runtime.visit(self._for_each(lambda host: host.settle_weights()))

    def results(self) -> Mapping[torch.Tensor, torch.Tensor]:
        """On several machines, what the parameters lack of the last step; call it after `settle_weights`."""
        if self._runtime.group is None or not self.is_behind():
            return {}
        return self._runtime.visit(lambda: dict(item for host in self._hosts for item in host.results().items()))

    def capture(self, read: Callable[[Callable[[], Captured]], None]) -> Outcome[None]:
        """Queue a reader of the whole model after the steps launched so far; the next step waits for it.

        `read`: see `run_capture`; called once, and must not raise. A call of another thread is waited for.
        """
        return self._runtime.visit(partial(self._capture, read))

    def _capture(self, read: Callable[[Callable[[], Captured]], None]) -> Outcome[None]:
        with in_call("checkpoint", self._name), taking() as take:
            captures = [host.prepare_capture(take) for host in self._hosts]
            return self._hosts[0].submit_step(partial(run_capture, self._name, captures, read))

    def is_behind(self) -> bool:
        """Whether a step's result is not published yet; inside a step function there is nothing to publish."""
        if self._runtime.optimizer.is_current():
            return False
        return any(host.state.unpublished for host in self._hosts)

    def weights_delay(self) -> int:
        """Steps launched before the last call whose results it does not read."""
        return self._hosts[0].read_delay

    def memory_report(self, optimizers: Sequence[object]) -> MemoryReport:
        """Measure the memory that the model uses now."""
        self._runtime.refuse_forked()
        foreseen = [host.predicted_bytes for host in self._hosts]
        predicted = max((nbytes for nbytes in foreseen if nbytes is not None), default=None)
        return memory_report(self._runtime, self._states(), optimizers, predicted)

    def memory_forecast(self, optimizers: Sequence[Optimizer], additions: int) -> MemoryForecast:
        """Foresee the host memory that training the model takes."""
        self._runtime.refuse_forked()
        return self._foresight.forecast(self._states(), optimizers, additions=additions)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._runtime.launch(self._for_each(lambda host: host.drop_gradients()))

    def reset(self) -> None:
        """Drop gradients, pending errors and a failed step's result; keep the published weights."""
        self._runtime.launch(self._for_each(lambda host: host.reset()))

    # Call these inside `Runtime.launching`, which the caller holds while it writes the weights

    def make_current(self) -> None:
        """Wait for all work and publish the last result, so that the caller may write the weights."""
        self._runtime.carry_out(self._for_each(lambda host: host.make_current()))

    def take_over(self) -> None:
        """Update the masters from weights that the caller has written."""
        self._runtime.carry_out(self._for_each(lambda host: host.take_over()))

    def replaced(self, parameters: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Give replaced parameters the masters of the old ones; call it before `take_over`.

        `parameters`: the new parameter for each old one.
        """
        self._runtime.carry_out(self._for_each(lambda host: host.replaced(parameters)))

    def begin_restoring(self, *, is_behind: bool) -> tuple[Held, ...]:
        """Wait for all work; return the places that the caller loads a checkpoint into, see `restored`.

        Raises `HostMemoryShort` if the masters and second blocks that this takes do not fit.
        """
        self.make_current()
        self._runtime.carry_out(partial(self._begin_restoring, is_behind=is_behind))
        return tuple(held_by(self._states()))

    def _begin_restoring(self, *, is_behind: bool) -> None:
        group, kind = self._runtime.group, f"room for a checkpoint in model {self._name!r}"
        with telling(group, kind):
            self._check_second_blocks(lambda host: host.decide_restoring(is_behind=is_behind))
            self._for_each(lambda host: host.begin_restoring(is_behind=is_behind))()
        if group is not None:
            group.calls.same(kind, {"is_behind": is_behind})

    def refuse_until_restored(self, *, is_behind: bool) -> None:
        """From now on the caller writes weights and masters; until `restored` the model refuses to train."""
        self._runtime.carry_out(self._for_each(lambda host: host.refuse_until_restored(is_behind=is_behind)))

    def restored(self, *, is_behind: bool) -> None:
        """Go on from the weights and masters that the caller has written. `is_behind`: see `Captured`."""
        self._runtime.carry_out(self._for_each(lambda host: host.restored(is_behind=is_behind)))

    def _for_each(self, do: Callable[[HostParameters], None]) -> Callable[[], None]:
        def do_all() -> None:
            for host in self._hosts:
                do(host)

        return do_all

    def _raise_late_errors(self) -> None:
        try:
            for host in self._hosts:
                host.raise_late_errors()
        except BaseException as error:
            # That of a call may have ended a step which was under way.
            self._say_torn(error)
            raise


class StepDuring:
    """An optimizer's step during a training call; see `roundpipe.engine.engine.CallStep`."""

    def __init__(self, joint: Joint, optimizer: HostOptimizer) -> None:
        self._joint = joint
        self._optimizer = optimizer
        self._outcome: Outcome[None] | None = None

    def prepare(self) -> None:
        """Make all that the step takes, and refuse what it cannot do, before the call is launched."""
        self._joint.begin_consuming(self._optimizer)

    def launch(self, turns: Mapping[Block, Ticket]) -> None:
        """Queue the step, right after the call's tasks. `turns`: see `Run.step_turns`."""
        try:
            self._outcome = self._joint.submit_consuming(self._optimizer, turns)
        except BaseException:
            for ticket in turns.values():
                ticket.leave()
            raise

    def finish(self) -> None:
        """Wait for the step. Raises its error."""
        if self._outcome is not None:
            wait_until(self._outcome.wait)
        self._joint.raise_late_errors()

    def explain(self, error: BaseException, *, is_over: bool) -> None:
        """Say on the call's error what has become of the weights. `is_over`: the step ends by itself."""
        if self._outcome is not None and (is_over or self._outcome.done()):
            self._outcome.wait()
            self._joint.note_ended(error)


def _refuse_left_out(name: str, states: Sequence[ModelState], optimizer: HostOptimizer) -> None:
    stepped = {id(one) for group in optimizer.param_groups for one in group["params"]}
    masters = {id(state.masters[tensor]) for state in states for tensor in state.trainable_tensors()}
    if left_out := len(masters - stepped):
        raise ValueError(
            f"{left_out} of the {len(masters)} trained parameters of model {name!r} are not the optimizer's, and "
            "with step_in_backward=True their gradients would be lost: freeze them, or make the optimizer over "
            "all of model.optim_parameters()"
        )


def _wait_for_steps(*_: object) -> None:
    """A hook of torch's optimizers. Ours wait without one."""
    wait_for_steps()
