"""How many rows a batch has, and into how many microbatches it may be divided at most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from roundpipe import RoundPipe, RoundPipeRunConfig


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


def no_more_than_rows(engine: RoundPipe, batch: Mapping[str, Any]) -> RoundPipeRunConfig | None:
    """Settings for a batch of fewer rows than calls have microbatches, as an epoch's last may be; else None."""
    rows = rows_of(engine, batch)
    if rows is None or engine.model_run_config.execute_plan is not None:
        return None
    return RoundPipeRunConfig(num_microbatch=max(1, rows)) if rows < default_count(engine) else None


def default_count(engine: RoundPipe) -> int:
    """The microbatches of a call, as they were set; one more than there are devices if they were not."""
    return engine.num_microbatch or len(engine.runtime.lanes) + 1
