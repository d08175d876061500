"""Prove which images belong to which samples: change one image, and see which samples change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rp_presets.errors import UnsupportedModel
from rp_presets.images.examples import OWNERS, Example
from rp_presets.observing.randomness import seed_generators
from rp_presets.rows.carry import Carry
from rp_presets.rows.glue import Prologue
from rp_presets.rows.layout import RowLayout
from rp_presets.rows.trees import leaves


def prove_belonging(model: nn.Module, layout: RowLayout, example: Example) -> None:
    """Raise `UnsupportedModel` unless each image changes what layers get of its own sample, and of no other.

    And unless a sample with images gives the layers the same by itself as among others.
    """
    # Without dropout, which draws other numbers for a sample by itself.
    model.eval()
    try:
        _prove(Prologue(model, layout), example)
    finally:
        model.train()


def _prove(prologue: Prologue, example: Example) -> None:
    samples = len(example.arguments["input_ids"])
    before = _given_to_layers(prologue, example.arguments, samples)
    for image, owner in enumerate(OWNERS):
        after = _given_to_layers(prologue, _with_another(example, image), samples)
        changed = {
            sample
            for one, other in zip(before, after, strict=True)
            for sample in range(samples)
            if not torch.equal(one[sample], other[sample])
        }
        if changed != {owner}:
            raise UnsupportedModel(
                f"image {image} of sample {owner} changes the samples {sorted(changed)}: it is unknown which "
                "images belong to which samples"
            )

    for sample in sorted(set(OWNERS)):
        _prove_alone(prologue, example, sample)


def _prove_alone(prologue: Prologue, example: Example, sample: int) -> None:
    seed_generators(0)
    among = _floating(prologue(**example.arguments))
    seed_generators(0)
    alone = _floating(prologue(**example.of_sample(sample)))
    if len(among) != len(alone):
        return
    for one, other in zip(among, alone, strict=True):
        if (own := _of_sample(one, other, sample)) is not None and not _close(own, other):
            raise UnsupportedModel(
                f"sample {sample} gives its layers other numbers by itself than among others, as where images are "
                "numbered through the batch"
            )


def _of_sample(among: Tensor, alone: Tensor, sample: int) -> Tensor | None:
    """Return the part of a tensor that a sample has; None if that is unknown from the shapes."""
    if among.ndim != alone.ndim:
        return None
    other = [dim for dim in range(among.ndim) if among.shape[dim] != alone.shape[dim]]
    if len(other) != 1 or alone.shape[other[0]] != 1:
        return None
    return among.narrow(other[0], sample, 1)


def _close(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal but for roundings, which depend on the size of a batch."""
    allowed = torch.finfo(one.dtype).eps ** 0.5 * _largest(one)
    return torch.allclose(one.float(), other.float(), rtol=0, atol=allowed, equal_nan=True)


def _largest(tensor: Tensor) -> float:
    finite = tensor.float().nan_to_num(0.0, 0.0, 0.0)
    return float(finite.abs().max()) if tensor.numel() else 0.0


def _given_to_layers(prologue: Prologue, arguments: Mapping[str, Any], samples: int) -> list[Tensor]:
    """Return the tensors that begin with the samples, of those that the first layers get."""
    seed_generators(0)
    return [one for one in _floating(prologue(**arguments)) if one.shape[:1] == (samples,)]


def _floating(carry: Carry) -> list[Tensor]:
    return [leaf for leaf in leaves(carry.values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _with_another(example: Example, image: int) -> dict[str, Any]:
    """Return the arguments with other pixels in one image."""
    changed = dict(example.arguments)
    for name in example.images.names:
        if name in changed and changed[name].is_floating_point():
            pixels = changed[name] = changed[name].clone()
            place = example.place(name, image)
            pixels[place] = pixels[place] * 0.5 + 0.3
    return changed
