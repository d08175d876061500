"""Which images belong to which samples of a batch: placeholders among the tokens consume them in order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, ClassVar, cast

from torch import Tensor

from rp_presets.errors import UnsupportedModel
from rp_presets.images.measures import Area, Measure


@dataclass(frozen=True, slots=True)
class Images:
    """How the images, or the videos, in a call's arguments belong to its samples.

    `names`: the arguments that hold images. `token`: the placeholder of a feature of an image in `input_ids`.
    `measure`: how many features each image has. `grid`: the argument with a row for each image whose product is
    how many entries it has in arguments that hold patches of all images in one tensor; empty if none do. `dims`:
    along which dimension these lie, if not the first; there a patch may have several entries, its pixels.
    `counts`: the argument that tells how many images each sample has, or each that has some; empty if none does.

    >>> import torch
    >>> from rp_presets.images.measures import Alike
    >>> images = Images(("pixel_values",), 9, Alike("pixel_values"), "")
    >>> ids = torch.tensor([[1, 9, 9, 2, 9, 9], [1, 2, 3, 4, 5, 6], [9, 9, 1, 2, 3, 4]])
    >>> images.entries({"input_ids": ids, "pixel_values": torch.zeros(3, 3, 8, 8)})
    {'pixel_values': (2, 0, 1)}
    """

    names: tuple[str, ...]
    token: int
    measure: Measure
    grid: str
    dims: Mapping[str, int] = field(default_factory=dict[str, int])
    counts: str = ""

    def entries(self, arguments: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return how many entries of each argument that holds images each sample has.

        Raises `ValueError` where placeholders and images disagree, with the sample.
        """
        given = _given(arguments, self.names)
        _refuse_others(arguments, self.names)
        if not given:
            return {}
        ids = arguments.get("input_ids")
        if not isinstance(ids, Tensor):
            raise ValueError(
                f"input_ids must be given beside {next(iter(given))}: their placeholders, token {self.token}, say "
                "which images belong to which sample, and inputs_embeds do not"
            )
        if self.grid and self.grid not in given:
            raise ValueError(
                f"{self.grid} must be given beside {next(iter(given))}: it has a row for each image or video"
            )
        wanted = cast("list[int]", (ids == self.token).sum(-1).tolist())  # pyright: ignore[reportUnknownMemberType]
        owned = _owned(wanted, _scaled(self.measure.weights(given), sum(wanted)))
        found: dict[str, tuple[int, ...]] = {}
        for name in given:
            if name == self.counts:
                found[name] = _counted(name, given[name], owned)
                continue
            lengths = self._lengths(name, given, owned[-1].stop)
            found[name] = tuple(sum(lengths[image] for image in own) for own in owned)
        return found

    def places(self, name: str, arguments: Mapping[str, Any]) -> list[tuple[slice, ...]]:
        """Return the index of each image's entries in one argument."""
        given = {name: arguments[name] for name in self.names if isinstance(arguments.get(name), Tensor)}
        lengths = self._lengths(name, given, len(self.measure.weights(given)))
        before = (slice(None),) * self.dims.get(name, 0)
        return [(*before, slice(start, stop)) for start, stop in pairwise(accumulate(lengths, initial=0))]

    def _lengths(self, name: str, given: Mapping[str, Tensor], images: int) -> list[int]:
        """Return how many entries of an argument each image has."""
        length = given[name].shape[self.dims.get(name, 0)]
        if name not in self.dims and length == images:
            return [1] * images
        patches = Area(self.grid).weights(given) if self.grid in given else []
        each = length // max(sum(patches), 1) if name in self.dims else 1
        if length != each * sum(patches):
            raise ValueError(
                f"{name} must have an entry for each of {images} images, or for each of their {sum(patches)} "
                f"patches, but its shape is {tuple(given[name].shape)}"
            )
        return [each * one for one in patches]


