"""Try whether what a processor makes of images may be kept: it must be the same for each sample alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from rp_trainer.errors import Refused
from torch import Tensor

from rp_data.images.decoding import pillow
from rp_data.images.kept import KeptImages, lazy_image
from rp_data.images.store import Store

# Of the images of a few samples: some alike, one beside another one, and one sample without any.
_SAMPLES = (((97, 64),), (), ((97, 64), (64, 150)), ((300, 200),))

Process = Callable[[Sequence[str], Sequence[Sequence[Any]]], Mapping[str, Tensor]]


def keep_images(processor: Any, process: Process, store: Store) -> None:
    """Have a processor keep what it makes of images. `process`: calls it with texts, and images for each.

    Raises `Refused` for one that makes other numbers of images where more are beside them.
    """
    own = processor.image_processor
    for samples in (_SAMPLES, tuple(filter(None, _SAMPLES))):
        try:
            wanted = process(*_given(processor, samples, _picture))
        except Exception:
            # Many take no samples without images beside others; then they will not be given them.
            continue
        for rows_for_none in (False, True):
            processor.image_processor = KeptImages(own, KeptBytes(), rows_for_none=rows_for_none)
            if _is_kept(processor, process, samples, wanted):
                processor.image_processor = KeptImages(own, store, rows_for_none=rows_for_none)
                return
    processor.image_processor = own
    raise Refused(
        f"--image-cache is for processors that make the same of an image whatever is beside it, but the "
        f"{type(own).__name__} does not; omit it"
    )


def _is_kept(processor: Any, process: Process, samples: Sequence[Any], wanted: Mapping[str, Tensor]) -> bool:
    """Return whether the processor makes the same, and then once more, without looking at the images."""
    try:
        first = process(*_given(processor, samples, _lazy))
        again = process(*_given(processor, samples, _unseen))
    except Exception:
        return False
    calls = processor.image_processor.calls
    return calls == 2 and are_same(wanted, first) and are_same(wanted, again)


class KeptBytes:
    """Keeps bytes in memory."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        """Return the bytes of a key; None if there are none."""
        return self._values.get(key)

    def put(self, key: str, value: bytes) -> None:
        """Keep the bytes of a key."""
        self._values[key] = value


def are_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether tensors have the same names, dtypes, shapes and bits."""
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name]) for name, value in one.items()
    )


def _given(processor: Any, samples: Sequence[Any], make: Callable[[int, int], Any]) -> tuple[list[str], list[Any]]:
    return [f"a{processor.image_token * len(some)}" for some in samples], [
        [make(*size) for size in some] for some in samples
    ]


def _picture(width: int, height: int) -> Any:
    """Return an image of random pixels, the same ones for the same size."""
    numbers = torch.Generator().manual_seed(width)
    pixels = torch.randint(0, 256, (width * height * 3,), generator=numbers, dtype=torch.uint8)
    values = cast("list[int]", pixels.tolist())  # pyright: ignore[reportUnknownMemberType]
    return pillow("a processor").frombytes("RGB", (width, height), bytes(values))


def _lazy(width: int, height: int) -> Any:
    return lazy_image("a processor", f"{width} {height}", lambda: _picture(width, height))


def _unseen(width: int, height: int) -> Any:
    def decode() -> Any:
        raise AssertionError("an image that is kept is decoded again")

    return lazy_image("a processor", f"{width} {height}", decode)
