"""A whole model between calls, in one or several parts: steps, publication, gradients, reset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from rp_optim.host import HostOptimizer
from rp_optim.jobs import Outcome
from rp_optim.masters import own_grad
from rp_optim.worker import wait_for_steps
from rp_state.block import Block
from rp_state.master import refuse_part
from rp_state.model_state import ModelState
from rp_state.telling.gradients import warn_of_unfrozen
from rp_telemetry.tracing import in_call
from rp_transfer import Ticket
from torch import nn
from torch.optim.optimizer import Optimizer

from rp_engine.engine.host.parameters import HostParameters
from rp_engine.engine.memory.forecast import MemoryForecast
from rp_engine.engine.memory.memory_check import HostMemoryCheck
from rp_engine.engine.memory.report import MemoryReport, memory_report
from rp_engine.engine.memory.second_blocks import agree, decide, decided, want_for_step
from rp_engine.engine.model_read import ModelBetweenSteps, run_model_read
from rp_engine.engine.restoring import Restoring
from rp_engine.errors import RoundPipeError
from rp_engine.optimizer.model_step import ModelStep
from rp_engine.optimizer.optimizer_watch import OptimizerWatch, described, watch_optimizers
from rp_engine.optimizer.steps import note_torn_weights, run_step
from rp_engine.peers.step import SharedStep
from rp_engine.runtime.launcher import wait_until
from rp_engine.runtime.runtime import Runtime
from rp_engine.runtime.tickets import taking_tickets


class WholeModel:
    """The host states of one model: a single one, or one for each part of a model wrapped in parts.

    Each method runs as one body on the runtime's launcher, for all of them. `restoring`: for values that the
    caller writes into weights and masters.
    """

    def __init__(self, name: str, hosts: Sequence[HostParameters], runtime: Runtime) -> None:
        self.name = name
        self.hosts = tuple(hosts)
        self._runtime = runtime
        self.memory_check = HostMemoryCheck(name, runtime)
        self.restoring = Restoring(name, self.hosts, runtime, self.memory_check)
        self._optimizer_watch = OptimizerWatch(self._check_optimizer)
        watch_optimizers()
        # What becomes of the last step that was launched; at first of none, which is over.
        self._step_outcome: Outcome[None] = Outcome(_nothing)
        self._step_outcome.carry_out()
        # Torch's optimizers whose state dicts wait for steps.
        self._guarded: WeakSet[Optimizer] = WeakSet()
        # On several machines: what has stepped in the step function that runs; on the optimizer's thread.
        self._stepped: list[str] = []
        self._divided: WeakSet[Optimizer] = WeakSet()

    def masters(self) -> Mapping[torch.Tensor, nn.Parameter]:
        """Return the master weight of each trainable parameter."""
        self.memory_check.check_training(self.states())
        return {parameter: master for host in self.hosts for parameter, master in host.masters().items()}

    def states(self) -> list[ModelState]:
        """Return the state of each part."""
        return [host.state for host in self.hosts]

    @property
    def steps_in_backward(self) -> bool:
        """Whether optimizers step during training calls."""
        return any(state.options.steps_in_backward for state in self.states())

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients that no step has taken, of calls or put into ``.grad`` by others."""
        return any(
            host.gradients.additions
            or any(own_grad(tensor) is not None for block in host.state.trainable for tensor in block.tensors)
            for host in self.hosts
        )

    def step(self, step_fn: Callable[[], object], *, is_async: bool) -> None:
        """Run a step function on the gradients of all calls so far. `is_async`: return before it has ended."""
        if self.steps_in_backward:
            raise RoundPipeError(
                f"model {self.name!r} was wrapped with step_in_backward=True, so forward_backward(optimizer=...) "
                "has stepped already and no gradients are left to step; leave this step out, or wrap the model "
                "without step_in_backward"
            )
        self._runtime.launch(partial(self._step, step_fn, is_async=is_async))

    def _step(self, step_fn: Callable[[], object], *, is_async: bool) -> None:
        with in_call("step", self.name):
            self.prepare_step(is_async=is_async)
            warn_of_unfrozen(self.name, self.states())
            with taking_tickets() as take:
                parts = [host.prepare_step(take, is_async=is_async) for host in self.hosts]
                is_idle = self._step_outcome.done()
                watched = self._optimizer_watch.launch(self._counting(step_fn), is_async=is_async, is_idle=is_idle)
                body = partial(run_step, self.name, parts, watched, self._shared(parts))
                for host in self.hosts:
                    host.expect_next_call(take)
                self._step_outcome = outcome = self.hosts[0].submit_step(body)
            for part in parts:
                part.note_launched()
            if not is_async:
                wait_until(outcome.wait)
                self.raise_late_errors()

    def submit_consuming(self, optimizer: HostOptimizer, turns: Mapping[Block, Ticket]) -> Outcome[None]:
        """Queue the step of a call that has taken these turns for it."""
        (host,) = self.hosts
        with taking_tickets() as take:
            part = host.prepare_consuming(take, turns)
            watched = self._optimizer_watch.launch(optimizer.step, is_async=False, is_idle=True)
            self._step_outcome = outcome = host.submit_step(
                partial(run_step, self.name, [part], watched, self._shared([part]))
            )
        part.note_launched()
        return outcome

    def prepare_step(self, *, is_async: bool) -> None:
        """Take over changes from outside and decide about second blocks, on all machines alike.

        Raises if the model cannot be stepped.
        """
        peers, kind = self._runtime.peers, f"a step of model {self.name!r}"
        with peers.telling(kind):
            for host in self.hosts:
                host.get_ready(training=True)
            decide(
                self.memory_check,
                self.states(),
                self._for_each(lambda host: want_for_step(host.name, host.state, is_async=is_async)),
            )
        agree(self.states(), peers.agree(kind, lambda: self._facts(is_async=is_async), decided(self.states())))

    def _facts(self, *, is_async: bool) -> dict[str, Any]:
        facts = [host.shared.now() for host in self.hosts]
        return {"is_async": is_async, **{key: [each[key] for each in facts] for key in facts[0]}}

    def _shared(self, parts: Sequence[ModelStep]) -> SharedStep:
        gradients = [each for part in parts for each in part.arriving.values()]
        return self._runtime.peers.step(gradients, self._take_stepped)

    def _counting(self, step_fn: Callable[[], object]) -> Callable[[], object]:
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
        self.memory_check.check_step(self.states(), optimizer)
        if optimizer not in self._guarded and not isinstance(optimizer, HostOptimizer):
            self._guarded.add(optimizer)
            optimizer.register_state_dict_pre_hook(_wait_for_steps)
            optimizer.register_load_state_dict_pre_hook(_wait_for_steps)
        if not self._runtime.peers.is_alone:
            self._note_divided(optimizer)

    def _note_divided(self, optimizer: Optimizer) -> None:
        places = {
            id(master): place
            for place, master in enumerate(master for state in self.states() for master in state.masters.values())
        }
        self._stepped.append(described(optimizer, places))
        if optimizer not in self._divided:
            self._divided.add(optimizer)
            optimizer.register_state_dict_pre_hook(refuse_part)

    def synchronize(self) -> None:
        """Wait for all work, publish the last step's result, and set ``.grad`` on the parameters."""
        self._runtime.launch(self._synchronize)

    def _synchronize(self) -> None:
        with in_call("synchronize", self.name):
            for host in self.hosts:
                host.drain()
                host.publish()
            for host in self.hosts:
                host.show_gradients()
            self._optimizer_watch.settle()

    def sync_optim_param(self) -> None:
        """Publish the last step's result and wait for it.

        Inside a step function of this model it does nothing: the results of earlier steps are published already.
        """
        if self._runtime.optimizer.is_current() and all(host.state.is_stepping for host in self.hosts):
            return
        self._runtime.launch(self._sync_optim_param)

    def _sync_optim_param(self) -> None:
        with in_call("sync_optim_param", self.name):
            for host in self.hosts:
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
        """Return what the parameters lack of the last step, on several machines; call `settle_weights` first."""
        if self._runtime.peers.is_alone or not self.is_behind():
            return {}
        return self._runtime.visit(lambda: dict(item for host in self.hosts for item in host.results().items()))

    def capture(
        self, read: Callable[[Callable[[], ModelBetweenSteps]], None], note: Callable[[Outcome[None]], None]
    ) -> Outcome[None]:
        """Queue a reader of the whole model after the steps launched so far; the next step waits for it.

        `read`: see `run_model_read`; called once, and must not raise. `note`: called with the result on the
        launcher, which Ctrl-C does not enter. A call of another thread is waited for.
        """
        return self._runtime.visit(partial(self._capture, read, note))

    def _capture(
        self, read: Callable[[Callable[[], ModelBetweenSteps]], None], note: Callable[[Outcome[None]], None]
    ) -> Outcome[None]:
        with in_call("checkpoint", self.name), taking_tickets() as take:
            model_reads = [host.prepare_model_read(take) for host in self.hosts]
            queued = self.hosts[0].submit_read(partial(run_model_read, self.name, model_reads, read))
            note(queued)
            return queued

    def is_behind(self) -> bool:
        """Return whether a step's result is not published yet; False inside a step function."""
        if self._runtime.optimizer.is_current():
            return False
        return any(host.state.unpublished for host in self.hosts)

    def weights_delay(self) -> int:
        """Return how many steps launched before the last call it does not read the results of."""
        return self.hosts[0].read_delay

    def memory_report(self, optimizers: Sequence[object]) -> MemoryReport:
        """Measure the memory that the model uses now."""
        self._runtime.refuse_forked()
        foreseen = [host.predicted_bytes for host in self.hosts]
        predicted = max((nbytes for nbytes in foreseen if nbytes is not None), default=None)
        return memory_report(self._runtime, self.states(), optimizers, predicted)

    def memory_forecast(self, optimizers: Sequence[Optimizer], additions: int) -> MemoryForecast:
        """Foresee the host memory that training the model takes."""
        self._runtime.refuse_forked()
        return self.memory_check.forecast(self.states(), optimizers, additions=additions)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._runtime.launch(self._for_each(lambda host: host.drop_gradients()))

    def reset(self) -> None:
        """Drop gradients, pending errors and a failed step's result; keep the published weights."""
        self._runtime.launch(self._for_each(lambda host: host.reset()))

    def _for_each(self, do: Callable[[HostParameters], None]) -> Callable[[], None]:
        def do_all() -> None:
            for host in self.hosts:
                do(host)

        return do_all

    def raise_late_errors(self) -> None:
        """Raise errors of steps and calls that have ended."""
        try:
            for host in self.hosts:
                host.raise_late_errors()
        except BaseException as error:
            # That of a call may have ended a step which was under way.
            self.note_torn_weights(error)
            raise

    def note_torn_weights(self, error: BaseException) -> None:
        """Say on an error what a step has left of its update in weights that calls read."""
        for host in self.hosts:
            if not host.state.health.has_whole_weights:
                note_torn_weights(host.name, error)


def _nothing() -> None:
    """No step."""


def _wait_for_steps(*_: object) -> None:
    """A hook of torch's optimizers. Ours wait without one."""
    wait_for_steps()
