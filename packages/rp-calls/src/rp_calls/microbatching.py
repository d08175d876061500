"""The division of a call's batch into microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import rp_batch
import torch
from rp_engine import Engine, RoundPipeRunConfig, Runtime
from rp_engine.estimates import rows_of
from rp_sched import Mode, Plan
from torch import nn


def declared_spec(model: object, kwargs: Mapping[str, Any]) -> Any:
    """Return the spec by which a call's arguments are split: what a row of rp_presets knows of them; None without.

    Its main input says how many rows the batch has: in a batch without padding, which is one row, most tensors are
    lists of lengths. Images go with the samples whose placeholders they fill.

    >>> declared_spec(nn.Sequential(), {"x": torch.ones(4, 2)})

    `model`: the row, as `RoundPipe.model`. `kwargs`: the call's. Others are split along the first dimension.

    Raises `ValueError` if images and their placeholders disagree, and rp_presets' error if the row takes none.
    """
    whole = getattr(model, "whole_arguments", frozenset[str]()) & kwargs.keys()
    main = [name for name in getattr(model, "main_arguments", ()) if _is_batch(kwargs.get(name))]
    asked = ("sample_dimensions", "entries_of_samples", "used_by_samples")
    dims, entries, used = (_told(model, method, kwargs) for method in asked)
    found: dict[str, Any] = {
        **dict.fromkeys(whole, rp_batch.Replicate()),
        **dict.fromkeys(main, rp_batch.Split()),
        **{name: rp_batch.Split(dim) for name, dim in dims.items()},
        **{
            name: rp_batch.Ragged(tuple(counts), dims.get(name, 0), used.get(name))
            for name, counts in entries.items()
        },
    }
    return (None, found) if found else None


def _told(model: object, method: str, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a row of rp_presets tells of a call's arguments; nothing of other models."""
    return getattr(model, method)(kwargs) if hasattr(model, method) else {}


def knows_batch(model: nn.Module) -> bool:
    """Return whether a model is a row of rp_presets, which says which of its arguments have samples first.

    >>> knows_batch(nn.Linear(2, 2))
    False
    """
    return bool(getattr(model, "main_arguments", ()))


def in_one_piece(name: str, arguments: Any, config: RoundPipeRunConfig) -> rp_batch.Parts[Any]:
    """Return a call that was to be split, but cannot be, in one microbatch.

    Raises `ValueError` if its plan divides microbatches between devices.
    """
    plan = config.execute_plan
    if isinstance(plan, Plan) and plan.tasks_a_stage > 1:
        raise ValueError(
            f"{name} must run its batch in one piece: split, it does not give what it gives for the whole batch; "
            f"but its execute_plan ({plan}) divides microbatches between devices. If it can be split, say how "
            "(split_input); otherwise leave the groups out of the plan"
        )
    return rp_batch.split(arguments, 1)


def has_parts(arguments: Any) -> bool:
    """Return whether something among the arguments is in microbatches already.

    >>> has_parts(((rp_batch.Parts([1, 2]),), {})), has_parts(((torch.zeros(2),), {}))
    (True, False)
    """
    return any(isinstance(leaf, rp_batch.Parts) for leaf in rp_batch.flatten(arguments)[0])


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
    peers = runtime.peers
    is_forward = mode == "train"
    if is_forward and not peers.is_alone and torch.is_grad_enabled() and config.requires_grad is not False:
        # Machines divide all calls that train, and those that compute losses.
        mode = "fused"
    more = (1 if mode == "train" else peers.size) * (len(runtime.lanes) + 1)
    on_host = runtime.backend.abilities.computes_on_host
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
