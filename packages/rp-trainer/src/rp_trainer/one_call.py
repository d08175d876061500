"""Run the batches that one step accumulates as the microbatches of one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import rp_batch
import torch
from roundpipe import RoundPipe, RoundPipeRunConfig, declared_spec
from torch import nn

from rp_trainer.rows import default_count, rows_of, settings_for, whole_arguments

Kwargs = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Part:
    """A microbatch: its arguments, and its share of the batch's loss (None: the loss in its outputs)."""

    kwargs: dict[str, Any]
    share: Any


def loss_of_step(
    engine: RoundPipe, batches: Sequence[Kwargs], scale: float, optimizer: torch.optim.Optimizer | None = None
) -> torch.Tensor:
    """Run forward, loss and backward of all batches of a step in one call; return the sum of their losses.

    `batches`: keyword arguments of the model for each batch, of any lengths. `scale`: the factor of each loss.
    `optimizer`: steps during the call, if the engine has ``step_in_backward=True``.

    Each batch has the loss that it has alone. If it is known how the model's loss divides, batches may be divided
    further.
    """
    if len(batches) == 1 and scale == 1:
        settings = settings_for(engine, batches[0])
        return engine.forward_backward(input_kwargs=batches[0], run_config=settings, optimizer=optimizer)
    own: Any = getattr(engine.model, "own_loss", None)
    # At least as many microbatches in total as a call has by default.
    count = -(-default_count(engine) // len(batches))
    counts = [min(count, rows_of(engine, batch) or 1) for batch in batches]
    parts = [
        part for batch, most in zip(batches, counts, strict=True) for part in _parts(engine.model, batch, most)
    ]

    def calls(*_: object) -> list[tuple[tuple[()], dict[str, Any]]]:
        return [((), part.kwargs) for part in parts]

    def shares(*_: object) -> list[Any]:
        return [part.share for part in parts]

    def loss_fn(outputs: Any, share: Any) -> torch.Tensor:
        loss = outputs.loss if share is None else own.loss_fn(outputs, share)
        return scale * loss

    config = RoundPipeRunConfig(num_microbatch=len(parts), split_input=calls, split_label=shares)
    # The engine checks argument names, and waits for tensors that are being copied to the host.
    names = {name for batch in batches for name in batch}
    together = {name: [batch.get(name) for batch in batches] for name in names}
    return engine.forward_backward(
        input_kwargs=together, label=(), loss_fn=loss_fn, run_config=config, optimizer=optimizer
    )


def _parts(model: nn.Module, batch: Kwargs, count: int) -> list[_Part]:
    own: Any = getattr(model, "own_loss", None)
    whole = whole_arguments(own, batch)
    if whole is None:
        return [_Part(dict(batch), None)]
    split = rp_batch.split(((), whole), max(1, count), declared_spec(model, whole))
    return [_Part(kwargs, own.share(kwargs, whole)) for _, kwargs in split]
