"""Options of how images are made into numbers, which reading data takes wherever it is read."""

from __future__ import annotations

from typing import Any

from rp_cli.options.declared import option
from rp_cli.options.kinds import path, positive, whole

_PIXELS = whole(1, 2**26)
_SHOWN = "the processor's own number"
_NEEDS_CACHE = ("image_cache", ", the folder that it bounds")


def min_pixels(**more: Any) -> Any:
    """Declare ``--min-pixels``."""
    return option("of an image: smaller ones are enlarged", _PIXELS, shown=_SHOWN, **more)


def max_pixels(**more: Any) -> Any:
    """Declare ``--max-pixels``."""
    return option("of an image: larger ones are made smaller", _PIXELS, shown=_SHOWN, **more)


def image_cache(for_whom: str, **more: Any) -> Any:
    """Declare ``--image-cache``. `for_whom`: who reads what is kept."""
    words = f"a folder that keeps what the processor makes of images, for {for_whom}"
    return option(words, path("FOLDER"), shown="nothing is kept", **more)


def image_cache_gb(**more: Any) -> Any:
    """Declare ``--image-cache-gb``."""
    words = "gigabytes that it may take; what was not used for longest is removed"
    return option(words, positive("GB"), "20", needs=_NEEDS_CACHE, **more)
