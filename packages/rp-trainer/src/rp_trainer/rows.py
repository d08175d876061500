"""Find how many rows a batch has, and into how many microbatches it may be divided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from roundpipe import OwnLoss, RoundPipe, RoundPipeRunConfig
from torch import nn
from transformers.utils.generic import find_labels  # pyright: ignore[reportUnknownVariableType]


def rows_of(engine: RoundPipe, batch: Mapping[str, Any]) -> int | None:
    """Return the number of rows of a batch, from the model's main input; None if unknown.

    The most frequent first dimension would be wrong: a batch without padding is one row, with separate tensors for
    lengths (``cu_seq_lens_q``).
    """
    main = getattr(engine.named_model, "main_input_name", "input_ids")
    for name in (main, "input_ids", "inputs_embeds", "labels"):
        value = batch.get(name)
        if isinstance(value, torch.Tensor) and value.ndim:
            return len(value)
    return None


def settings_for(engine: RoundPipe, batch: Mapping[str, Any]) -> RoundPipeRunConfig | None:
    """Return settings for a batch that needs fewer microbatches than calls have by default; otherwise None.

    It may have fewer rows, as an epoch's last batch, or stay whole because it is unknown how its loss divides.
    """
    if not _divides(engine, batch):
        return RoundPipeRunConfig(num_microbatch=1)
    rows = rows_of(engine, batch)
    if rows is None or engine.model_run_config.execute_plan is not None:
        return None
    return RoundPipeRunConfig(num_microbatch=max(1, rows)) if rows < default_count(engine) else None


def _divides(engine: RoundPipe, batch: Mapping[str, Any]) -> bool:
    """Return whether the outputs have no loss, as those of a plain row, or one that is known to divide."""
    own: Any = getattr(engine.model, "own_loss", None)
    if not isinstance(own, OwnLoss):
        return own is None and isinstance(engine.model, nn.Sequential)
    if batch.get("labels") is not None:
        return whole_arguments(own, batch) is not None
    # Other labels, such as the positions of an answer.
    return all(batch.get(name) is None for name in find_labels(type(unadapted(engine.named_model))))


def unadapted(model: nn.Module) -> nn.Module:
    """Return the model inside PEFT's adapters, or the model itself without adapters."""
    return getattr(model, "get_base_model", lambda: model)()


def whole_arguments(own: object, batch: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the batch, completed so that its parts have losses; None without a loss that is known to divide."""
    if not isinstance(own, OwnLoss) or batch.get("labels") is None:
        return None
    try:
        return dict(own.with_total(batch))
    except NotImplementedError:
        return None


def default_count(engine: RoundPipe) -> int:
    """Return the number of microbatches of a call: the configured one, or one more than there are devices."""
    return engine.num_microbatch or len(engine.runtime.lanes) + 1
