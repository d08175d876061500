"""A reader's turn of a whole model between two steps, and the places that a checkpoint is loaded into."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rp_state.block import Block
from rp_state.halves import can_split
from rp_state.model_state import ModelState
from rp_telemetry.tracing import OPTIMIZER, Tracer
from rp_transfer import Kind, Ticket

from rp_engine.peers.step import Results


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A parameter or buffer of a model and where its values are.

    `tensor`: the model's own. `value`: what calls read, of any strides. `master`: what optimizers update, if it is
    trained and has one; on the meta device if another machine has it. `result`: what the last step made of it, in
    its own dtype, if calls do not read that yet and all machines have it. `owner`: the machine that writes it
    down. `is_master`: the value is the upper half of a master, here or on another machine, and so of its step.
    """

    tensor: torch.Tensor
    kind: Kind
    value: torch.Tensor
    master: torch.nn.Parameter | None
    result: torch.Tensor | None = None
    owner: int = 0
    is_master: bool = False


@dataclass(frozen=True, slots=True)
class ModelBetweenSteps:
    """A whole model between two steps.

    `is_behind`: calls do not read the last step's result yet, which the masters have. `has_gradients`: calls were
    launched since the last step that leave some.
    """

    held: tuple[ModelTensor, ...]
    is_behind: bool
    has_gradients: bool


class ModelRead:
    """One model's turns as a reader of all blocks, taken at launch. For the rest see `ModelBetweenSteps`."""

    def __init__(
        self,
        state: ModelState,
        blocks: dict[Block, Ticket],
        *,
        has_gradients: bool,
        results: Results,
    ) -> None:
        self.state = state
        self._results = results
        self.is_behind = state.unpublished
        self.has_gradients = has_gradients
        self._blocks = blocks

    def enter(self) -> None:
        """Wait for all turns.

        Raises `StepFailed` if the step before has failed.
        """
        for ticket in self._blocks.values():
            ticket.enter()
        self._results.wait()
        self.state.health.refuse_without_result()
        self.state.backend.host_touch(
            read=[tensor for block in self._blocks for tensor in block.host_tensors()], what="a checkpoint"
        )

    def leave(self) -> None:
        """Leave all turns that were not left yet."""
        for ticket in self._blocks.values():
            ticket.leave()


def held_by(states: Iterable[ModelState], *, is_behind: bool = False) -> Iterator[ModelTensor]:
    """All tensors of these models that are in blocks. `is_behind`: see `ModelBetweenSteps`."""
    for state in states:
        for block in state.blocks:
            # A parameter that was frozen later keeps a master that nothing uses.
            masters = state.masters if block.kind == "trainable" else {}
            is_gathered = state.shards.is_divided and is_behind and block.has_back
            results = block.results.values if is_gathered else [None] * len(block.values)
            for tensor, value, result in zip(block.tensors, block.values, results, strict=True):
                owner = state.shards.owner(tensor) if block.kind == "trainable" else 0
                is_master = state.options.master == "split" and not block.has_back and can_split(value)
                yield ModelTensor(tensor, block.kind, value, masters.get(tensor), result, owner, is_master)


def run_model_read(
    name: str,
    model_reads: Sequence[ModelRead],
    read: Callable[[Callable[[], ModelBetweenSteps]], None],
    tracer: Tracer,
) -> None:
    """Have `read` called, on the optimizer's thread; the next step, and publications, wait until it returns.

    Its argument waits for the turns and returns the model as the steps before have left it. It may raise
    `StepFailed`.
    """
    try:
        with tracer.on_host(OPTIMIZER, "wait", f"checkpoint of {name}", reason="checkpoint"):
            read(partial(_entered, model_reads))
    finally:
        for one in model_reads:
            one.leave()


def _entered(model_reads: Sequence[ModelRead]) -> ModelBetweenSteps:
    for one in model_reads:
        one.enter()
    is_behind = any(one.is_behind for one in model_reads)
    return ModelBetweenSteps(
        tuple(held_by((one.state for one in model_reads), is_behind=is_behind)),
        is_behind=is_behind,
        has_gradients=any(one.has_gradients for one in model_reads),
    )
