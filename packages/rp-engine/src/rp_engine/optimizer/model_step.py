"""One model's part in a step, with its turns on gradients and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rp_state.block import Block
from rp_state.model_state import ModelState
from rp_telemetry.measurements import Measurements
from rp_telemetry.tracing import Tracer
from rp_transfer import Ticket

from rp_engine.optimizer.linked_block import Consumed, ConsumingTurn, KeptGradients, LinkedBlock
from rp_engine.optimizer.publication import Publication
from rp_engine.peers.step import Results, SharedStep, StepGradients


@dataclass(frozen=True, slots=True)
class ModelTurns:
    """The turns of one model in a step: to publish `before` it, on its `gradients`, and to publish `after` it."""

    before: Publication
    gradients: Mapping[Block, Ticket]
    after: Publication

    def leave(self) -> None:
        """Leave all that were not left yet."""
        self.before.leave()
        for ticket in self.gradients.values():
            ticket.leave()
        self.after.leave()


class ModelStep:
    """One model's part in a step.

    `arriving`: its gradients, each block's made by `arrive` of the block, its turn and the number of runs before.
    `is_consuming`: the step is one during backward, which gives up gradients in the order of their turns.
    """

    def __init__(
        self,
        name: str,
        state: ModelState,
        measurements: Measurements,
        turns: ModelTurns,
        arrive: Callable[[Block, Ticket, int], StepGradients],
        results: Results,
        *,
        is_async: bool,
        is_consuming: bool = False,
    ) -> None:
        self.results = results
        self._is_consuming = is_consuming
        self.name = name
        self.state = state
        self.measurements = measurements
        self.turns = turns
        self._num_runs = state.num_runs
        self.is_async = is_async
        self.arriving = {block: arrive(block, turn, self._num_runs) for block, turn in turns.gradients.items()}

    def note_launched(self) -> None:
        """Record that the step will run; on the launcher's thread."""
        self.state.unpublished = self.is_async

    def linked_blocks(self, tracer: Tracer, shared: SharedStep) -> list[LinkedBlock]:
        """A linked block for each block's gradients."""
        consumed = Consumed()
        return [
            LinkedBlock(
                self.state,
                block,
                ticket,
                self.arriving[block],
                self.results,
                shared.share,
                tracer,
                self.turns.after.turns.get(block),
                ConsumingTurn(number, consumed) if self._is_consuming else KeptGradients(),
            )
            for number, (block, ticket) in enumerate(self.turns.gradients.items())
        ]

    def note_incomplete(self, words: str) -> None:
        """This step's gradients are not what they were before it."""
        self.state.health.note_incomplete(self._num_runs - 1, words)

    def leave(self) -> None:
        """Leave all turns that were not left yet."""
        self.turns.leave()
