"""A few samples with images to observe a model with: one with two images, one without, one with one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from rp_presets.errors import UnsupportedModel
from rp_presets.images.belonging import BySample, Images
from rp_presets.images.forms import VideoForm, forms, video_forms
from rp_presets.images.measures import features, measures
from rp_presets.observing.inputs import usual_tokens

# The sample of each image.
OWNERS = (0, 0, 2)
_PLACEHOLDERS = ("image_token_id", "image_token_index", "img_token_id", "image_patch_id")
# Of LLaVA-OneVision: one image of a sample is in tiles, several are not.
_COUNTS = "batch_num_images"
_OF_VIDEOS = ("video_token_id", "video_token_index")
# What kinds of tokens are called where a model is told of them.
_IMAGE, _VIDEO = 1, 2


@dataclass(frozen=True, slots=True)
class Example:
    """Arguments of a model's forward with images, and how these belong to its samples."""

    arguments: dict[str, Any]
    images: Images | BySample

    def of_sample(self, sample: int) -> dict[str, Any]:
        """Return the arguments of one sample that has images."""
        entries = self.images.entries(self.arguments)
        found = {name: value[sample : sample + 1] for name, value in self.arguments.items() if name not in entries}
        for name, counts in entries.items():
            dim = self.images.dims.get(name, 0)
            found[name] = self.arguments[name].narrow(dim, sum(counts[:sample]), counts[sample])
        return found

    def place(self, name: str, image: int) -> Any:
        """Return the index of the pixels of one image in an argument."""
        if isinstance(self.images, BySample):
            return OWNERS[image], OWNERS[:image].count(OWNERS[image])
        return self.images.places(name, self.arguments)[image]


def takes_images(model: nn.Module) -> bool:
    """Return whether a model's forward takes images beside tokens.

    >>> takes_images(nn.Linear(1, 1))
    False
    """
    names = _parameters(model)
    return "input_ids" in names and "pixel_values" in names and hasattr(model, "config")


