"""Wrapping any model in one line: a preset where there is one, else the model as it is."""

from __future__ import annotations

from typing import Any

import rp_presets
from torch import nn

from roundpipe.config import RoundPipeRunConfig
from roundpipe.module import RoundPipe


def wrap_model_to_roundpipe(
    model: nn.Module,
    use_sequential_preset: bool | None = None,
    *,
    model_run_config: RoundPipeRunConfig | None = None,
    name: str | None = None,
    **roundpipe_kwargs: Any,
) -> RoundPipe:
    """Wrap a model; a Hugging Face model with a preset becomes a row of layers that shares its parameters.

    Args:
        model: the model, on the CPU.
        use_sequential_preset: True asks for a preset, False for none, None for one if there is one.
        model_run_config, name, roundpipe_kwargs: for `RoundPipe`.

    An ``nn.Sequential`` is wrapped as it is, any other model without a preset as a single layer. The attributes of
    `model` stay readable on the result.

    >>> from roundpipe import Runtime
    >>> with Runtime("cpu") as runtime:
    ...     len(wrap_model_to_roundpipe(nn.Sequential(nn.Linear(2, 2)), runtime=runtime).model)
    1

    Raises `NotImplementedError` if `use_sequential_preset` is True and there is no preset for the model.
    """
    row = model if use_sequential_preset is False else _preset(model, required=bool(use_sequential_preset))
    wrapped = RoundPipe(row, model_run_config=model_run_config, name=name, **roundpipe_kwargs)
    if row is not model:
        wrapped.set_original_model(model)
    return wrapped


def _preset(model: nn.Module, *, required: bool) -> nn.Module:
    try:
        return rp_presets.to_sequential(model)
    except rp_presets.UnsupportedModel:
        if required:
            raise
        return model
