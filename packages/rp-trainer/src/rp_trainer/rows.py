"""How many rows a batch has, and into how many microbatches it may be divided at most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from roundpipe import OwnLoss, RoundPipe, RoundPipeRunConfig
from torch import nn
from transformers.utils.generic import find_labels  # pyright: ignore[reportUnknownVariableType]


def rows_of(engine: RoundPipe, batch: Mapping[str, Any]) -> int | None:
    """The rows of a batch, by the model's main input; None if that is unknown.

    Not by what most tensors begin with: a batch without padding is one row, whose lengths are tensors of their own
    (``cu_seq_lens_q``).
    """
    main = getattr(engine.named_model, "main_input_name", "input_ids")
    for name in (main, "input_ids", "inputs_embeds", "labels"):
        value = batch.get(name)
        if isinstance(value, torch.Tensor) and value.ndim:
            return len(value)
    return None


def settings_for(engine: RoundPipe, batch: Mapping[str, Any]) -> RoundPipeRunConfig | None:
    """Settings for a batch that must be divided into fewer microbatches than calls have by default, else None.

    It has fewer rows, as an epoch's last batch may, or how its loss divides is unknown, so that it stays whole.
    """
    if not _divides(engine, batch):
        return RoundPipeRunConfig(num_microbatch=1)
    rows = rows_of(engine, batch)
    if rows is None or engine.model_run_config.execute_plan is not None:
        return None
    return RoundPipeRunConfig(num_microbatch=max(1, rows)) if rows < default_count(engine) else None


def _divides(engine: RoundPipe, batch: Mapping[str, Any]) -> bool:
    """Whether losses among the outputs are known to divide, or are none: a plain row returns a tensor."""
    own: Any = getattr(engine.model, "own_loss", None)
    if not isinstance(own, OwnLoss):
        return own is None and isinstance(engine.model, nn.Sequential)
    if batch.get("labels") is not None:
        return whole_arguments(own, batch) is not None
    # Such as the positions of an answer.
    return all(batch.get(name) is None for name in find_labels(type(unadapted(engine.named_model))))


def unadapted(model: nn.Module) -> nn.Module:
    """The model inside of PEFT's adapters, or this one."""
    return getattr(model, "get_base_model", lambda: model)()


def whole_arguments(own: object, batch: Mapping[str, Any]) -> dict[str, Any] | None:
    """A batch with what its parts' losses need of the whole; None if it has no loss that is known to divide."""
    if not isinstance(own, OwnLoss) or batch.get("labels") is None:
        return None
    try:
        return dict(own.with_total(batch))
    except NotImplementedError:
        return None


def default_count(engine: RoundPipe) -> int:
    """The microbatches of a call, as they were set; one more than there are devices if they were not."""
    return engine.num_microbatch or len(engine.runtime.lanes) + 1
