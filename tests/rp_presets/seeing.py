"""A tiny model with random weights of every class of transformers that reads images beside text, and its calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from comparison import Inputs, takes
from families import HIDDEN, Families, merged
from rp_presets.images.belonging import BySample
from rp_presets.images.examples import Example, examples
from torch import Tensor, nn

# Towers whose features have the size that the language model reads.
OUT: dict[str, Any] = {"vision_config": {"out_hidden_size": HIDDEN}}

OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "Cosmos3OmniForConditionalGeneration",
            "Glm46VForConditionalGeneration",
            "Glm4vForConditionalGeneration",
            "Glm4vMoeForConditionalGeneration",
            "GlmOcrForConditionalGeneration",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        OUT,
    ),
    **dict.fromkeys(
        (
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration",
            "Qwen3OmniMoeThinkerForConditionalGeneration",
        ),
        merged(OUT, {"vision_config": {"deepstack_visual_indexes": [0, 1]}}),
    ),
    "Gemma3ForConditionalGeneration": {"mm_tokens_per_image": 4},
}


def seeing_families(without: Collection[str] = ()) -> Families:
    """Every class that reads images beside text, by name, in the order of transformers' mapping."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

    return Families((name for name in NAMES.values() if name not in without), OVERRIDES)


def example_of(model: nn.Module) -> Example:
    """The first samples with images that the model itself takes: images of up to three sizes."""
    with torch.no_grad():
        for example in examples(model):
            try:
                model(**example.arguments)
            except (RuntimeError, ValueError, IndexError, TypeError):
                continue
            return example
    raise ValueError(f"{type(model).__name__} takes no images")


def batch_of(model: nn.Module, owned: Sequence[Sequence[int]]) -> Inputs:
    """A batch with labels, padded. `owned`: for each sample, which of the example's images it has, in order."""
    example = example_of(model)
    features = features_of(example)
    token = placeholder(example)
    generator = torch.Generator().manual_seed(len(owned))
    rows = [row_of(token, [features[image] for image in images], generator) for images in owned]
    longest = max(map(len, rows))
    ids = torch.stack([torch.cat([row, torch.full((longest - len(row),), 4)]) for row in rows])
    mask = torch.stack([(torch.arange(longest) < len(row)).long() for row in rows])
    labels = ids.masked_fill((mask == 0) | (ids == token), -100)
    batch: Inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    for name in example.arguments:
        if name.endswith("token_type_ids"):
            batch[name] = (ids == token).long()
    if any(owned):
        batch |= {name: images_in(example, name, owned) for name in example.images.names}
    return batch if takes(model, "attention_mask") else {**batch, "attention_mask": None}


def images_in(example: Example, name: str, owned: Sequence[Sequence[int]]) -> Tensor:
    """An argument that holds the chosen images of each sample."""
    value = example.arguments[name]
    if not isinstance(example.images, BySample):
        return torch.cat([value[example.place(name, image)] for images in owned for image in images])
    padded = value.new_zeros(len(owned), max(map(len, owned)), *value.shape[2:])
    for sample, images in enumerate(owned):
        for slot, image in enumerate(images):
            padded[sample, slot] = value[example.place(name, image)]
    return padded


def features_of(example: Example) -> list[int]:
    """How many placeholders each image of an example has."""
    total = int((example.arguments["input_ids"] == placeholder(example)).sum())
    if isinstance(example.images, BySample):
        return [total // 3] * 3
    weights = example.images.measure.weights({name: example.arguments[name] for name in example.images.names})
    return [weight * total // sum(weights) for weight in weights]


def placeholder(example: Example) -> int:
    """The token that stands for a feature of an image: the one that the first sample has most of."""
    return int(example.arguments["input_ids"][0].mode().values)


def row_of(token: int, features: Sequence[int], generator: torch.Generator) -> Tensor:
    """The tokens of a sample, with the placeholders of its images between others."""
    text = torch.randint(4, 70, (4 + 2 * len(features),), generator=generator)
    parts = [text[:3]]
    for number, count in enumerate(features):
        parts += [torch.full((count,), token), text[3 + 2 * number : 5 + 2 * number]]
    return torch.cat([*parts, text[-1:]])
