"""An optimizer's step during a training call, which takes the gradients as they arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rp_optim.host import HostOptimizer
from rp_optim.jobs import Outcome
from rp_state.block import Block
from rp_state.model_state import ModelState
from rp_transfer import Ticket

from rp_engine.engine.whole_model import WholeModel
from rp_engine.errors import add_note
from rp_engine.runtime.launcher import wait_until


class NoStep:
    """Of a training call that leaves its gradients to a later step: it does nothing about one."""

    def prepare(self) -> None:
        """Before the call is launched."""

    def launch(self, turns: Mapping[Block, Ticket]) -> None:
        """Right after it."""

    def finish(self) -> None:
        """At its end."""

    def explain(self, error: BaseException, *, is_over: bool) -> None:
        """Where it has failed."""


NO_STEP = NoStep()


class StepDuring(NoStep):
    """The step of an optimizer during the next training call of a model.

    Raises `TypeError` for an optimizer that cannot.
    """

    def __init__(self, whole: WholeModel, optimizer: object) -> None:
        if not isinstance(optimizer, HostOptimizer):
            raise TypeError(
                "an optimizer that steps during backward must be one of roundpipe.optim, which update parameters "
                f"as gradients arrive, but is a {type(optimizer).__name__} instead"
            )
        self._whole = whole
        self._optimizer = optimizer
        # The step, once it is launched.
        self._launched: list[Outcome[None]] = []

    @classmethod
    def wanted(cls, whole: WholeModel, optimizer: object) -> NoStep:
        """Return the step of this optimizer in the next call: none if gradients are kept, or are of inputs alone.

        Raises `ValueError` if there is an optimizer but gradients are kept, or the other way round.
        """
        if not whole.steps_in_backward:
            if optimizer is not None:
                raise ValueError(
                    f"forward_backward was given an optimizer, but model {whole.name!r} keeps its gradients: wrap "
                    "it with step_in_backward=True, or call model.step(...) after forward_backward"
                )
            return NO_STEP
        if optimizer is not None:
            return cls(whole, optimizer)
        if not any(host.has_trained() for host in whole.hosts):
            return NO_STEP
        raise ValueError(
            f"model {whole.name!r} was wrapped with step_in_backward=True, so gradients are consumed as they "
            "arrive and cannot be accumulated: give forward_backward the optimizer that steps, as "
            "forward_backward(..., optimizer=optimizer), or wrap the model without step_in_backward"
        )

    def prepare(self) -> None:
        """Make all that the step takes, and refuse what it cannot do; calls then read the latest weights."""
        whole = self._whole
        for host in whole.hosts:
            host.begin_consuming()
        whole.prepare_step(is_async=False)
        for host in whole.hosts:
            # A step that published the last result would wait for tasks that wait for this step.
            if host.state.unpublished:
                host.publish()
            host.state.make_masters()
            host.state.make_backs()
        _refuse_left_out(whole.name, whole.states(), self._optimizer)
        whole.memory_check.check_step(whole.states(), self._optimizer)

    def launch(self, turns: Mapping[Block, Ticket]) -> None:
        """Queue the step, right after the call's tasks. `turns`: see `Run.step_turns`."""
        try:
            self._launched.append(self._whole.submit_consuming(self._optimizer, turns))
        except BaseException:
            for ticket in turns.values():
                ticket.leave()
            raise

    def finish(self) -> None:
        """Wait for the step. Raises its error."""
        for outcome in self._launched:
            wait_until(outcome.wait)
        self._whole.raise_late_errors()

    def explain(self, error: BaseException, *, is_over: bool) -> None:
        """Say on the call's error what has become of the weights. `is_over`: the step ends by itself."""
        for outcome in self._launched:
            if is_over or outcome.done():
                outcome.wait()
                self._explain_ended(error)

    def _explain_ended(self, error: BaseException) -> None:
        self._whole.note_torn_weights(error)
        for host in self._whole.hosts:
            health = host.state.health
            if health.has_whole_weights and not health.has_whole_step:
                add_note(
                    error,
                    f"RoundPipe: the step of this call has ended half-way; the weights of model {host.name!r} are "
                    "those before it: go back to them with reset(), or load a state",
                )


def _refuse_left_out(name: str, states: Sequence[ModelState], optimizer: HostOptimizer) -> None:
    stepped = {id(one) for group in optimizer.param_groups for one in group["params"]}
    masters = {id(state.masters[tensor]) for state in states for tensor in state.trainable_tensors()}
    if left_out := len(masters - stepped):
        raise ValueError(
            f"{left_out} of the {len(masters)} trained parameters of model {name!r} are not the optimizer's, and "
            "with step_in_backward=True their gradients would be lost: freeze them, or make the optimizer over "
            "all of model.optim_parameters()"
        )
