"""A call's outputs: merged into those of the batch, on the host or on the device that was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import rp_batch
import torch
from rp_engine import RoundPipeRunConfig


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


def merged(outputs: Sequence[Any], parts: rp_batch.Parts[Any], config: RoundPipeRunConfig) -> Any:
    """Return the outputs of the batch, given those of its microbatches, or these if they stay apart."""
    if config.merge_output is False:
        return outputs
    if config.merge_output is not None:
        return placed(rp_batch.merge(outputs, config.merge_output, sizes=parts.sizes), config)
    return placed(of_batch(outputs, parts), config)


def of_batch(outputs: Sequence[Any], parts: rp_batch.Parts[Any]) -> Any:
    """Merge outputs by default rules. A field that some lack is that of the others.

    So are features of images, where a microbatch has no image.
    """
    fields = [set(cast("Mapping[str, Any]", one)) if isinstance(one, Mapping) else set[str]() for one in outputs]
    lacking = set[str]().union(*fields) - fields[0].intersection(*fields)
    if not lacking:
        return rp_batch.merge(outputs, sizes=parts.sizes)
    common = [type(one)(**{name: one[name] for name in one if name not in lacking}) for one in outputs]
    others = {name: rp_batch.merge([one[name] for one in outputs if name in one]) for name in sorted(lacking)}
    whole = rp_batch.merge(common, sizes=parts.sizes)
    return type(whole)(**whole, **others)
