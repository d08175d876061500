"""Sum the gradients of one step over the machines, block by block as they arrive, for the owners of parameters.

The reducing thread goes through the blocks from the last layer to the first, as backward completes them. For each
block, the machines first exchange which parameters have a gradient, the dtype of the sum, and whether a call has
failed. If one has, none of them sums this block or a later one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from rp_dist import Work
from rp_engine.connecting import REDUCE, Block, Incomplete, ModelState, OwnedSegment, Tracer
from rp_engine.errors import MachineFailed
from rp_optim import UNCHANGED
from rp_optim.jobs import Outcome
from rp_transfer import Ticket

from rp_machines.group import MachineGroup


class ReducedBlock:
    """One block's gradients in one step: first this machine's part, then the sums that this machine owns.

    `ticket`: the turn on the gradients, which the reducing thread enters.
    """

    def __init__(self, rank: int, state: ModelState, block: Block, ticket: Ticket, num_runs: int) -> None:
        self.block = block
        self._gradient = block.gradient
        self._state = state
        self._rank = rank
        self._ticket = ticket
        self._num_runs = num_runs
        self._works: list[Work] = []
        self._nbytes: list[int] = []
        # By index: the sums of this machine's parameters that have a gradient on any machine.
        self._sums: dict[int, torch.Tensor] = {}
        # Settled when the sums have started, or never will.
        self._begun: Outcome[None] = Outcome(_nothing)
        self._is_over = False

    # On the reducing thread

    def reduce(self, group: MachineGroup) -> None:
        """Wait for this machine's part, agree with the others, and begin to sum.

        Raises `Incomplete` if a call has failed, here or elsewhere.
        """
        words = self._arrive()
        try:
            from_all = group.blocks.say(f"the gradients of {self.block}", self._facts(), error=words)
        except MachineFailed as failure:
            raise Incomplete(str(failure), None if words is not None else failure) from None
        written = {index for facts in from_all for index in facts["written"]}
        if written:
            self._begin(group, written, wide=any(facts["wide"] for facts in from_all))
        self._begun.carry_out()

    def cancel(self, error: BaseException) -> None:
        """Note that these gradients will not be reduced, so that waiting raises `error`."""
        self._begun.cancel(error)

    def _arrive(self) -> str | None:
        self._ticket.enter()
        # A run launched after this step does not add to its gradients.
        return self._state.health.incomplete_before(self._num_runs)

    def _facts(self) -> dict[str, Any]:
        return {"written": sorted(self._gradient.written), "wide": self._gradient.is_wide}

    def _begin(self, group: MachineGroup, written: set[int], *, wide: bool) -> None:
        part = self._gradient.to_reduce(wide=wide)
        self._state.backend.host_touch(read=(part,), what="gradients for other machines")
        for segment in self.block.segments:
            if own := written.intersection(segment.indices):
                total = self._gradient.total(segment, part) if segment.owner == self._rank else None
                self._works.append(group.reduce(segment.of(part), segment.owner, total))
                self._nbytes.append(segment.of(part).nbytes)
                if total is not None:
                    self._sums.update((index, self._view(segment, index, total)) for index in own)

    def _view(self, segment: OwnedSegment, index: int, total: torch.Tensor) -> torch.Tensor:
        span = self.block.layout.extents[index]
        offset = total.storage_offset() + span.offset - segment.start
        return total.as_strided(span.shape, span.stride, offset)

    # On the optimizer's thread

    def done(self) -> bool:
        """Return whether `wait` would return or raise without waiting."""
        return self._is_over or (self._begun.done() and all(work.done() for work in self._works))

    def wait(self) -> None:
        """Wait for the sums.

        Raises `Incomplete`, or `rp_dist.MachineLost`.
        """
        if self._is_over:
            return
        self._begun.wait()
        self._begun.result()
        for work in self._works:
            work.wait()
        written = [self._sums[index] for index in self._sums]
        self._state.backend.host_touch(read=written, write=written, what="sums over machines")
        self._is_over = True

    def settle(self, tracer: Tracer) -> None:
        """Wait until nothing reads or writes these gradients any more."""
        self._begun.wait()
        for work, nbytes in zip(self._works, self._nbytes, strict=True):
            # The step has already raised this error or another one.
            with suppress(Exception):
                work.wait()
            if work.ended_s is not None:
                name = f"gradients of {self.block}"
                tracer.past(REDUCE, "reduce", name, work.launched_s, work.ended_s, nbytes)

    def check_complete(self) -> None:
        """Do nothing: before they summed it, the machines have agreed that no run has failed."""

    def source(self, index: int) -> torch.Tensor | None:
        """Return the sum of one parameter's gradients over the machines, contiguous.

        None if no machine has one, or if this machine does not own the parameter.
        """
        total = self._sums.get(index)
        return None if total is None else total.contiguous()

    def remaining(self, remains: Sequence[Any]) -> list[Any]:
        """Return what goes on accumulating after the step: sums, on their owner only."""
        return [self.source(index) if each is UNCHANGED else each for index, each in enumerate(remains)]


class StepReduction:
    """The gradients of one step, reduced on a thread of the group; `blocks`: in the order of the model."""

    def __init__(self, group: MachineGroup, blocks: Sequence[ReducedBlock]) -> None:
        self._group = group
        self._blocks = tuple(reversed(blocks))
        self._outcome = group.submit(self._run)

    def _run(self) -> None:
        failure: BaseException | None = None
        for block in self._blocks:
            if failure is None:
                try:
                    block.reduce(self._group)
                except BaseException as error:
                    failure = error
                    if not isinstance(error, Incomplete):
                        self._group.break_off(error)
            if failure is not None:
                block.cancel(failure)

    def settle(self, tracer: Tracer) -> None:
        """Wait until nothing reads or writes gradients for this step any more."""
        self._outcome.wait()
        for block in self._blocks:
            block.settle(tracer)


def _nothing() -> None:
    pass
