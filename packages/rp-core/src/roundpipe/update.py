"""The optimizer's side of a model: steps on the optimizer's thread, and their results in the weights.

Gradients are lent to the masters and read where they lie, as they arrive (`loan.py`); a synchronous step writes
the weights in the same pass. An asynchronous step leaves its result in the masters, and the next step (or
`synchronize`) first copies it into the weights, each block in its turn: so between two steps calls read the result
of the step before the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from functools import partial

import torch
from rp_transfer import Ticket

from roundpipe.context import OptimizerCtx
from roundpipe.loan import Incomplete, Loan, abandon, take_back
from roundpipe.runtime import Runtime
from roundpipe.state import Block, ModelState
from roundpipe.taking import Take, taking

Turns = dict[Block, Ticket]


class Updates:
    """The steps of one model, launched by the calling thread."""

    def __init__(self, state: ModelState, runtime: Runtime) -> None:
        self._state = state
        self._runtime = runtime
        self._pending: list[Future[None]] = []

    # Launch, on the calling thread

    def prepare(self, take: Take, *, is_async: bool) -> Part:
        """Take a step's turns: publish the last result, then update; a synchronous result is published at once."""
        state = self._state
        state.make_masters()
        before = self._publication(take) if state.unpublished else {}
        gradients = {block: take(block.gradient.turns, write=True) for block in state.trainable if block.gradient}
        after = {} if is_async else self._publication(take)
        # Until it is certain: to publish once too often changes nothing.
        state.unpublished = True
        return Part(state, before, gradients, after, is_async=is_async)

    def publish(self) -> None:
        """Let calls from now on read the last result."""
        if self._state.unpublished:
            with taking() as take:
                self.submit(partial(_publish_all, self._state, self._publication(take)))
            self._state.unpublished = False

    def _publication(self, take: Take) -> Turns:
        self._state.version += 1
        return {block: take(block.turns, write=True) for block in self._state.trainable}

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Queue a job whose errors are this model's."""
        future = self._runtime.optimizer.submit(job)
        self._pending.append(future)
        return future

    def share(self, other: Updates) -> None:
        """Wait for the other model's steps, too: from now on both are stepped together."""
        other._pending.extend(self._pending)
        self._pending = other._pending

    def errors(self) -> list[BaseException]:
        """The errors of steps that are over, and were not returned before."""
        over = [future for future in self._pending if future.done()]
        self._pending[:] = [future for future in self._pending if not future.done()]
        return [error for future in over if (error := future.exception()) is not None]

    def wait(self) -> None:
        """Block until all steps are over; `error` then tells how they went."""
        for future in self._pending:
            future.exception()


class Part:
    """One model's part in a step, on the optimizer's thread: all its turns, and the loans of its gradients."""

    def __init__(
        self, state: ModelState, before: Turns, gradients: Turns, after: Turns, *, is_async: bool
    ) -> None:
        self.state = state
        self._is_async = is_async
        self._turns = (before, gradients, after)
        self.loans = [
            Loan(state, block, ticket, after.get(block), state.num_runs) for block, ticket in gradients.items()
        ]

    def note_launched(self) -> None:
        """The step will be run for certain; on the calling thread."""
        self.state.unpublished = self._is_async

    def publish_last(self) -> None:
        """Copy the last result into the weights, if it is still in the masters only."""
        _publish(self.state, self._turns[0])

    def publish_own(self) -> None:
        """Copy a synchronous step's result into the weights, but for those that the step wrote itself."""
        _publish(self.state, self._turns[2], {loan.block: loan.published for loan in self.loans})

    def leave(self) -> None:
        """Give up the turns that are left."""
        _leave(*self._turns)


def run_step(name: str, parts: Sequence[Part], step_fn: Callable[[], object]) -> None:
    """Run a step function over the gradients of all parts, which are updated together or not at all."""
    try:
        for part in parts:
            part.publish_last()
        if all(part.state.failed is None for part in parts):
            _update(name, parts, step_fn)
        for part in parts:
            part.publish_own()
    finally:
        for part in parts:
            part.leave()


def _update(name: str, parts: Sequence[Part], step_fn: Callable[[], object]) -> None:
    loans = [loan for part in parts for loan in part.loans]
    try:
        for loan in loans:
            loan.lend()
        with OptimizerCtx():
            step_fn()
        take_back(loans)
    except Incomplete:
        # The call that failed tells so itself; what the step has done by then cannot be undone.
        if any(loan.has_changed() for loan in loans):
            _note_failed(parts, "a call failed while its step was under way")
        abandon(loans)
    except BaseException as error:
        error.add_note(f"RoundPipe: in model {name!r}, in the step function, on the optimizer's thread")
        _note_failed(parts, repr(error))
        abandon(loans)
        raise


def _note_failed(parts: Sequence[Part], words: str) -> None:
    for part in parts:
        part.state.failed = words


def _publish_all(state: ModelState, turns: Turns) -> None:
    try:
        _publish(state, turns)
    finally:
        _leave(turns)


def _publish(state: ModelState, turns: Turns, done: Mapping[Block, Set[int]] | None = None) -> None:
    for block, ticket in turns.items():
        ticket.enter()
        # The masters of a step that failed are neither the old nor the new ones.
        if state.failed is None:
            state.backend.host_touch(write=block.host_tensors(), what="publishing weights")
            written = (done or {}).get(block, frozenset())
            with torch.no_grad():
                for index in set(range(len(block.tensors))) - written:
                    block.values[index].copy_(state.masters[block.tensors[index]])
        ticket.leave()


def _leave(*turns: Turns) -> None:
    for tickets in turns:
        for ticket in tickets.values():
            ticket.leave()
