"""How many features each image of a batch has, in proportion, from the arguments that describe the images."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

Given = Mapping[str, Tensor]


class Measure(Protocol):
    """Tells how many features the images of a batch have."""

    def weights(self, given: Given) -> list[int]:
        """Return numbers in proportion to the features of each image. `given`: the arguments that hold images."""
        ...


@dataclass(frozen=True, slots=True)
class Alike:
    """All images, or tiles, have as many: the entries of one argument.

    >>> Alike("pixel_values").weights({"pixel_values": torch.zeros(2, 3, 8, 8)})
    [1, 1]
    """

    name: str

    def weights(self, given: Given) -> list[int]:
        """See `Measure.weights`."""
        return [1] * len(given[self.name])


@dataclass(frozen=True, slots=True)
class Area:
    """As many as the product of a row: of a grid, of a height and a width, or of a number alone.

    >>> Area("image_grid_thw").weights({"image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 8]])})
    [16, 32]
    """

    name: str

    def weights(self, given: Given) -> list[int]:
        """See `Measure.weights`."""
        rows = given[self.name]
        return _numbers(rows.reshape(len(rows), -1).prod(-1))


@dataclass(frozen=True, slots=True)
class Marked:
    """As many as there are positions that are no padding, which is negative, or zero in a mask.

    >>> Marked("mask").weights({"mask": torch.tensor([[1, 1, 0], [1, 1, 1]])})
    [2, 3]
    """

    name: str

    def weights(self, given: Given) -> list[int]:
        """See `Measure.weights`."""
        marks = given[self.name]
        real = marks > 0 if marks.ndim == 2 else (marks >= 0).all(-1)
        return _numbers(real.flatten(1).sum(-1))


@dataclass(frozen=True, slots=True)
class Summed:
    """As many as there are positions that are no padding in all frames of a video. `counts`: its frames.

    >>> given = {"at": torch.tensor([[[0, 0], [0, 1]], [[0, 0], [-1, -1]]]), "frames": torch.tensor([1, 1])}
    >>> Summed("at", "frames").weights(given)
    [2, 1]
    """

    name: str
    counts: str

    def weights(self, given: Given) -> list[int]:
        """See `Measure.weights`. Raises `ValueError` if the videos have other frames than are counted."""
        frames, counts = Marked(self.name).weights(given), _numbers(given[self.counts])
        if len(frames) != sum(counts):
            raise ValueError(f"{self.counts} must count the {len(frames)} frames of {self.name}, but is {counts}")
        ends = [0, *accumulate(counts)]
        return [sum(frames[start:end]) for start, end in pairwise(ends)]


@dataclass(frozen=True, slots=True)
class Imitated:
    """As many as the model's own code gives for images without pixels, on a copy of the model without weights."""

    copy: nn.Module
    known: dict[Hashable, list[int]] = field(default_factory=dict[Hashable, list[int]])

    @classmethod
    def of(cls, model: nn.Module) -> Imitated:
        """Make the copy. `model`: one that has `get_image_features`."""
        make: Any = type(model)
        with torch.device("meta"):
            return cls(make(cast(Any, model).config).eval())

    def weights(self, given: Given) -> list[int]:
        """See `Measure.weights`."""
        key = _key(given)
        if key not in self.known:
            pixels = {
                name: torch.empty_like(one, device="meta") if one.is_floating_point() else one.cpu()
                for name, one in given.items()
            }
            self.known[key] = features(self.copy, pixels)[0] or []
        return self.known[key]

    def __deepcopy__(self, memo: object) -> Imitated:
        del memo
        return self


def measures(model: nn.Module, given: Given) -> Iterator[Measure]:
    """Yield measures that may be right for the images that a model takes, the simplest first."""
    whole = [name for name in given if not given[name].is_floating_point()]
    yield Alike(next(iter(given)))
    yield from (Area(name) for name in whole if given[name].ndim == 2 and given[name].shape[1] <= 3)
    yield from (Marked(name) for name in whole if given[name].ndim >= 2)
    yield Imitated.of(model)


def features(model: nn.Module, given: Given, method: str = "get_image_features") -> tuple[list[int] | None, int]:
    """Return the number of features of each image, if the tower's result tells it, and of all images.

    `model`: one that has the method.
    """
    pooled = _pooled(getattr(cast(Any, model), method)(**given, return_dict=True))
    if not isinstance(pooled, Tensor):
        own = [one.shape[:-1].numel() for one in pooled]
        return own, sum(own)
    rows = pooled.shape[:-1]
    return [rows[1:].numel()] * rows[0] if len(rows) > 1 else None, rows.numel()


def _pooled(found: Any) -> Tensor | Sequence[Tensor]:
    """Return the features in what `get_image_features` returns: one tensor, or one for each image."""
    if isinstance(found, Tensor | list | tuple):
        return cast("Tensor | Sequence[Tensor]", found)
    names = ("pooler_output", "last_hidden_state")
    pooled: Any = next((one for name in names if (one := getattr(found, name, None)) is not None), None)
    if pooled is None:
        # Pairs of a layer and the features that it adds.
        pooled = found.deepstack_features[0][1]
    return pooled


def _key(given: Given) -> Hashable:
    """Return what determines the number of features: the sizes of pixels, and all that is no pixel."""
    numbers = {name: [] if one.is_floating_point() else _numbers(one) for name, one in given.items()}
    return tuple((name, *given[name].shape, *own) for name, own in numbers.items())


def _numbers(tensor: Tensor) -> list[int]:
    return cast("list[int]", tensor.flatten().tolist())  # pyright: ignore[reportUnknownMemberType]
