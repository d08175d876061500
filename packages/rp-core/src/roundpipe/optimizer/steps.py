"""Optimizer steps of a model, and the publication of their results to the weights that devices read.

A step reads gradients in place as they arrive (`gradient_loan.py`) and updates the master weights. Publication
then copies the masters to the weights, each block in its turn. A synchronous step publishes at its end. The result
of an asynchronous one is published by `synchronize` or at the start of the next step, so after an asynchronous
step calls read the result of the step before it. Weights with a second block are swapped instead of copied: the
step has already written its result to that block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from functools import partial

from rp_optim.jobs import Outcome
from rp_sched import Host
from rp_transfer import Ticket

from roundpipe.context import OptimizerCtx
from roundpipe.errors import add_note, class_name, in_words
from roundpipe.optimizer.gathering import Gathering
from roundpipe.optimizer.gradient_loan import Consumed, Loan, abandon, take_back
from roundpipe.optimizer.reduction import Incomplete, ReducedBlock
from roundpipe.optimizer.shared_step import SharedStep
from roundpipe.optimizer.watched import tell_reuse
from roundpipe.runtime.launcher import wait_until
from roundpipe.runtime.runtime import Runtime
from roundpipe.runtime.tickets import Take, taking
from roundpipe.state.block import Block
from roundpipe.state.master import note_optimizer
from roundpipe.state.model_state import ModelState
from roundpipe.telemetry import tracing
from roundpipe.telemetry.late_errors import Late
from roundpipe.telemetry.machine import Machine
from roundpipe.telemetry.tracing import NOTHING, OPTIMIZER, SILENT, Tracer

Turns = dict[Block, Ticket]


class Updates:
    """The steps of one model, launched by the launcher."""

    def __init__(self, name: str, state: ModelState, runtime: Runtime) -> None:
        self._name = name
        self._state = state
        self._runtime = runtime
        self._pending: list[tuple[Outcome[None], Late]] = []
        self.gathering = None if runtime.group is None else Gathering(runtime.group, state)

    # Launch, on the launcher's thread

    def prepare(self, take: Take, *, is_async: bool, gradients: Mapping[Block, Ticket] | None = None) -> Part:
        """Take a step's turns: to publish the last result, on gradients and, unless async, to publish its own.

        `gradients`: of a step during backward, its turns on gradients, in their order, which its call has taken.
        """
        state = self._state
        state.make_masters()
        state.make_backs()
        state.stepped_runs = state.num_runs
        before = self._publication(take) if state.unpublished else {}
        is_consuming = gradients is not None
        if gradients is None:
            gradients = {
                block: take(block.gradient.turns, write=True) for block in state.trainable if block.gradient
            }
        after = {} if is_async else self._publication(take)
        # Until `note_launched` knows better: publishing once too often changes nothing.
        state.unpublished = True
        machine = self._runtime.machine
        return Part(
            self._name,
            state,
            machine,
            before,
            dict(gradients),
            after,
            is_async=is_async,
            is_consuming=is_consuming,
            gathering=self.gathering,
        )

    def publish(self) -> None:
        """Queue the publication of the last result; calls launched from now on read it."""
        if self._state.unpublished:
            with taking() as take:
                self.submit(
                    partial(_publish_all, self._name, self._state, self._publication(take), self.gathering)
                )
            self._state.unpublished = False

    def _publication(self, take: Take) -> Turns:
        self._state.version += 1
        return {block: take(block.turns, write=True) for block in self._state.trainable}

    def submit(self, job: Callable[[Tracer], None]) -> Outcome[None]:
        """Queue a job on the optimizer's thread; `errors` returns what it raises."""
        tracer = tracing.current()
        late = Late()
        # With the caller's context variables, where newer torch keeps settings.
        outcome = self._runtime.optimizer.submit(copy_context().run, _noted, late, job, tracer)
        tracer.follow(outcome)
        self._pending.append((outcome, late))
        return outcome

    def share(self, other: Updates) -> None:
        """Share one list of pending steps with the other model: from now on both are stepped together."""
        other._pending.extend(self._pending)
        self._pending = other._pending

    def errors(self) -> list[BaseException]:
        """The errors of jobs that have ended since the last call of this."""
        over = [pending for pending in self._pending if pending[0].done()]
        self._pending[:] = [pending for pending in self._pending if pending not in over]
        for _, late in over:
            late.tell()
        return [error for outcome, _ in over if (error := outcome.exception()) is not None]

    def wait(self) -> None:
        """Block until all queued jobs have ended; then `errors` returns what they raised."""
        for outcome, _ in self._pending:
            wait_until(outcome.wait)


