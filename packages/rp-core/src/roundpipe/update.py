"""The optimizer's side of a model: steps on the optimizer's thread, and their results in the weights.

Gradients are lent to the masters and read where they lie, as they arrive (`loan.py`). A step leaves its result in
the masters; it is copied into the weights, each block in its turn, by a synchronous step at its end, and otherwise
by the next step (or `synchronize`) at its beginning: so between two steps calls read the result of the step before
the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import torch
from rp_transfer import Ticket

from roundpipe import tracing
from roundpipe.context import OptimizerCtx
from roundpipe.loan import Incomplete, Loan, abandon, take_back
from roundpipe.runtime import Runtime
from roundpipe.state import Block, ModelState
from roundpipe.taking import Take, taking
from roundpipe.tracing import NOTHING, OPTIMIZER, Tracer
from roundpipe.weights import described

Turns = dict[Block, Ticket]


class Updates:
    """The steps of one model. The calling thread launches them; their bodies run on the optimizer's thread."""

    def __init__(self, name: str, state: ModelState, runtime: Runtime) -> None:
        self._name = name
        self._state = state
        self._runtime = runtime
        self._pending: list[Future[None]] = []
        self._is_stepping = False

    # Launch, on the calling thread

    def step(self, step_fn: Callable[[], object], *, is_async: bool) -> Future[None]:
        """Publish the last result, then update from the gradients; a synchronous result is published at once."""
        state = self._state
        state.make_masters()
        with taking() as take:
            before = self._publication(take) if state.unpublished else {}
            gradients = {
                block: take(block.gradient.turns, write=True) for block in state.trainable if block.gradient
            }
            after = {} if is_async else self._publication(take)
            # Until it is certain: to publish once too often changes nothing.
            state.unpublished = True
            future = self._submit(self._step, before, gradients, after, step_fn, state.num_runs)
        state.unpublished = is_async
        return future

    def publish(self) -> None:
        """Let calls from now on read the last result."""
        if self._state.unpublished:
            with taking() as take:
                self._submit(self._publish_all, self._publication(take))
            self._state.unpublished = False

    def _publication(self, take: Take) -> Turns:
        self._state.version += 1
        return {block: take(block.turns, write=True) for block in self._state.trainable}

    def _submit(self, job: Callable[..., None], *arguments: Any) -> Future[None]:
        tracer = tracing.current()
        future = self._runtime.optimizer.submit(job, tracer, *arguments)
        if tracer is not None:
            tracer.follow(future)
        self._pending.append(future)
        return future

    def errors(self) -> list[BaseException]:
        """The errors of steps that are over, and were not returned before."""
        over = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if not future.done()]
        return [error for future in over if (error := future.exception()) is not None]

    def wait(self) -> None:
        """Block until all steps are over; `error` then tells how they went."""
        for future in self._pending:
            future.exception()

    # On the optimizer's thread

    def is_stepping(self) -> bool:
        """Whether the calling thread is inside a step function of this model."""
        return self._is_stepping and self._runtime.optimizer.is_current()

    def _step(
        self,
        tracer: Tracer | None,
        before: Turns,
        gradients: Turns,
        after: Turns,
        step_fn: Callable[[], object],
        num_runs: int,
    ) -> None:
        loans = [Loan(self._state, block, ticket, num_runs, tracer) for block, ticket in gradients.items()]
        try:
            self._publish(tracer, before)
            if self._state.failed is None:
                with NOTHING if tracer is None else tracer.on_host(OPTIMIZER, "step", f"step of {self._name}"):
                    self._update(step_fn, loans)
            self._publish(tracer, after)
        finally:
            _leave(before, gradients, after)

    def _publish_all(self, tracer: Tracer | None, turns: Turns) -> None:
        try:
            self._publish(tracer, turns)
        finally:
            _leave(turns)

    def _publish(self, tracer: Tracer | None, turns: Turns) -> None:
        name = f"publication of {self._name}"
        with NOTHING if tracer is None or not turns else tracer.on_host(OPTIMIZER, "publication", name):
            self._publish_blocks(tracer, turns)

    def _publish_blocks(self, tracer: Tracer | None, turns: Turns) -> None:
        for block, ticket in turns.items():
            with NOTHING if tracer is None else _waiting(tracer, block):
                ticket.enter()
            # The masters of a step that failed are neither the old nor the new ones.
            if self._state.failed is None:
                self._runtime.backend.host_touch(write=block.host_tensors(), what="publishing weights")
                with torch.no_grad():
                    for value, parameter in zip(block.values, block.tensors, strict=True):
                        value.copy_(self._state.masters[parameter])
            ticket.leave()

    def _update(self, step_fn: Callable[[], object], loans: Sequence[Loan]) -> None:
        try:
            for loan in loans:
                loan.lend()
            self._is_stepping = True
            with OptimizerCtx():
                step_fn()
            take_back(loans)
        except Incomplete:
            # The call that failed tells so itself; what the step has done by then cannot be undone.
            if any(loan.has_changed() for loan in loans):
                self._state.failed = "a call failed while its step was under way"
            abandon(loans)
        except BaseException as error:
            error.add_note(f"RoundPipe: in model {self._name!r}, in the step function, on the optimizer's thread")
            self._state.failed = repr(error)
            abandon(loans)
            raise
        finally:
            self._is_stepping = False


def _waiting(tracer: Tracer, block: Block) -> AbstractContextManager[None]:
    name = f"wait for those who read the weights of {described(block)}"
    return tracer.on_host(OPTIMIZER, "wait", name, reason="readers")


def _leave(*turns: Turns) -> None:
    for tickets in turns:
        for ticket in tickets.values():
            ticket.leave()
