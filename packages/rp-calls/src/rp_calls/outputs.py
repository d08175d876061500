"""A call's outputs: merged into those of the batch, on the host or on the device that was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import rp_batch
import torch
from rp_engine import RoundPipeRunConfig

from rp_calls.growing import Lists, below, joining, of_some


def check_outputs(config: RoundPipeRunConfig) -> None:
    """Check, before any work is launched, that outputs can be put on the requested device."""
    there = config.output_device
    if there is None:
        return
    if config.merge_output is False and there.type != "cpu":
        raise ValueError(
            f"merge_output=False leaves outputs in microbatches on the host, but output_device is {there}; leave "
            "one of them None, or move the outputs yourself"
        )
    try:
        torch.empty(0, device=there)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"output_device is {there}, but torch cannot create a tensor there: {error}") from error


def placed(merged: Any, config: RoundPipeRunConfig) -> Any:
    """Return the merged outputs, copied to the requested device if there is one."""
    if config.output_device is None:
        return merged
    return rp_batch.map_leaves(
        lambda leaf: leaf.to(config.output_device) if isinstance(leaf, torch.Tensor) else leaf, merged
    )


def merged(
    outputs: Sequence[Any], parts: rp_batch.Parts[Any], config: RoundPipeRunConfig, model: object = None
) -> Any:
    """Return the outputs of the batch, given those of its microbatches, or these if they stay apart.

    `model`: which made them; see `of_batch`.
    """
    if config.merge_output is False:
        return outputs
    if config.merge_output is not None:
        return placed(rp_batch.merge(outputs, config.merge_output, sizes=parts.sizes), config)
    return placed(of_batch(outputs, parts, model), config)


def of_batch(outputs: Sequence[Any], parts: rp_batch.Parts[Any], model: object = None) -> Any:
    """Merge outputs by default rules. A field that some lack is that of the others.

    So are features of images, where a microbatch has no image. `model`: a row of rp_presets tells which lists have
    an entry for each image or sample.

    Raises rp_batch's `MergeError` for lists of which that is unknown.
    """
    lists: Lists = getattr(model, "growing_lists", {}) if len(outputs) > 1 else {}
    fields = [set(cast("Mapping[str, Any]", one)) if isinstance(one, Mapping) else set[str]() for one in outputs]
    lacking = set[str]().union(*fields) - fields[0].intersection(*fields)
    common = [_without(one, lacking) if lacking else one for one in outputs]
    whole = rp_batch.merge(common, joining(common[0], lists), sizes=parts.sizes)
    if not lacking:
        return whole
    others = {
        name: of_some([one.get(name) for one in outputs], parts.sizes, below(lists, name))
        for name in sorted(lacking)
    }
    return type(whole)(**whole, **others)


def _without(output: Any, names: set[str]) -> Any:
    return type(output)(**{name: output[name] for name in output if name not in names})
