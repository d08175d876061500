"""The division of a call's batch into microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import rp_batch
import torch
from rp_sched import Mode
from torch import nn

from roundpipe.engine.engine import Engine
from roundpipe.planning.footprint import rows_of
from roundpipe.runtime.runtime import Runtime
from roundpipe.settings.run_config import RoundPipeRunConfig


def declared_spec(model: nn.Module, kwargs: Mapping[str, Any]) -> Any:
    """Return the spec of the arguments that a row of rp_presets knows; None without any.

    Its main input says how many rows the batch has: in a batch without padding, which is one row, most tensors are
    lists of lengths.
    """
    whole = getattr(model, "whole_arguments", frozenset[str]()) & kwargs.keys()
    main = [name for name in getattr(model, "main_arguments", ()) if _is_batch(kwargs.get(name))]
    found = {**dict.fromkeys(whole, rp_batch.Replicate()), **dict.fromkeys(main, rp_batch.Split())}
    return (None, found) if found else None


def _is_batch(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_nested and value.ndim > 0


def num_microbatches(
    engine: Engine,
    runtime: Runtime,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    spec: Any,
    config: RoundPipeRunConfig,
    mode: Mode,
) -> int:
    """Return the number that was given, or that is chosen at the first call, or one more than there are devices.

    `arguments`, `spec`: those of the call, and how they are split.
    """
    given = config.num_microbatch
    if isinstance(given, int):
        return given
    group = runtime.group
    if group is not None and torch.is_grad_enabled() and config.requires_grad is not False:
        # Machines divide all calls that train.
        mode = "fused"
    more = (1 if group is None or mode != "fused" else group.size) * (len(runtime.lanes) + 1)
    on_host = runtime.lanes[0].device.torch_device.type == "cpu"
    if config.execute_plan is not None or (given is None and on_host):
        return more
    # A split into one tells the size of the batch. A function of the caller's runs once, so it is not asked.
    whole = None if callable(spec) else rp_batch.split(arguments, 1, spec)
    if whole is not None and len(whole) > 1:
        # Outputs that another model left in microbatches.
        return len(whole)
    if whole is None or not whole.sizes or whole.sizes[0] < 1:
        return more
    return engine.microbatches(mode, whole.sizes[0], rows_of(whole))
