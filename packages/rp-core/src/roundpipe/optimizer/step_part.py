"""One model's part in a step: its turns on gradients and weights."""

from __future__ import annotations

from collections.abc import Mapping

from rp_transfer import Ticket

from roundpipe.optimizer.gathering import Gathering
from roundpipe.optimizer.gradient_loan import Consumed, Loan
from roundpipe.optimizer.publication import Publication
from roundpipe.optimizer.reduction import ReducedBlock
from roundpipe.optimizer.shared_step import SharedStep
from roundpipe.state.block import Block
from roundpipe.state.model_state import ModelState
from roundpipe.telemetry.machine import Machine
from roundpipe.telemetry.tracing import Tracer


class Part:
    """The turns of one model in a step: to publish `before` it, on its gradients, to publish `after` it.

    `is_consuming`: the step is one during backward, which gives up gradients in the order of `gradients`.
    """

    def __init__(
        self,
        name: str,
        state: ModelState,
        machine: Machine,
        before: Publication,
        gradients: Mapping[Block, Ticket],
        after: Publication,
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
                self.after.turns.get(block),
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
        self.before.leave()
        for ticket in self._gradients.values():
            ticket.leave()
        self.after.leave()
