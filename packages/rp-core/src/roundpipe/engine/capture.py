"""A reader's turn of a whole model between two steps, and the places that a checkpoint is loaded into."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from rp_transfer import Kind, Ticket

from roundpipe.errors import StepFailed
from roundpipe.state.model_state import Block, ModelState
from roundpipe.telemetry.tracing import OPTIMIZER, Tracer


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter or buffer of a model and where its values are.

    `tensor`: the model's own. `value`: what calls read, of any strides. `master`: what optimizers update, if it is
    trained and has one.
    """

    tensor: torch.Tensor
    kind: Kind
    value: torch.Tensor
    master: torch.nn.Parameter | None


@dataclass(frozen=True, slots=True)
class Captured:
    """A whole model between two steps.

    `is_behind`: calls do not read the last step's result yet, which the masters have. `has_gradients`: calls since
    the last step have left some.
    """

    held: tuple[Held, ...]
    is_behind: bool
    has_gradients: bool


class Capture:
    """One model's turns as a reader of all blocks, taken at launch. `is_behind`: see `Captured`."""

    def __init__(self, state: ModelState, blocks: dict[Block, Ticket], gradients: dict[Block, Ticket]) -> None:
        self.state = state
        self.is_behind = state.unpublished
        self._blocks = blocks
        self._gradients = gradients

    def enter(self) -> bool:
        """Wait for all turns; return whether the model has gradients, whose turns end here.

        Raises `StepFailed` if the step before has failed.
        """
        for ticket in self._blocks.values():
            ticket.enter()
        has_gradients = False
        for block, ticket in self._gradients.items():
            ticket.enter()
            has_gradients |= block.gradient is not None and bool(block.gradient.written)
            ticket.leave()
        if self.state.failed is not None:
            raise StepFailed(f"the last step failed half-way ({self.state.failed}), so it has no result to save")
        self.state.backend.host_touch(
            read=[tensor for block in self._blocks for tensor in block.host_tensors()], what="a checkpoint"
        )
        return has_gradients

    def leave(self) -> None:
        """Leave all turns that were not left yet."""
        for ticket in (*self._blocks.values(), *self._gradients.values()):
            ticket.leave()


def held_by(states: Iterable[ModelState]) -> Iterator[Held]:
    """All tensors of these models that are in blocks."""
    for state in states:
        for block in state.blocks:
            # A parameter that was frozen later keeps a master that nothing uses.
            masters = state.masters if block.kind == "trainable" else {}
            for tensor, value in zip(block.tensors, block.values, strict=True):
                yield Held(tensor, block.kind, value, masters.get(tensor))


def run_capture(name: str, captures: Sequence[Capture], read: Callable[[Captured], None], tracer: Tracer) -> None:
    """Have `read` called with the model as the steps before have left it; on the optimizer's thread.

    The next step, and publications, wait until it returns.
    """
    try:
        with tracer.on_host(OPTIMIZER, "wait", f"checkpoint of {name}", reason="checkpoint"):
            gradients = [capture.enter() for capture in captures]
            held = tuple(held_by(capture.state for capture in captures))
            read(Captured(held, any(capture.is_behind for capture in captures), any(gradients)))
    finally:
        for capture in captures:
            capture.leave()
