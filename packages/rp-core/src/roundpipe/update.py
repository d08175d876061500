"""The optimizer's side of a model: steps on the optimizer's thread, and their results in the weights.

An asynchronous step leaves its result in the masters. The next step (or `synchronize`) first copies it into the
weights, each block in its turn: so between two steps calls read the result of the step before the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import torch
from rp_transfer import Ticket

from roundpipe.context import OptimizerCtx
from roundpipe.gradient import Gradient
from roundpipe.runtime import Runtime
from roundpipe.state import Block, ModelState

Turns = dict[Block, Ticket]


class Updates:
    """The steps of one model. The calling thread launches them; their bodies run on the optimizer's thread."""

    def __init__(self, name: str, state: ModelState, runtime: Runtime) -> None:
        self._name = name
        self._state = state
        self._runtime = runtime
        self._pending: list[Future[None]] = []

    # Launch, on the calling thread

    def step(self, step_fn: Callable[[], object], *, is_async: bool) -> Future[None]:
        """Publish the last result, then update from the gradients; a synchronous result is published at once."""
        self._state.make_masters()
        before = self._publication() if self._state.unpublished else {}
        gradients = {block: block.gradient.turns.write() for block in self._state.trainable if block.gradient}
        after = {} if is_async else self._publication()
        self._state.unpublished = is_async
        return self._submit(self._step, before, gradients, after, step_fn, self._state.num_runs)

    def publish(self) -> None:
        """Let calls from now on read the last result."""
        if self._state.unpublished:
            self._state.unpublished = False
            self._submit(self._publish_all, self._publication())

    def _publication(self) -> Turns:
        self._state.version += 1
        return {block: block.turns.write() for block in self._state.trainable}

    def _submit(self, job: Callable[..., None], *arguments: Any) -> Future[None]:
        future = self._runtime.optimizer.submit(job, *arguments)
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

    def _step(
        self, before: Turns, gradients: Turns, after: Turns, step_fn: Callable[[], object], num_runs: int
    ) -> None:
        try:
            self._publish(before)
            for ticket in gradients.values():
                ticket.enter()
            broken = self._state.broken
            # A run launched after this step has no part in its gradients.
            if (broken is None or broken.run >= num_runs) and self._state.failed is None:
                self._update(step_fn)
            self._publish(after)
        finally:
            _leave(before, gradients, after)

    def _publish_all(self, turns: Turns) -> None:
        try:
            self._publish(turns)
        finally:
            _leave(turns)

    def _publish(self, turns: Turns) -> None:
        for block, ticket in turns.items():
            ticket.enter()
            # The masters of a step that failed are neither the old nor the new ones.
            if self._state.failed is None:
                self._runtime.backend.host_touch(write=block.host_tensors(), what="publishing weights")
                masters = [self._state.masters[parameter] for parameter in block.tensors]
                with torch.no_grad():
                    for value, master in zip(block.values, masters, strict=True):
                        value.copy_(master)
            ticket.leave()

    def _update(self, step_fn: Callable[[], object]) -> None:
        try:
            self._lend_gradients()
            with OptimizerCtx():
                step_fn()
            self._take_gradients_back()
        except BaseException as error:
            error.add_note(f"RoundPipe: in model {self._name!r}, in the step function, on the optimizer's thread")
            self._state.failed = repr(error)
            raise

    def _lend_gradients(self) -> None:
        for block, gradient in _gradients(self._state.trainable):
            held = gradient.first_or_none()
            if held is not None:
                self._runtime.backend.host_touch(read=(held,), write=(held,), what="the step's gradients")
            for index, parameter in enumerate(block.tensors):
                master = self._state.masters[parameter]
                master.grad = gradient.view(index).to(master.dtype) if index in gradient.written else None

    def _take_gradients_back(self) -> None:
        # What the step function left in place goes on being added to, as in torch.
        moved: list[tuple[Gradient, int, torch.Tensor]] = []
        for block, gradient in _gradients(self._state.trainable):
            for index, parameter in enumerate(block.tensors):
                master = self._state.masters[parameter]
                if master.grad is None:
                    gradient.drop((index,))
                elif index not in gradient.written or not _same_place(master.grad, gradient.view(index)):
                    # Perhaps another parameter's place: nothing is written before all has been read.
                    moved.append((gradient, index, master.grad.clone()))
                master.grad = None
        for gradient, index, value in moved:
            gradient.put(index, value)


def _gradients(blocks: Iterable[Block]) -> Iterable[tuple[Block, Gradient]]:
    for block in blocks:
        if block.gradient is not None:
            yield block, block.gradient


def _same_place(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.data_ptr() == right.data_ptr() and left.dtype == right.dtype and left.stride() == right.stride()


def _leave(*turns: Turns) -> None:
    for tickets in turns:
        for ticket in tickets.values():
            ticket.leave()