@dataclass(frozen=True, slots=True)
class BySample:
    """Arguments that hold the images of each sample in one entry, padded with zeros.

    `names`: these arguments. `token`: the placeholder of a feature of an image in `input_ids`; None: unknown.

    >>> import torch
    >>> images = BySample(("pixel_values",), 9)
    >>> ids, pixels = torch.tensor([[1, 9], [1, 2]]), torch.zeros(2, 1, 3, 8, 8)
    >>> images.used({"input_ids": ids, "pixel_values": pixels})
    {'pixel_values': (True, False)}
    """

    names: tuple[str, ...]
    token: int | None = None
    dims: ClassVar[Mapping[str, int]] = {}

    def entries(self, arguments: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """See `Images.entries`."""
        given = _given(arguments, self.names)
        if self.names:
            _refuse_others(arguments, self.names)
        return {name: (1,) * len(value) for name, value in given.items()}

    def used(self, arguments: Mapping[str, Any]) -> dict[str, tuple[bool, ...]]:
        """Return whether each sample has images, by argument. Models raise where none of a batch has.

        Raises `ValueError` for a sample with an image that has no placeholder.
        """
        given, ids = _given(arguments, self.names), arguments.get("input_ids")
        if not given or self.token is None or not isinstance(ids, Tensor):
            return {}
        found = cast("list[bool]", (ids == self.token).any(-1).tolist())  # pyright: ignore[reportUnknownMemberType]
        for name, value in given.items():
            for sample, one in enumerate(value if value.is_floating_point() else ()):
                if not found[sample] and bool(one.any()):
                    raise ValueError(
                        f"sample {sample} has an image in {name}, but no placeholder of one, token {self.token}, "
                        "in input_ids; give it one, or zeros in place of the image"
                    )
        return dict.fromkeys(given, tuple(found))


@dataclass(frozen=True, slots=True)
class WithVideos:
    """Images and videos, each of which fill placeholders of their own, or else are never in one call."""

    images: Images | BySample
    videos: Images

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments that hold images or videos."""
        return (*self.images.names, *self.videos.names)

    @property
    def dims(self) -> Mapping[str, int]:
        """Along which dimension these lie, if not the first."""
        return {**self.images.dims, **self.videos.dims}

    def entries(self, arguments: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """See `Images.entries`."""
        self._check_apart(arguments)
        both = (self.images, self.videos), (self.videos, self.images)
        parts = (own.entries(_without(arguments, other.names)) for own, other in both)
        return {name: counts for part in parts for name, counts in part.items()}

    @property
    def are_apart(self) -> bool:
        """Whether images and videos fill the same placeholders, so that no call has both."""
        return self.images.token == self.videos.token

    def _check_apart(self, arguments: Mapping[str, Any]) -> None:
        given = [_given(arguments, one.names) for one in (self.images, self.videos)]
        if self.are_apart and all(given):
            raise ValueError(
                f"{next(iter(given[0]))} and {next(iter(given[1]))} cannot be given in one call: images and "
                f"videos fill the same placeholders, token {self.videos.token}, so the model takes one of both"
            )

    def used(self, arguments: Mapping[str, Any]) -> dict[str, tuple[bool, ...]]:
        """See `BySample.used`."""
        return self.images.used(arguments) if isinstance(self.images, BySample) else {}


@dataclass(frozen=True, slots=True)
class Unseen:
    """Images that a row cannot take. `reason`: what prevents it."""

    reason: str
    names: ClassVar[tuple[str, ...]] = ()
    dims: ClassVar[Mapping[str, int]] = {}

    def entries(self, arguments: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Raise `UnsupportedModel` if there are images; see `Images.entries`."""
        for name, value in arguments.items():
            if name.startswith("pixel_values") and value is not None:
                raise UnsupportedModel(
                    f"{name} cannot be given: the model is a row of layers for tokens alone. With images: "
                    f"{self.reason}. Observe it with arguments like these, wrap_model_to_roundpipe(model, "
                    "example_inputs=...), or wrap it with use_sequential_preset=False"
                )
        return {}


def _without(arguments: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in names}


def _given(arguments: Mapping[str, Any], names: Sequence[str]) -> dict[str, Tensor]:
    """Return those arguments that are given. Raises `ValueError` for one that is no tensor, such as a list."""
    given = {name: arguments[name] for name in names if arguments.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be one tensor, but is a {type(value).__name__}; concatenate it")
    return given


def _refuse_others(arguments: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise `UnsupportedModel` for pixels of which it is unknown how they belong to samples, such as of videos."""
    others = (name for name in arguments if name.startswith("pixel_values") and name not in names)
    if (name := next((name for name in others if arguments[name] is not None), None)) is not None:
        raise UnsupportedModel(
            f"{name} cannot be given: the row knows only how {', '.join(names)} belong to samples; observe it "
            "with arguments like these, wrap_model_to_roundpipe(model, example_inputs=...), or wrap it with "
            "use_sequential_preset=False"
        )


def _scaled(weights: Sequence[int], placeholders: int) -> list[int]:
    """Return the features of each image, given that all images have as many as there are placeholders."""
    whole = sum(weights)
    found = [weight * placeholders / max(whole, 1) for weight in weights]
    if not all(one.is_integer() and one > 0 for one in found):
        raise ValueError(
            f"the batch has {placeholders} placeholders of images, which {len(weights)} images cannot fill: their "
            f"features are as {_brief(weights)}; each image that is given must have its placeholders in input_ids"
        )
    return [int(one) for one in found]


def _owned(wanted: Sequence[int], features: Sequence[int]) -> list[range]:
    """Return the images of each sample. `wanted`: the placeholders of each sample."""
    found: list[range] = []
    image = 0
    for sample, placeholders in enumerate(wanted):
        first, filled = image, 0
        while filled < placeholders and image < len(features):
            filled += features[image]
            image += 1
        if filled != placeholders:
            raise ValueError(
                f"sample {sample} must have as many placeholders as whole images have features, but has "
                f"{placeholders}: the images from number {first} on have {_brief(features[first:])}; each image "
                "must belong to one sample, in the order of the samples"
            )
        found.append(range(first, image))
    return found


def _counted(name: str, counts: Tensor, owned: Sequence[range]) -> tuple[int, ...]:
    """Return how many entries each sample has in counts of images, which may leave out samples without any."""
    some = [own for own in owned if own]
    told = cast("list[int]", counts.tolist())  # pyright: ignore[reportUnknownMemberType]
    for samples in (owned, some):
        if told == [*map(len, samples)]:
            return tuple(1 if len(samples) == len(owned) else len(own[:1]) for own in owned)
    raise ValueError(
        f"{name} must say how many images each sample has, {_brief([*map(len, owned)])} by their placeholders, "
        f"but is {_brief(told)}"
    )


def _brief(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:6]))
    return f"({shown}, ...)" if len(numbers) > 6 else f"({shown})"
