"""Decode images and animations with Pillow: only common formats, none of more pixels than a photograph has."""

from __future__ import annotations

import importlib
import io
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from rp_trainer.errors import Refused

from rp_data.images.videos import Frames

MOST_PIXELS = 2**26
# Not those that run other programs, or that hold programs.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# How Pillow's modes of grey pixels with more than eight bits begin: of integers, and of fractions.
_DEEP = ("I", "F")
# The modes of those that are from 0 to 65535, by format. Pillow scales PPM's to that.
_OF_16_BITS = {"PNG": "I;16", "TIFF": "I;16", "PPM": "I"}
# What to do with a video of another format.
_EXTRACTED = " (of videos name a folder of frames, which `ffmpeg -i FILE -vf fps=2 FOLDER/%05d.png` writes)"
# Bits of a sample, and that zero is black: tags of TIFF 6.0.
_TIFF_16 = {258: (16,), 262: 1}


def pillow(what: str) -> Any:
    """Import Pillow's images. Raises `Refused` if it is missing; `what` needs it."""
    try:
        library: Any = importlib.import_module("PIL.Image")
    except ImportError:
        raise Refused(f"{what} needs Pillow and torchvision: pip install 'rp-cli[images]'") from None
    # Otherwise it knows formats once others could not open a file.
    library.init()
    return library


def decoded(place: str, content: bytes) -> Any:
    """Return an image in RGB, upright as its camera says; of an animation the first picture.

    Of 16 bits the upper eight remain. Raises `Refused`, with its place, for bytes that are no such image, one of
    more than 2**26 pixels, and one of grey pixels whose range is unknown.
    """
    with _opened(place, content) as (library, image):
        return _in_rgb(place, library, image)


def frames_of(place: str, content: bytes) -> Frames:
    """Return all pictures of an animation, or the one of an image, in RGB. Raises `Refused` as `decoded` does.

    All pictures together have at most 2**26 pixels, too.
    """
    with _opened(place, content, _EXTRACTED) as (library, image):
        count: int = getattr(image, "n_frames", 1)
        _check_size(place, image.width, image.height, count)
        pictures: list[Any] = []
        milliseconds = 0.0
        for number in range(count):
            image.seek(number)
            pictures.append(_in_rgb(place, library, image))
            milliseconds += float(image.info.get("duration") or 0)
        return Frames(tuple(pictures), count * 1e3 / milliseconds if milliseconds and count > 1 else 0.0)


@contextmanager
def _opened(place: str, content: bytes, hint: str = "") -> Generator[tuple[Any, Any]]:
    """Open an image. What decoders raise becomes `Refused`, also in the context."""
    library = pillow(place)
    try:
        with warnings.catch_warnings():
            # Of sizes that it would rather not decode; the limit here is lower.
            warnings.simplefilter("ignore")
            image = library.open(io.BytesIO(content), formats=_FORMATS)
            _check_size(place, *image.size)
            yield library, image
    except (Refused, MemoryError):
        raise
    except Exception as error:
        # Decoders raise many kinds of errors.
        what = "it is no image of a known format" if type(error).__name__ == "UnidentifiedImageError" else error
        raise Refused(f"{place} cannot be decoded: {what}{hint}; mend it, or leave its row out") from error


def _in_rgb(place: str, library: Any, image: Any) -> Any:
    transpose: Any = importlib.import_module("PIL.ImageOps").exif_transpose
    return _eight_bits(place, library, transpose(image), image).convert("RGB")


def _eight_bits(place: str, library: Any, image: Any, file: Any) -> Any:
    """Return an image with eight bits a channel. Pillow itself clips grey pixels of more. `file`: as opened."""
    if not image.mode.startswith(_DEEP):
        return image
    if not _is_of_16_bits(file):
        raise Refused(
            f"{place} has grey pixels of {image.mode!r} in a {file.format}, whose range is unknown; convert it to "
            "8 bits"
        )
    wide = image.convert("I;16") if image.mode == "I" else image
    return library.frombytes("L", wide.size, wide.tobytes("raw", "I;16B")[::2])


def _is_of_16_bits(file: Any) -> bool:
    """Return whether the grey pixels of a file are from 0, black, to 65535, white."""
    if file.format not in _OF_16_BITS or not file.mode.startswith(_OF_16_BITS[file.format]):
        return False
    return file.format != "TIFF" or {tag: file.tag_v2.get(tag) for tag in _TIFF_16} == _TIFF_16


def _check_size(place: str, width: int, height: int, count: int = 1) -> None:
    if width * height * count > MOST_PIXELS:
        pictures = f"{count:,} pictures of " if count > 1 else ""
        raise Refused(
            f"{place} must have at most {MOST_PIXELS:,} pixels, but has {pictures}{width:,} by {height:,}; make "
            "it smaller"
        )
