"""Decode images with Pillow: only common formats, and none of more pixels than a photograph has."""

from __future__ import annotations

import importlib
import io
import warnings
from typing import Any

from rp_trainer.errors import Refused

MOST_PIXELS = 2**26
# Not those that run other programs, or that hold programs.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# How Pillow's modes of grey pixels with more than eight bits begin: of integers, and of fractions.
_DEEP = ("I", "F")
# The modes of those that are from 0 to 65535, by format. Pillow scales PPM's to that.
_OF_16_BITS = {"PNG": "I;16", "TIFF": "I;16", "PPM": "I"}
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
    library = pillow(place)
    transpose: Any = importlib.import_module("PIL.ImageOps").exif_transpose
    try:
        with warnings.catch_warnings():
            # Of sizes that it would rather not decode; the limit here is lower.
            warnings.simplefilter("ignore")
            image = library.open(io.BytesIO(content), formats=_FORMATS)
            _check_size(place, *image.size)
            return _eight_bits(place, library, transpose(image), image).convert("RGB")
    except (Refused, MemoryError):
        raise
    except Exception as error:
        # Decoders raise many kinds of errors.
        what = "it is no image of a known format" if type(error).__name__ == "UnidentifiedImageError" else error
        raise Refused(f"{place} cannot be decoded: {what}; mend it, or leave its row out") from error


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


def _check_size(place: str, width: int, height: int) -> None:
    if width * height > MOST_PIXELS:
        raise Refused(
            f"{place} must have at most {MOST_PIXELS:,} pixels, but has {width:,} by {height:,}; make it smaller"
        )
