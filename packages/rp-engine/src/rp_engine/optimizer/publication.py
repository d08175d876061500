"""Publication: the result of a step is written to the weights that devices read, each block in its turn.

It copies the masters to the weights. Weights with a second block are swapped instead: the step has already written
its result to that block.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from rp_state.block import Block
from rp_state.model_state import ModelState
from rp_telemetry.tracing import NOTHING, OPTIMIZER, Tracer
from rp_transfer import Ticket

from rp_engine.peers.step import Results


@dataclass(frozen=True, slots=True)
class Publication:
    """The write turns of one publication on a model's weights; without turns, there is nothing to publish."""

    name: str
    state: ModelState
    results: Results
    turns: Mapping[Block, Ticket]

    def run(self, tracer: Tracer) -> None:
        """Publish on the optimizer's thread."""
        told = f"publication of {self.name}"
        with tracer.on_host(OPTIMIZER, "publication", told) if self.turns else NOTHING:
            self.results.publish(self.turns, partial(_enter, tracer), tracer)

    def run_alone(self, tracer: Tracer) -> None:
        """Publish as a job of its own, outside any step."""
        try:
            self.run(tracer)
        finally:
            self.leave()

    def leave(self) -> None:
        """Leave the turns that were not left yet."""
        for ticket in self.turns.values():
            ticket.leave()


def _enter(tracer: Tracer, block: Block, ticket: Ticket) -> None:
    with _waiting(tracer, block):
        ticket.enter()


def _waiting(tracer: Tracer, block: Block) -> AbstractContextManager[None]:
    name = f"wait for those who read the weights of {block}"
    return tracer.on_host(OPTIMIZER, "wait", name, reason="readers")
