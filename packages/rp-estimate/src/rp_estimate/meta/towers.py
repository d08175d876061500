"""Estimate a model's vision tower: the patches and tokens of images, and what they take, from a config alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from rp_trainer.errors import Refused
from torch import Tensor, nn

from rp_estimate.images import ImageSizes
from rp_estimate.meta.facts import Growth, LayerAmounts, Observed

_PATCHES = ("spatial_merge_size", "merge_size")
# Attention multiplies twice, at two operations each: queries with keys, and weights with values.
_ATTENTION_FLOPS = 4


@dataclass(frozen=True, slots=True)
class Patches:
    """What an image is for a model. `patches`: of its tower. `tokens`: of the sequence."""

    patches: int
    tokens: int


def patches_of(config: Any, images: ImageSizes) -> Patches:
    """Return the patches and tokens of an image of this size, by a model's config.

    A tower takes images of many sizes, in whole groups of merged patches, or all resized to one. What only the
    processor says, such as bounds of pixels, is not known here.

    Raises `Refused` for a config that tells neither.
    """
    vision: Any = getattr(config, "vision_config", None)
    side = _number(vision, "patch_size")
    if vision is None or not side:
        raise Refused(f"--images is for models that read images, but {config.model_type} has no tower of patches")
    merge = next((found for name in _PATCHES if (found := _number(vision, name))), 0)
    if merge:
        rows, columns = (max(1, round(pixels / (side * merge))) for pixels in (images.height, images.width))
        return Patches(rows * columns * merge**2, rows * columns)
    fixed = _number(vision, "image_size")
    tokens = _number(config, "mm_tokens_per_image") or _number(config, "image_seq_length")
    if fixed and tokens and not getattr(config, "image_grid_pinpoints", None):
        return Patches((fixed // side) ** 2, tokens)
    raise Refused(
        f"--images: how many tokens an image becomes is not known from the config of a {config.model_type}; omit "
        "it, and count them in --sequence"
    )


@dataclass(frozen=True, slots=True)
class Shown:
    """The images of a sequence. `count`: how many it has, on average. `each`: what one is. `line`: for people.

    `is_of_data`: they are in data, rather than asked about.
    """

    count: float
    each: Patches
    line: str
    is_of_data: bool = False

    @classmethod
    def of_size(cls, config: Any, images: ImageSizes) -> Shown:
        """Return images of one size, whose tokens come beside a sequence. Raises `Refused` as `patches_of`."""
        each = patches_of(config, images)
        return cls(images.count, each, told(images, each))

    @classmethod
    def of_data(cls, config: Any, images: int, tokens: int, sequences: int) -> Shown | None:
        """Return the images of data, which take so many of the tokens of all sequences.

        None: there are none, or the config does not tell how many patches a token stands for.
        """
        if not images or not tokens:
            return None
        try:
            # Any size: in whole groups of merged patches, or always the same.
            usual = patches_of(config, ImageSizes(1, 448, 448))
        except Refused:
            return None
        each = Patches(round(tokens / images * usual.patches / usual.tokens), round(tokens / images))
        count = images / sequences
        size = f"{each.patches:,} patches and {each.tokens:,} tokens"
        line = f"{count:.3g} images a sequence on average, of {size} each"
        return cls(count, each, line, is_of_data=True)


def _number(config: Any, name: str) -> int:
    value = getattr(config, name, 0)
    return value if isinstance(value, int) else 0


def with_towers(observed: Observed, model: nn.Module, shown: Shown) -> Observed:
    """Add the tower of each sequence's images to the part before the layers, in which the engine runs it.

    Each weight counts two operations for each patch, and attention goes over all patches of an image. All that is
    kept for backward is kept at once, since the tower is one part of the row.

    Raises `Refused` if the model could not be observed, so that its tower is not told from its layers.
    """
    if not observed.is_counted:
        raise Refused(
            f"--images: a {type(model).__name__} cannot be run without its weights, so its tower is not known; "
            "omit it"
        )
    weights = _tower(observed, model)
    rows = round(shown.count * shown.each.patches)
    numel = sum(one.numel() for one in weights)
    attention = _ATTENTION_FLOPS * rows * shown.each.patches * _width(model) * tower_layers(model)
    trained = sum(one.numel() for one in weights if one.requires_grad)
    forward = 2 * rows * numel + attention
    backward = forward + 2 * rows * trained + attention if trained else 0
    widths = [(one.shape[0] + one.numel() // one.shape[0]) * one.element_size() for one in weights]
    kept = rows * sum(widths) if trained else 0
    return replace(
        observed,
        facts=(
            _added(observed.facts[0], forward, backward, kept, rows * max(widths, default=0)),
            *observed.facts[1:],
        ),
    )


def _added(facts: LayerAmounts, forward: int, backward: int, kept: int, working: int) -> LayerAmounts:
    return LayerAmounts(
        _more(facts.forward_flops, forward),
        _more(facts.backward_flops, backward),
        facts.boundary_bytes,
        _more(facts.kept_bytes, kept),
        (*facts.held_bytes, Growth(working)),
    )


def _more(growth: Growth, each: int) -> Growth:
    return Growth(growth.each + each, growth.shared)


def _tower(observed: Observed, model: nn.Module) -> Sequence[Tensor]:
    """Return the matrices that no token passes, as a pass over text has shown: they are in the part before."""
    before = {id(one) for one in observed.modules[0].parameters()}
    words: Any = cast(Any, model).get_input_embeddings()
    return [
        one
        for name, one in model.named_parameters()
        if id(one) in before and one is not words.weight and one.ndim > 1 and "position" not in name
    ]


def _vision(model: nn.Module) -> Any:
    return cast(Any, model).config.vision_config


def tower_layers(model: nn.Module) -> int:
    """Return the number of layers of a model's tower."""
    vision = _vision(model)
    return _number(vision, "depth") or _number(vision, "num_hidden_layers") or 1


def _width(model: nn.Module) -> int:
    vision = _vision(model)
    return _number(vision, "hidden_size") or _number(vision, "embed_dim")


def told(images: ImageSizes, patches: Patches) -> str:
    """Return a line on images, for people.

    >>> told(ImageSizes(2, 64, 32), Patches(8, 2))
    '2 images of 64 x 32 a sequence: 16 patches, and 4 tokens beside --sequence; the processor may resize them'
    """
    count = "1 image" if images.count == 1 else f"{images.count} images"
    return (
        f"{count} of {images.height} x {images.width} a sequence: {images.count * patches.patches:,} patches, and "
        f"{images.count * patches.tokens:,} tokens beside --sequence; the processor may resize them"
    )
