"""The queue of one model's steps and publications on the optimizer's thread.

A synchronous step publishes its result at its end. The result of an asynchronous one is published by `synchronize`
or at the start of the next step, so after an asynchronous step calls read the result of the step before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import copy_context
from functools import partial

from rp_optim.jobs import Outcome
from rp_state.block import Block
from rp_state.model_state import ModelState
from rp_telemetry import tracing
from rp_telemetry.tracing import Tracer
from rp_transfer import Ticket

from rp_engine.optimizer.model_step import ModelStep, ModelTurns
from rp_engine.optimizer.publication import Publication
from rp_engine.runtime.late_errors import UnreportedError
from rp_engine.runtime.launcher import wait_until
from rp_engine.runtime.runtime import Runtime
from rp_engine.runtime.tickets import Take, own_turn, taking_tickets


class StepQueue:
    """The steps and publications of one model; used on the launcher's thread."""

    def __init__(self, name: str, state: ModelState, runtime: Runtime) -> None:
        self._name = name
        self._state = state
        self._runtime = runtime
        self._pending: list[tuple[Outcome[None], UnreportedError]] = []
        # Those of the pending ones that only read, such as a checkpoint's.
        self._reading: list[Outcome[None]] = []
        self.results = runtime.peers.results(state)
        self._no_publication = Publication(name, state, self.results, {})

    def prepare(self, take: Take, *, is_async: bool) -> ModelStep:
        """Take a step's turns: to publish the last result, on gradients and, unless async, to publish its own."""
        return self._prepared(take, partial(self._on_gradients, take), is_async=is_async, is_consuming=False)

    def _on_gradients(self, take: Take) -> dict[Block, Ticket]:
        return {block: take(block.gradient.turns, write=True) for block in self._state.trainable}

    def prepare_consuming(self, take: Take, gradients: Mapping[Block, Ticket]) -> ModelStep:
        """Do the same for a step during backward. `gradients`: the turns that its call has taken, in order."""
        return self._prepared(take, lambda: gradients, is_async=False, is_consuming=True)

    def _prepared(
        self,
        take: Take,
        on_gradients: Callable[[], Mapping[Block, Ticket]],
        *,
        is_async: bool,
        is_consuming: bool,
    ) -> ModelStep:
        state = self._state
        state.make_masters()
        state.make_backs()
        state.stepped_runs = state.num_runs
        before = self._publication(take) if state.unpublished else self._no_publication
        gradients = on_gradients()
        after = self._no_publication if is_async else self._publication(take)
        # Until `note_launched` knows better: publishing once too often changes nothing.
        state.unpublished = True
        return ModelStep(
            self._name,
            state,
            self._runtime.measurements,
            ModelTurns(before, dict(gradients), after),
            partial(self._runtime.peers.gradients, state),
            self.results,
            is_async=is_async,
            is_consuming=is_consuming,
        )

    def publish(self) -> None:
        """Queue the publication of the last result; calls launched from now on read it."""
        if self._state.unpublished:
            with taking_tickets() as take:
                self.submit(self._publication(take).run_alone)
            self._state.unpublished = False

    def _publication(self, take: Take) -> Publication:
        self._state.health.note_changed("newer weights were published")
        turns = {block: take(block.turns, write=True) for block in self._state.trainable}
        return Publication(self._name, self._state, self.results, turns)

    def submit(self, job: Callable[[Tracer], None], *, writes: bool = True) -> Outcome[None]:
        """Queue a job on the optimizer's thread; `errors` returns what it raises. `writes`: maybe weights."""
        tracer = tracing.current()
        unreported = UnreportedError()
        # With the caller's context variables, where newer torch keeps settings.
        outcome = self._runtime.optimizer.submit(copy_context().run, _noted, unreported, job, tracer)
        tracer.follow(outcome)
        self._pending.append((outcome, unreported))
        if not writes:
            self._reading.append(outcome)
        return outcome

    def share(self, other: StepQueue) -> None:
        """Share one list of pending steps with the other model: from now on both are stepped together."""
        other._pending.extend(self._pending)
        other._reading.extend(self._reading)
        self._pending, self._reading = other._pending, other._reading

    def errors(self) -> list[BaseException]:
        """The errors of jobs that have ended since the last call of this."""
        over = [pending for pending in self._pending if pending[0].done()]
        self._pending[:] = [pending for pending in self._pending if pending not in over]
        self._reading[:] = [outcome for outcome in self._reading if not outcome.done()]
        for _, unreported in over:
            unreported.tell()
        return [error for outcome, _ in over if (error := outcome.exception()) is not None]

    def writes(self) -> bool:
        """Return whether a queued job that has not ended may write weights."""
        return any(not outcome.done() and outcome not in self._reading for outcome, _ in self._pending)

    def drain(self) -> None:
        """Wait for all steps, and for all tasks launched before that use the model's blocks."""
        self.wait()
        for line in self._state.lines():
            with own_turn(line, write=True):
                pass

    def wait(self) -> None:
        """Block until all queued jobs have ended; then `errors` returns what they raised."""
        for outcome, _ in self._pending:
            wait_until(outcome.wait)


def _noted(unreported: UnreportedError, job: Callable[[Tracer], None], tracer: Tracer) -> None:
    try:
        job(tracer)
    except BaseException as error:
        unreported.note(error)
        raise