def examples(model: nn.Module) -> Iterator[Example]:
    """Yield samples with images in each form that the model's own `get_image_features` takes.

    Raises `UnsupportedModel` if it takes none of those that are known.
    """
    seeing = next((one for one in _towers(model) if hasattr(one, "get_image_features")), None)
    if seeing is None:
        raise UnsupportedModel("it has no get_image_features, which tells how many features an image has")
    refused: list[str] = []
    made = 0
    for given in forms(cast(Any, model).config, _parameters(model)):
        taken = {name: value for name, value in given.items() if name in _parameters(seeing, "get_image_features")}
        try:
            own, total = features(seeing, taken)
        except Exception as error:  # the model's own code, which was not made for this form
            refused.append(f"{_form(given)}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            continue
        for example in _with_tokens(model, seeing, given, own, total):
            made += 1
            yield example
    if not made:
        raise UnsupportedModel(f"it takes images in no form that is known: {'; '.join(refused)}")


def video_examples(model: nn.Module) -> Iterator[Example]:
    """Yield samples with videos in each form that the model's own `get_video_features` takes; none if it has none.

    Placeholders of a video are in one piece, or in one for each of its frames; they may be those of images.
    """
    method = "get_video_features"
    seeing = next((one for one in _towers(model) if hasattr(one, method)), None)
    if seeing is None:
        return
    for video in video_forms(cast(Any, model).config, _parameters(model)):
        taken = {name: value for name, value in video.given.items() if name in _parameters(seeing, method)}
        try:
            _, total = features(seeing, taken, method)
        except Exception:  # the model's own code, which was not made for this form
            continue
        yield from _shown(model, video, total)


def _shown(model: nn.Module, video: VideoForm, total: int) -> Iterator[Example]:
    """Yield samples with the videos of a form. `total`: the features of all."""
    weights = video.measure.weights(video.given)
    counts = [one * total // sum(weights) for one in weights]
    if sum(counts) != total:
        return
    config = cast(Any, model).config
    named = [getattr(config, name, None) for name in (*_OF_VIDEOS, *_PLACEHOLDERS)]
    for token in dict.fromkeys(one for one in named if isinstance(one, int)):
        belonging = Images(tuple(video.given), token, video.measure, video.grid)
        for pieces in dict.fromkeys((video.pieces, (1,) * len(counts))):
            if not any(count % times for count, times in zip(counts, pieces, strict=True)):
                each = [[count // times] * times for count, times in zip(counts, pieces, strict=True)]
                yield _example(model, video.given, token, each, belonging, _VIDEO)


def both(example: Example, video: Example) -> dict[str, Any]:
    """Return the arguments of samples that have the images of one example and the videos of another."""
    return {
        name: torch.cat([value, video.arguments[name]], 1) if name in video.arguments else value
        for name, value in example.arguments.items()
    } | {name: video.arguments[name] for name in video.images.names}


def _with_tokens(
    model: nn.Module, seeing: nn.Module, given: Mapping[str, Tensor], own: list[int] | None, total: int
) -> Iterator[Example]:
    token = _placeholder(cast(Any, model).config)
    if given["pixel_values"].ndim == 5 and "image_sizes" not in given:
        each = total // len(OWNERS)
        yield _example(model, given, token, [[each]] * len(OWNERS), BySample(tuple(given), token))
        return
    rows = [name for name, value in given.items() if not value.is_floating_point()]
    grid, dims = _grid(given, rows)
    for measure in measures(seeing, given):
        weights = measure.weights(given)
        counts = [weight * total / sum(weights) for weight in weights]
        if len(counts) != len(OWNERS) or not all(map(float.is_integer, counts)) or own not in (None, counts):
            continue
        pieces = [[int(one)] for one in counts]
        counted = [name for name in _parameters(model) if name == _COUNTS]
        belonging = Images((*given, *counted), token, measure, grid, dims, "".join(counted))
        yield _example(model, given, token, pieces, belonging)
        return


def _grid(given: Mapping[str, Tensor], rows: Sequence[str]) -> tuple[str, dict[str, int]]:
    """Return the argument that counts the patches of each image, if any, and where these lie, if not first."""
    shape = given["pixel_values"].shape
    for name in rows:
        patches = int(given[name].prod(-1).sum())
        if shape[0] == patches:
            return name, {}
        if shape[0] == 1 and shape[-1] % patches == 0:
            return name, {"pixel_values": len(shape) - 1}
    return "", {}


def _example(
    model: nn.Module,
    given: Mapping[str, Tensor],
    token: int,
    pieces: Sequence[Sequence[int]],
    images: Images | BySample,
    kind: int = _IMAGE,
) -> Example:
    ids = _tokens(cast(Any, model).config, token, pieces)
    kinds = (ids == token).long() * kind
    names = _parameters(model)
    more = {name: kinds for name in names if name.endswith("token_type_ids")}
    device = next((one.device for one in model.parameters() if not one.is_meta), None)
    arguments = {"input_ids": ids, **given, **more}
    return Example({name: value.to(device) for name, value in arguments.items()}, images)


def _tokens(config: Any, token: int, pieces: Sequence[Sequence[int]]) -> Tensor:
    """Return rows of tokens with placeholders in place of each image, in pieces of these lengths."""
    usual = iter(usual_tokens(config) * 100)
    before, after = (_number(config, f"vision_{side}_token_id") for side in ("start", "end"))
    rows: list[list[int]] = [[next(usual), next(usual)] for _ in range(3)]
    for owner, own in zip(OWNERS, pieces, strict=True):
        for count in own:
            rows[owner] += [*before, *[token] * count, *after, next(usual)]
    longest = max(map(len, rows)) + 1
    return torch.tensor([[*row, *(next(usual) for _ in range(longest - len(row)))] for row in rows])


def _number(config: Any, name: str) -> list[int]:
    value = getattr(config, name, None)
    return [value] if isinstance(value, int) else []


def _placeholder(config: Any) -> int:
    for name in _PLACEHOLDERS:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    raise UnsupportedModel(f"its config names no placeholder of images: none of {', '.join(_PLACEHOLDERS)}")


def _towers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that may have `get_image_features`: first the one inside, which the model calls."""
    base = cast(nn.Module, getattr(model, "get_base_model", lambda: model)())
    inside = getattr(base, "model", None)
    return [*([inside] if isinstance(inside, nn.Module) else []), base]


def _parameters(model: nn.Module, method: str = "forward") -> list[str]:
    base = cast(nn.Module, getattr(model, "get_base_model", lambda: model)())
    return list(inspect.signature(getattr(type(base), method)).parameters)


def _form(given: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(value.shape)}" for name, value in given.items())
