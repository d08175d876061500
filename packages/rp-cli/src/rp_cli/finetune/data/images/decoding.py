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

    Raises `Refused`, with its place, for bytes that are no such image, or one of more than 2**26 pixels.
    """
    library = pillow(place)
    transpose: Any = importlib.import_module("PIL.ImageOps").exif_transpose
    try:
        with warnings.catch_warnings():
            # Of sizes that it would rather not decode; the limit here is lower.
            warnings.simplefilter("ignore")
            image = library.open(io.BytesIO(content), formats=_FORMATS)
            _check_size(place, *image.size)
            return transpose(image).convert("RGB")
    except (Refused, MemoryError):
        raise
    except Exception as error:
        # Decoders raise many kinds of errors.
        what = "it is no image of a known format" if type(error).__name__ == "UnidentifiedImageError" else error
        raise Refused(f"{place} cannot be decoded: {what}; mend it, or leave its row out") from error


def _check_size(place: str, width: int, height: int) -> None:
    if width * height > MOST_PIXELS:
        raise Refused(
            f"{place} must have at most {MOST_PIXELS:,} pixels, but has {width:,} by {height:,}; make it smaller"
        )