class Part:
    """The turns of one model in a step: to publish `before` it, on its gradients, to publish `after` it.

    `is_consuming`: the step is one during backward, which gives up gradients in the order of `gradients`.
    """

    def __init__(
        self,
        name: str,
        state: ModelState,
        machine: Machine,
        before: Turns,
        gradients: Turns,
        after: Turns,
        *,
        is_async: bool,
        is_consuming: bool = False,
        gathering: Gathering | None = None,
    ) -> None:
        self.gathering = gathering
        self._is_consuming = is_consuming
        self.name = name
        self.state = state
        self.machine = machine
        self.before = before
        self.after = after
        self._gradients = gradients
        self._num_runs = state.num_runs
        self._is_async = is_async
        # On several machines.
        self._reduced = (
            {}
            if state.shards is None
            else {block: ReducedBlock(state, block, turn, self._num_runs) for block, turn in gradients.items()}
        )

    def reduced(self) -> list[ReducedBlock]:
        """The gradients that several machines reduce."""
        return list(self._reduced.values())

    def note_launched(self) -> None:
        """Record that the step will run; on the launcher's thread."""
        self.state.unpublished = self._is_async

    def loans(self, tracer: Tracer, shared: SharedStep | None) -> list[Loan]:
        """A loan for each block's gradients."""
        share = None if shared is None else shared.share
        consumed = Consumed()
        return [
            Loan(
                self.state,
                block,
                ticket,
                self._num_runs,
                tracer,
                self._reduced.get(block),
                share,
                self.gathering,
                self.after.get(block),
                turn if self._is_consuming else None,
                consumed,
            )
            for turn, (block, ticket) in enumerate(self._gradients.items())
        ]

    def note_broken(self, words: str) -> None:
        """This step's gradients are not what they were before it."""
        self.state.note_broken(self._num_runs - 1, words)

    def leave(self) -> None:
        """Leave all turns that were not left yet."""
        _leave(self.before, self._gradients, self.after)


# On the optimizer's thread


def _noted(late: Late, job: Callable[[Tracer], None], tracer: Tracer) -> None:
    try:
        job(tracer)
    except BaseException as error:
        late.note(error)
        raise


def run_step(
    name: str,
    parts: Sequence[Part],
    step_fn: Callable[[], object],
    tracer: Tracer = SILENT,
    *,
    shared: SharedStep | None = None,
) -> None:
    """Run a step function over the gradients of all parts; publish all results or, if it failed, none."""
    try:
        _publish_before(parts, tracer, shared)
        is_taken = True
        if all(part.state.failed is None for part in parts):
            with tracer.on_host(OPTIMIZER, "step", f"step of {name}"):
                is_taken = _update(name, parts, step_fn, tracer, shared)
        for part in parts if is_taken or shared is None else ():
            _publish(tracer, part.name, part.state, part.after, part.gathering)
        for part in parts:
            tell_reuse(part.name, part.state)
    finally:
        if shared is not None:
            shared.settle(tracer)
        for part in parts:
            part.leave()


def _publish_before(parts: Sequence[Part], tracer: Tracer, shared: SharedStep | None) -> None:
    try:
        for part in parts:
            _publish(tracer, part.name, part.state, part.before, part.gathering)
    except BaseException as error:
        if shared is not None:
            shared.tell(error)
        for part in parts:
            if part.gathering is not None:
                part.gathering.skip()
        raise


def _update(
    name: str, parts: Sequence[Part], step_fn: Callable[[], object], tracer: Tracer, shared: SharedStep | None
) -> bool:
    """Take the step; returns whether there were gradients for it."""
    loans = [loan for part in parts for loan in part.loans(tracer, shared)]
    gatherings = [part.gathering for part in parts if part.gathering is not None]
    try:
        # First: the others expect what this machine owns, also if it fails from here on.
        for gathering in gatherings:
            gathering.expect()
        for loan in loans:
            loan.lend()
        begun = time.perf_counter()
        with OptimizerCtx(), _stepping(parts):
            step_fn()
        _note_speed(parts[0].machine, loans, time.perf_counter() - begun)
        take_back(loans)
        if shared is not None:
            _end(gatherings, loans, shared)
    except Incomplete as incomplete:
        _note_incomplete(parts, loans, incomplete, shared)
        abandon(loans)
        _give_up(gatherings)
        if incomplete.cause is not None:
            raise incomplete.cause from None
        return False
    except BaseException as error:
        _note_failed(parts, class_name(error))
        _note_torn(parts, loans, error, in_words(error))
        if shared is not None:
            shared.tell(error)
        abandon(loans)
        _give_up(gatherings)
        add_note(error, f"RoundPipe: in model {name!r}, in the step function, on the optimizer's thread")
        _note_failed(parts, in_words(error))
        _note_reduced(parts, in_words(error), shared)
        raise
    return True


