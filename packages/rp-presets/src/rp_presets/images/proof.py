"""Prove which images belong to which samples: change one image, and see which samples change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rp_presets.errors import UnsupportedModel
from rp_presets.images.examples import OWNERS, Example
from rp_presets.observing.randomness import seed_generators
from rp_presets.rows.glue import Prologue
from rp_presets.rows.layout import RowLayout
from rp_presets.rows.trees import leaves


def prove_belonging(model: nn.Module, layout: RowLayout, example: Example) -> None:
    """Raise `UnsupportedModel` unless each image changes what layers get of its own sample, and of no other."""
    prologue = Prologue(model, layout)
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


def _given_to_layers(prologue: Prologue, arguments: Mapping[str, Any], samples: int) -> list[Tensor]:
    """Return the tensors that begin with the samples, of those that the first layers get."""
    seed_generators(0)
    carry = prologue(**arguments)
    found = [leaf for leaf in leaves(carry.values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return [one for one in found if one.shape[:1] == (samples,)]


def _with_another(example: Example, image: int) -> dict[str, Any]:
    """Return the arguments with other pixels in one image."""
    changed = dict(example.arguments)
    for name in example.images.names:
        if changed[name].is_floating_point():
            pixels = changed[name] = changed[name].clone()
            place = example.place(name, image)
            pixels[place] = pixels[place] * 0.5 + 0.3
    return changed
