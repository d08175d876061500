"""The forms in which models take images: tensors of a few small ones, made from a config."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from rp_presets.images.measures import Alike, Area, Measure, Summed

Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a config says: `side` of an image and of a `patch`, `frames` a patch, `merge` patches a side.

    `large_side`: of an image for a second tower.
    """

    side: int
    patch: int
    frames: int
    merge: int
    channels: int
    pinpoints: tuple[tuple[int, int], ...]
    large_side: int

    @classmethod
    def of(cls, config: Any) -> Sizes:
        """Read them from a model's config."""
        configs = [*_vision_configs(config), config]
        patch = _number(_found(configs, "patch_size"), 14)
        return cls(
            _number(_found(configs, "image_size"), patch * 4),
            patch,
            _number(_found(configs, "temporal_patch_size", "patch_temporal"), 1),
            _number(_found(configs, "spatial_merge_size", "merge_size", "pooling_kernel_size"), 1),
            _number(_found(configs, "in_channels", "in_chans", "num_channels"), 3),
            tuple((one[0], one[1]) for one in _found(configs, "image_grid_pinpoints") or ()),
            _number(_found([getattr(config, "high_res_vision_config", None)], "image_size"), patch * 8),
        )


@dataclass(frozen=True, slots=True)
class VideoForm:
    """The arguments for videos. `measure`: how many features each has.

    `pieces`: in how many its placeholders may be. `grid`: the argument that
    says how many entries each has in the tensor of all, see `belonging.Images`.
    """

    given: Arguments
    measure: Measure
    pieces: tuple[int, ...]
    grid: str


def forms(config: Any, names: Collection[str]) -> Iterator[Arguments]:
    """Yield the arguments for three images in each form that a model may take. `names`: arguments of its forward.

    The first two images are of one sample and the third is of another. Where a model takes images of several
    sizes, they differ.
    """
    sizes = Sizes.of(config)
    if "pixel_values" not in names:
        return
    for form in (_grids, _strips, _positions, _shapes, _tiles, _sized, _plain, _by_sample):
        for found in form(sizes, names):
            yield found
            if found["pixel_values"].ndim >= 4 and "pixel_attention_mask" in names:
                *before, _, height, width = found["pixel_values"].shape
                yield {**found, "pixel_attention_mask": torch.ones(*before, height, width, dtype=torch.int64)}


def video_forms(config: Any, names: Collection[str]) -> Iterator[VideoForm]:
    """Yield three videos, some of several frames, in each form that a model may take, as `forms` does."""
    if "pixel_values_videos" in names:
        sizes = Sizes.of(config)
        for form in (_video_grids, _video_positions, _video_plain):
            yield from form(sizes, names)


def _video_grids(sizes: Sizes, names: Collection[str]) -> Iterator[VideoForm]:
    """Patches of all videos in one tensor, with the grid of each, as of Qwen and GLM."""
    grid = "video_grid_thw"
    if grid not in names:
        return
    # Of Qwen2.5-VL and its Omni.
    seconds = {name: torch.ones(3) for name in ("second_per_grid_ts", "video_second_per_grid") if name in names}
    for merge in dict.fromkeys((sizes.merge, 2, 1)):
        grids = torch.tensor([[2, 2, 2], [1, 2, 4], [3, 4, 2]]) * torch.tensor([1, merge, merge])
        for shape in _shapes_of_patches(sizes, merge):
            patches = varied(int(grids.prod(-1).sum()), *shape)
            yield VideoForm({"pixel_values_videos": patches, grid: grids, **seconds}, Area(grid), (2, 1, 3), grid)


def _video_positions(sizes: Sizes, names: Collection[str]) -> Iterator[VideoForm]:
    """Frames of all videos in one tensor, with the positions of their patches, as of Gemma 4."""
    positions, counts = "video_position_ids", "num_frames_per_video"
    if not {positions, counts} <= set(names):
        return
    frames = (2, 1, 3)
    for patches in _positions(sizes, ("image_position_ids",)):
        # Those of a video have one size.
        each = torch.tensor(frames)
        pixels, places = (one.repeat_interleave(each, 0) for one in patches.values())
        given = {"pixel_values_videos": varied(*pixels.shape), positions: places, counts: each}
        yield VideoForm(given, Summed(positions, counts), frames, counts)


def _video_plain(sizes: Sizes, names: Collection[str]) -> Iterator[VideoForm]:
    """Videos of as many frames of one size, as of LLaVA."""
    pixels, own = "pixel_values_videos", "image_sizes_videos"
    more = {own: torch.full((3, 4, 2), sizes.side)} if own in names else {}
    yield VideoForm(
        {pixels: varied(3, 4, sizes.channels, sizes.side, sizes.side), **more}, Alike(pixels), (1, 1, 1), ""
    )


def _grids(sizes: Sizes, names: Collection[str]) -> Iterator[Arguments]:
    """Patches of all images in one tensor, with the grid of each."""
    name = next((name for name in ("image_grid_thw", "image_grid_hws", "image_grid_hw") if name in names), None)
    if name is None:
        return
    for merge in dict.fromkeys((sizes.merge, 2, 1)):
        grids = torch.tensor([[2, 2], [2, 4], [4, 2]]) * merge
        count = int(grids.prod(-1).sum())
        if name == "image_grid_thw":
            grids = torch.cat([torch.ones(3, 1, dtype=torch.int64), grids], 1)
        more = {"image_merge_sizes": torch.full((3,), merge)} if "image_merge_sizes" in names else {}
        for shape in _shapes_of_patches(sizes, merge):
            yield {"pixel_values": varied(count, *shape), name: grids, **more}