def _end(gatherings: Sequence[Gathering], loans: Sequence[Loan], shared: SharedStep) -> None:
    """All machines have taken the step: the others get the rest of their results."""
    told = shared.end([gathering.changed() for gathering in gatherings], [loan.dropped for loan in loans])
    for number, gathering in enumerate(gatherings):
        gathering.complete([changed[number] for changed in told])


def _give_up(gatherings: Sequence[Gathering]) -> None:
    for gathering in gatherings:
        gathering.give_up()


def _note_incomplete(
    parts: Sequence[Part], loans: Sequence[Loan], incomplete: Incomplete, shared: SharedStep | None
) -> None:
    # The failed call raises its own error. Masters that the step has already updated cannot be restored.
    changed = any(loan.has_changed() for loan in loans)
    if changed if shared is None else shared.has_changed(changed):
        _note_failed(parts, "a call failed while its step was under way")
    _note_torn(parts, loans, incomplete.cause or incomplete, str(incomplete))
    _note_reduced(parts, str(incomplete), shared)


def _note_torn(parts: Sequence[Part], loans: Sequence[Loan], error: BaseException, words: str) -> None:
    """Record of each model whether weights that calls read are of two steps now."""
    for part in parts:
        if any(loan.is_torn() for loan in loans if loan.of(part.state)):
            part.state.torn = words
            say_torn(part.name, error)


def say_torn(name: str, error: BaseException) -> None:
    """Say on an error, once, that it has left some of a model's weights updated and others not."""
    words = (
        f"RoundPipe: the step had begun to update weights of model {name!r} in place, as "
        'master="split" does without second blocks, so they are torn: load a state, or start from a '
        "checkpoint. With double_buffer=True a failed step leaves the weights whole"
    )
    if words not in getattr(error, "__notes__", ()):
        add_note(error, words)


def _note_reduced(parts: Sequence[Part], words: str, shared: SharedStep | None) -> None:
    # The gradients of some blocks may be the sums over machines already.
    for part in parts if shared is not None else ():
        part.note_broken(words)


def _note_speed(machine: Machine, loans: Sequence[Loan], seconds: float) -> None:
    """Tell what a step takes, without its waits. One that left parameters as they are tells nothing of them."""
    numel = sum(loan.block.layout.numel for loan in loans if loan.has_changed())
    machine.note_step(Host().optimizer_bytes * numel, seconds - sum(loan.waited_s for loan in loans))


@contextmanager
def _stepping(parts: Sequence[Part]) -> Generator[None]:
    note_optimizer(steps=False)
    for part in parts:
        part.state.is_stepping = True
    try:
        yield
    finally:
        for part in parts:
            part.state.is_stepping = False


def _note_failed(parts: Sequence[Part], words: str) -> None:
    for part in parts:
        part.state.failed = words


def _publish_all(name: str, state: ModelState, turns: Turns, gathering: Gathering | None, tracer: Tracer) -> None:
    try:
        _publish(tracer, name, state, turns, gathering)
    finally:
        _leave(turns)


def _publish(tracer: Tracer, name: str, state: ModelState, turns: Turns, gathering: Gathering | None) -> None:
    told = f"publication of {name}"
    with tracer.on_host(OPTIMIZER, "publication", told) if turns else NOTHING:
        if gathering is None:
            _publish_blocks(tracer, state, turns)
        else:
            gathering.publish(turns, partial(_enter, tracer), tracer)


def _enter(tracer: Tracer, block: Block, ticket: Ticket) -> None:
    with _waiting(tracer, block):
        ticket.enter()


def _publish_blocks(tracer: Tracer, state: ModelState, turns: Turns) -> None:
    for block, ticket in turns.items():
        _enter(tracer, block, ticket)
        # After a failed step the masters are a mixture of old and new: do not publish them.
        if state.failed is None:
            block.publish(state.backend, [state.masters[parameter] for parameter in block.tensors])
        ticket.leave()


def _waiting(tracer: Tracer, block: Block) -> AbstractContextManager[None]:
    name = f"wait for those who read the weights of {block}"
    return tracer.on_host(OPTIMIZER, "wait", name, reason="readers")


def _leave(*turns: Turns) -> None:
    for tickets in turns:
        for ticket in tickets.values():
            ticket.leave()
