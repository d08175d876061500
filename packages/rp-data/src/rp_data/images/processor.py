"""A model's own processor: the text that it makes of images, and the arguments of a call."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path
from typing import Any, cast

import torch
from rp_presets import unasked
from rp_strangers.refusing import refusing_all
from rp_trainer.errors import Refused
from torch import Tensor

from rp_data.images.decoding import pillow
from rp_data.images.kept import lazy_image
from rp_data.images.store import Store
from rp_data.images.trying import are_same, keep_images
from rp_data.images.videos import Video
from rp_data.offsets import Span, tokenized

_FILES = ("processor_config.json", "preprocessor_config.json")
_IDS, _MASK, _VIDEOS = "input_ids", "attention_mask", "pixel_values_videos"
_BOUNDS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


def has_processor(folder: Path) -> bool:
    """Return whether a folder has a processor of images."""
    return any((folder / name).is_file() for name in _FILES)


def sight_of(
    folder: Path, bounds: Mapping[str, int | None] | None = None, open_store: Callable[[], Store] | None = None
) -> Sight:
    """Load the processor in a folder. `bounds`: of an image's pixels, if given: ``min_pixels``, ``max_pixels``.

    `open_store`: returns where to keep what is made of images; None: nowhere.

    Raises `Refused` if it cannot be loaded, for want of Pillow or torchvision, or takes no such bounds; if what it
    makes cannot be kept, or not there.
    """
    pillow(f"the processor in {folder}")
    from transformers import AutoProcessor

    loader: Any = AutoProcessor
    try:
        with refusing_all(f"the processor in {folder} cannot be used: "), unasked():
            processor = loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Refused as refusal:
        if isinstance(refusal.__cause__, ImportError):
            raise Refused(
                f"the processor in {folder} needs Pillow and torchvision: pip install 'rp-cli[images]'"
            ) from refusal
        raise
    if not hasattr(processor, "image_processor") or not hasattr(processor, "image_token"):
        raise Refused(
            f"the processor in {folder} must be one for images in a text, but is a {type(processor).__name__}"
        )
    _bound(processor, folder, {name: one for name, one in (bounds or {}).items() if one is not None})
    return Sight(processor, None if open_store is None else open_store())


def _bound(processor: Any, folder: Path, bounds: Mapping[str, int]) -> None:
    images = processor.image_processor
    known = getattr(getattr(images, "valid_kwargs", None), "__annotations__", {})
    for name, pixels in bounds.items():
        flag = f"--{name.replace('_', '-')}"
        if name not in known or _BOUNDS[name] not in dict(images.size):
            raise Refused(
                f"{flag} is for processors that keep the number of pixels within bounds, but the "
                f"{type(images).__name__} in {folder} makes all images of a size of its own; omit it"
            )
        images.size = {**dict(images.size), _BOUNDS[name]: pixels}
    if bounds and dict(images.size)["shortest_edge"] > dict(images.size)["longest_edge"]:
        raise Refused(f"--min-pixels must be at most --max-pixels, but the bounds are {dict(images.size)}")


@dataclass(frozen=True, slots=True)
class ExpandedText:
    """A text with images, as a processor makes it: each mark is replaced by what the model reads features into.

    `tokens`: of the whole. `offsets`: the characters of each. `kept`: where each part between images was, and is.
    `shaped`: what else the processor has for each token, by name.
    """

    tokens: list[int]
    offsets: Any
    kept: Sequence[tuple[Span, int]]
    shaped: Sequence[str]

    @property
    def end(self) -> int:
        """The number of tokens up to the last of an image."""
        of_text = self.learned(None)
        return max((at for at, is_text in enumerate(of_text, 1) if not is_text), default=0)

    def learned(self, spans: Sequence[Span] | None) -> list[bool]:
        """Return for each token whether it is of these characters of the text, None: of any; never of an image."""
        moved: list[Span] = []
        for (start, end), now in self.kept:
            for first, last in [(start, end)] if spans is None else spans:
                low, high = max(first, start), min(last, end)
                if low < high:
                    moved.append((now + low - start, now + high - start))
        return self.offsets.among(moved)


class Sight:
    """A processor of transformers, for texts with images.

    `store`: keeps what it makes of them. Raises `Refused` where that cannot be kept.
    """

    def __init__(self, processor: Any, store: Store | None = None) -> None:
        self.processor = processor
        # Padding is part of a tokenizer's state, and what is saved is the user's own.
        self._own = copy.deepcopy(processor)
        words = self._own.tokenizer
        words.pad_token = words.pad_token or words.eos_token
        # Of the videos so far, where a batch has them in one tensor.
        self._frames = 0
        self.keeps = store is not None
        self._unchecked = self._own.image_processor if store is not None else None
        if store is not None:
            keep_images(self._own, self._processed, store)

    def image(self, place: str, digest: str, decode: Callable[[], Any], *, is_video: bool = False) -> Any:
        """Return an image, for the other methods: decoded, unless what was made of it may be kept.

        `digest`: of its file's bytes, in hexadecimal digits. `decode`: returns it in RGB. `is_video`: it is a part
        of a video, of which nothing is kept.
        """
        return lazy_image(place, digest, decode) if self.keeps and not is_video else decode()

    def expanded(self, place: str, text: str, images: Sequence[Any]) -> ExpandedText:
        """Return a text with its images expanded. Raises `Refused` if the text has not a mark for each."""
        wanted = [self._mark_of(place, one) for one in images]
        pieces = re.split(f"({'|'.join(map(re.escape, self._marks))})", text)
        parts, marks = pieces[::2], pieces[1::2]
        _check_marks(place, marks, wanted, self._marks[0])
        found, texts = self._recorded(place, text, images)
        self._check_frames(place, found)
        ids = cast("list[int]", found[_IDS][0].tolist())  # pyright: ignore[reportUnknownMemberType]
        for whole in texts:
            tokens = tokenized(self._own.tokenizer, whole)
            if tokens.tokens == ids and tokens.offsets is not None:
                kept = _kept(parts, marks, whole, self._places(place, parts, marks, whole, images))
                if kept is not None:
                    shaped = [name for name, one in found.items() if _is_shaped(name, one, found[_IDS])]
                    return ExpandedText(ids, tokens, kept, sorted(shaped))
        raise Refused(
            f"{place}: it is unknown which tokens stand for images: {type(self._own).__name__} does not tell the "
            "characters of each token; use a fast tokenizer"
        )

    @property
    def _marks(self) -> list[str]:
        """What stands for an image in a text, and for a video, if the processor takes some."""
        own = self._own
        of_videos = getattr(own, "video_token", None) if getattr(own, "video_processor", None) else None
        return [own.image_token, *([of_videos] if of_videos else [])]

    def _mark_of(self, place: str, one: Any) -> str:
        if not isinstance(one, Video):
            return self._marks[0]
        sizes = sorted({frame.size for frame in one.frames})
        if len(sizes) > 1:
            (width, height), (other_width, other_height) = sizes[0], sizes[-1]
            raise Refused(
                f"{place}: all frames of a video must have one size, but one has {width} by {height} and another "
                f"{other_width} by {other_height} pixels"
            )
        if len(self._marks) == 1:
            raise Refused(f"{place} has a video, but the {type(self._own).__name__} takes none; leave the row out")
        return self._marks[1]

    def _check_frames(self, place: str, found: Mapping[str, Tensor]) -> None:
        """Refuse videos of other numbers of frames than before, where a batch has them in one tensor."""
        videos = found.get(_VIDEOS)
        if videos is None or videos.ndim != 5:
            return
        self._frames = self._frames or videos.shape[1]
        if videos.shape[1] != self._frames:
            raise Refused(
                f"{place}: the {type(self._own).__name__} takes videos of as many frames each, but this one has "
                f"{videos.shape[1]}, and one before has {self._frames}; give all as many, or leave the row out"
            )

    def _recorded(self, place: str, text: str, images: Sequence[Any]) -> tuple[dict[str, Tensor], list[str]]:
        """Return what the processor makes of a text, and the texts that it gives its tokenizer."""
        words = self._own.tokenizer
        self._own.tokenizer = recorder = _Recorder(words)
        videos = [one for one in images if isinstance(one, Video)]
        counts = " and ".join(str(len(one.frames)) for one in videos)
        what = f"images, and videos of {counts} frames, each a list or a folder" if videos else "images"
        try:
            with refusing_all(f"{place}: the processor refuses these {what}: "):
                return self._processed([text], [images]), recorder.texts
        finally:
            self._own.tokenizer = words

    def _places(
        self, place: str, parts: Sequence[str], marks: Sequence[str], whole: str, images: Sequence[Any]
    ) -> list[int]:
        """Return where each part of a text is in the whole; nothing if that is unknown.

        What stands for an image may have the letters of a part between images, such as a new line. Then the
        processor works once more, on a text with a word in place of each such part that is nowhere else.
        """
        between = parts[1:-1]
        if all(whole.find(one) == whole.rfind(one) for one in between if one):
            return [0, *map(whole.find, between), len(whole) - len(parts[-1])]
        word = next(word for number in count() if (word := f"[{number}]") not in whole)
        told = zip([parts[0], *[word] * len(between), parts[-1]], [*marks, ""], strict=True)
        _, texts = self._recorded(place, "".join(one for pair in told for one in pair), images)
        return next((found for text in texts if (found := _between(text.split(word), parts, whole))), list[int]())

    def processed(self, texts: Sequence[str], images: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
        """Return what the processor makes of texts and their images: padded at the right, and in their order.

        Raises `Refused` if it would have made something else without what it keeps, as is tried once.
        """
        found = self._processed(texts, images)
        if self._unchecked is not None:
            self._check(texts, images, found, self._unchecked)
        return found

    def _check(
        self, texts: Sequence[str], images: Sequence[Sequence[Any]], found: Mapping[str, Tensor], own: Any
    ) -> None:
        kept, self._own.image_processor = self._own.image_processor, own
        try:
            wanted = self._processed(texts, images)
        finally:
            self._own.image_processor, self._unchecked = kept, None
        if not are_same(wanted, found):
            raise Refused(
                f"--image-cache: the {type(own).__name__} makes other numbers of these images together than of "
                "each alone; omit it"
            )

    def prompts(self, texts: Sequence[str], images: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
        """Return the same, padded at the left, for texts that are to be gone on with."""
        return self._processed(texts, images, padded_at="left")

    def _processed(
        self, texts: Sequence[str], images: Sequence[Sequence[Any]], *, padded_at: str = "right"
    ) -> dict[str, Tensor]:
        videos = [one for some in images for one in some if isinstance(one, Video)]
        stills = [[one for one in some if not isinstance(one, Video)] for some in images]
        given: dict[str, Any] = {"images": stills} if any(stills) or not videos else {}
        if videos:
            given |= {"videos": [list(one.frames) for one in videos], "do_sample_frames": False}
            given["video_metadata"] = [one.metadata for one in videos]
        found = self._own(
            text=list(texts),
            **given,
            padding=True,
            padding_side=padded_at,
            add_special_tokens=False,
            return_tensors="pt",
        )
        if videos and not isinstance(found.get(_VIDEOS), torch.Tensor):
            raise Refused(f"the {type(self._own).__name__} does not make one tensor of videos; make them alike")
        return {name: one for name, one in found.items() if isinstance(one, torch.Tensor)}


class _Recorder:
    """A tokenizer that notes which texts it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []

    def __call__(self, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.texts += [text] if isinstance(text, str) else list(text or ())
        return self._tokenizer(text, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def _is_shaped(name: str, value: Tensor, ids: Tensor) -> bool:
    return name not in (_IDS, _MASK) and value.shape == ids.shape


def _between(pieces: Sequence[str], parts: Sequence[str], whole: str) -> list[int]:
    """Return where parts are in the whole. `pieces`: the same, divided where the parts between images are.

    >>> _between(["a II", "I b"], ["a ", "I", " b"], "a IIII b")
    [0, 4, 6]
    """
    if len(pieces) != len(parts) - 1:
        return []
    images = [pieces[0][len(parts[0]) :], *pieces[1:]]
    images[-1] = images[-1].removesuffix(parts[-1])
    alternating = [one for pair in zip(parts, [*images, ""], strict=True) for one in pair]
    ends = [0, *accumulate(map(len, alternating))]
    return ends[:-1:2] if "".join(alternating) == whole else []


def _check_marks(place: str, marks: Sequence[str], wanted: Sequence[str], of_images: str) -> None:
    """Refuse a text that has not a mark for each image and each video. `wanted`: those, in order."""
    if [*marks] == [*wanted]:
        return
    for mark in dict.fromkeys([*wanted, *marks]):
        if marks.count(mark) != wanted.count(mark):
            kind = "images" if mark == of_images else "videos"
            raise Refused(
                f"{place}: the chat template must write {mark!r} once for each of {wanted.count(mark)} {kind}, "
                f"but wrote it {marks.count(mark)} times; leave the mark out of the messages' text, or give "
                f"--tokenizer a folder whose template writes {kind}"
            )
    raise Refused(f"{place}: the chat template must write images and videos in their order, but does not")


def _kept(
    parts: Sequence[str], marks: Sequence[str], whole: str, places: Sequence[int]
) -> list[tuple[Span, int]] | None:
    """Return where each part of a text was and is; None if they are not at these places of the whole, in order.

    >>> _kept(["a ", " b"], ["<I>"], "a IIII b", [0, 6])
    [((0, 2), 0), ((5, 7), 6)]
    """
    if len(places) != len(parts):
        return None
    found: list[tuple[Span, int]] = []
    was = end = 0
    for part, mark, at in zip(parts, [*marks, ""], places, strict=True):
        if part:
            if at < end or not whole.startswith(part, at):
                return None
            found.append(((was, was + len(part)), at))
            end = at + len(part)
        was += len(part) + len(mark)
    return found