def _shapes_of_patches(sizes: Sizes, merge: int) -> list[tuple[int, ...]]:
    """Return the shapes that a patch may have, of `sizes.frames` pictures of a video or of one."""
    side, frames, channels = sizes.patch, sizes.frames, sizes.channels
    shapes = (
        (channels * frames * side * side,),
        (channels, side, side),
        (channels * side * side,),
        (channels, frames, side, side),
        (merge * side, merge * side, channels),
    )
    return list(dict.fromkeys(shapes))


def _strips(sizes: Sizes, names: Collection[str]) -> Iterator[Arguments]:
    """Patches of all images side by side, with the height and width of each image in patches."""
    if "target_sizes" not in names:
        return
    for unit in (4, 8, sizes.merge):
        grids = torch.tensor([[1, 1], [1, 2], [2, 1]]) * unit
        width = int(grids.prod(-1).sum()) * sizes.patch
        yield {"pixel_values": varied(1, sizes.channels, sizes.patch, width), "target_sizes": grids}


def _positions(sizes: Sizes, names: Collection[str]) -> Iterator[Arguments]:
    """Patches of each image, padded, with the position of each."""
    if "image_position_ids" not in names:
        return
    merge = sizes.merge
    grids = [(merge, merge), (merge, 2 * merge), (2 * merge, merge)]
    most = 2 * merge * merge
    positions = torch.full((3, most, 2), -1)
    for own, (height, width) in zip(positions, grids, strict=True):
        places = [(x, y) for y, x in itertools.product(range(height), range(width))]
        own[: len(places)] = torch.tensor(places)
    for side in dict.fromkeys((sizes.patch, sizes.patch * merge)):
        pixels = varied(3, most, sizes.channels * side**2)
        yield {"pixel_values": pixels, "image_position_ids": positions}


def _shapes(sizes: Sizes, names: Collection[str]) -> Iterator[Arguments]:
    """Patches of each image, padded, with its height and width in patches."""
    if "spatial_shapes" not in names:
        return
    for merge in dict.fromkeys((sizes.merge, 2)):
        shapes = torch.tensor([[2, 2], [2, 4], [4, 2]]) * merge
        counts = shapes.prod(-1)
        mask = (torch.arange(int(counts.max()))[None] < counts[:, None]).long()
        pixels = varied(*mask.shape, sizes.channels * sizes.patch**2)
        yield {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask}


def _tiles(sizes: Sizes, names: Collection[str]) -> Iterator[Arguments]:
    """Tiles of each image, padded, with its size before it was divided."""
    if "image_sizes" not in names or not sizes.pinpoints:
        return
    chosen = sorted(sizes.pinpoints, key=math.prod)[:2]
    own = [chosen[0], chosen[-1], chosen[0]]
    tiles = [1 + math.prod(-(-length // sizes.side) for length in one) for one in own]
    pixels = varied(3, max(tiles), sizes.channels, sizes.side, sizes.side)
    for image, count in zip(pixels, tiles, strict=True):
        image[count:] = 0
    yield {"pixel_values": pixels, "image_sizes": torch.tensor(own)}


def _sized(sizes: Sizes, names: Collection[str]) -> Iterator[Arguments]:
    """Images that are padded to the largest, with the size of each."""
    if "image_sizes" not in names:
        return
    unit = sizes.patch * sizes.merge
    own = torch.tensor([[1, 1], [1, 2], [2, 1]]) * 2 * unit
    yield {"pixel_values": varied(3, sizes.channels, 4 * unit, 4 * unit), "image_sizes": own}
    yield {
        "pixel_values": varied(3, sizes.channels, sizes.side, sizes.side),
        "image_sizes": torch.full((3, 2), sizes.side),
    }


def _plain(sizes: Sizes, names: Collection[str]) -> Iterator[Arguments]:
    """Images, or tiles of images, of one size; where a model has two towers, of two."""
    found = {"pixel_values": varied(3, sizes.channels, sizes.side, sizes.side)}
    if "high_res_pixel_values" in names:
        found["high_res_pixel_values"] = varied(3, sizes.channels, sizes.large_side, sizes.large_side)
    yield found


def _by_sample(sizes: Sizes, names: Collection[str]) -> Iterator[Arguments]:
    """Images by sample: padded with zeros to as many as the sample that has most."""
    real = torch.tensor([[True, True], [False, False], [True, False]])
    pixels = varied(3, 2, sizes.channels, sizes.side, sizes.side) * real[:, :, None, None, None]
    yield {"pixel_values": pixels}
    if "pixel_attention_mask" in names:
        yield {"pixel_values": pixels, "pixel_attention_mask": real}


def varied(*shape: int) -> Tensor:
    """Return random numbers, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _vision_configs(config: Any) -> list[Any]:
    fields = cast("Mapping[str, Any]", vars(config))
    return [value for name, value in fields.items() if name.startswith("vis") and hasattr(value, "to_dict")]


def _found(configs: list[Any], *names: str) -> Any:
    values = (getattr(one, name, None) for one, name in itertools.product(configs, names))
    return next((value for value in values if value is not None), None)


def _number(value: Any, default: int) -> int:
    if isinstance(value, list | tuple):
        return int(cast("list[int]", value)[-1])
    return default if value is None else int(value)
