"""An image processor that keeps what a model's own makes of each sample's images."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, is_dataclass
from enum import Enum
from functools import cache, partial
from importlib.metadata import version
from threading import Lock
from typing import Any, Protocol, cast

import torch
from rp_trainer.errors import Refused
from torch import Tensor

from rp_data.images.decoding import pillow
from rp_data.images.values import of_bytes, to_bytes

# The version of what is kept. Raise it to make all anew, also when `decoding` makes other pixels of a file.
_FORMAT = 1
_MOST_WORKERS = 8
# More is not kept of a sample: reading it takes some eight times as much memory.
_MOST_BYTES = 2**27
# What makes pixels of files, and numbers of pixels.
_LIBRARIES = ("pillow", "torch", "torchvision", "transformers")
_CODECS = ("jpg", "webp", "libtiff")

Values = dict[str, Any]


class Keeps(Protocol):
    """What keeps bytes by key, as long as it likes."""

    def get(self, key: str) -> bytes | None:
        """Return the bytes of a key; None if there are none."""
        ...

    def put(self, key: str, value: bytes) -> None:
        """Keep the bytes of a key."""
        ...


class KeptImages:
    """Calls a processor's `image_processor` for each sample alone, and keeps the results.

    They are put together by `joined`; whether that is what `own` makes of all samples at once must be tried.

    Args:
        own: the `image_processor`.
        store: where results are kept.
        rows_for_none: whether a sample without images has an entry, of zeros.

    Images are those of `lazy_image`, which are decoded only if something is to be made of them.
    """

    def __init__(self, own: Any, store: Keeps, *, rows_for_none: bool = False) -> None:
        self._own, self._store, self._rows_for_none = own, store, rows_for_none
        self._facts = _facts_of(own)
        # The processor works for one call at a time.
        self._lock = Lock()
        self._workers: ThreadPoolExecutor | None = None
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __call__(self, images: Sequence[Any], **given: Any) -> Any:
        """Return what is made of images, given one by one or in a list for each sample."""
        self.calls += 1
        made = self._each([one for one in images if _flat(one)], given)
        waiting = iter(made)
        with_none = [next(waiting) if _flat(one) else None for one in images]
        features: Any = importlib.import_module("transformers").BatchFeature
        return features(joined(with_none if self._rows_for_none else made))

    def _each(self, samples: Sequence[Any], given: dict[str, Any]) -> list[Values]:
        if len(samples) == 1:
            return [self._of_sample(samples[0], given)]
        # Made here, since a process that was forked has none of the threads of the other one.
        self._workers = self._workers or ThreadPoolExecutor(_MOST_WORKERS, "processed-images")
        return [*self._workers.map(partial(self._of_sample, given=given), samples)]

    def _of_sample(self, sample: Any, given: dict[str, Any]) -> Values:
        images = _flat(sample)
        key = self._key(images, is_list=images is sample, given=given)
        content = self._store.get(key)
        if content is not None:
            return of_bytes(content)
        for image in images:
            image.load()
        with self._lock:
            made = dict(self._own([sample], **given))
        content = to_bytes(made)
        if content is not None and len(content) <= _MOST_BYTES:
            self._store.put(key, content)
        return made

    def _key(self, images: Sequence[Any], *, is_list: bool, given: dict[str, Any]) -> str:
        asked = {name: _told(one) for name, one in given.items()}
        facts = [self._facts, sorted(asked.items()), is_list, [image.digest for image in images]]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def joined(samples: Sequence[Values | None]) -> Values:
    """Return what samples have, put together along the first dimension. None: one without images.

    >>> joined([{"a": torch.ones(1, 2), "b": [1]}, {"a": torch.ones(1, 3), "b": [2, 3]}, None])
    {'a': tensor([[1., 1., 0.],
            [1., 1., 1.],
            [0., 0., 0.]]), 'b': [1, 2, 3, []]}

    Tensors are padded with zeros to the largest.
    """
    some = [one for one in samples if one is not None]
    return {name: _joined([None if one is None else one[name] for one in samples]) for name in some[0]}


def _joined(values: Sequence[Any]) -> Any:
    first = next(one for one in values if one is not None)
    if isinstance(first, Tensor):
        return _stacked(values)
    if isinstance(first, list):
        lists = [cast("list[Any]", [[]] if one is None else one) for one in values]
        return [one for some in lists for one in some]
    return first


def _stacked(values: Sequence[Tensor | None]) -> Tensor:
    found = [one for one in values if one is not None]
    most = [max(sizes) for sizes in zip(*(one.shape[1:] for one in found), strict=True)]
    return torch.cat([_padded(found[0].new_zeros(1, *most) if one is None else one, most) for one in values])


def _padded(value: Tensor, most: Sequence[int]) -> Tensor:
    if [*value.shape[1:]] == [*most]:
        return value
    whole = value.new_zeros(value.shape[0], *most)
    whole[tuple(slice(size) for size in value.shape)] = value
    return whole


def lazy_image(what: str, digest: str, decode: Callable[[], Any]) -> Any:
    """Return an image of Pillow that is decoded when its pixels, or their number, are asked for.

    `digest`: of its file's bytes. `decode`: returns the image, in RGB. `what`: needs Pillow, if that is missing.
    """
    return _lazy_class(pillow(what).Image)(digest, decode)


@cache
def _lazy_class(image: Any) -> Any:
    def begin(self: Any, digest: str, decode: Callable[[], Any]) -> None:
        image.__init__(self)
        self.digest, self._decode, self._mode = digest, decode, "RGB"

    def load(self: Any) -> Any:
        if self._im is None:
            found = self._decode()
            self._im, self._size = found.im, found.size
        return image.load(self)

    def size(self: Any) -> tuple[int, int]:
        self.load()
        return self._size

    return type("LazyImage", (image,), {"__init__": begin, "load": load, "size": property(size)})


def _flat(sample: Any) -> list[Any]:
    """Return the images of a sample, which may be one that is not in a list."""
    return cast("list[Any]", sample) if isinstance(sample, list) else [sample]


def _facts_of(own: Any) -> list[Any]:
    """Return what the numbers that a processor makes of an image's file depend on."""
    features: Any = importlib.import_module("PIL.features")
    return [
        _FORMAT,
        f"{type(own).__module__}.{type(own).__qualname__}",
        _told_of(own),
        [version(name) for name in _LIBRARIES],
        [features.version(name) for name in _CODECS],
        [torch.backends.cpu.get_cpu_capability(), str(torch.get_default_dtype())],
    ]


def _told_of(own: Any) -> Any:
    """Return all attributes: `to_json_string` leaves some out that change what is made, such as Idefics 3's."""
    try:
        return _told(vars(own))
    except TypeError as error:
        raise Refused(
            f"--image-cache: what the {type(own).__name__} makes may depend on more than is known of it, since "
            f"{error}; omit it"
        ) from None


def _told(value: Any) -> Any:
    """Return an argument of a processor as JSON. Raises `TypeError` for one that may be more than a value."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_told(one) for one in cast("Sequence[Any]", value)]
    if isinstance(value, dict):
        return [[str(name), _told(one)] for name, one in sorted(cast("dict[str, Any]", value).items())]
    if isinstance(value, Enum | torch.dtype | torch.device):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _told(asdict(value))
    raise TypeError(f"an argument or attribute of a processor is a {type(value).__name__}")
