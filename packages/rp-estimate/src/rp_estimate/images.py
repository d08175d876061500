"""How many images a sample has, and their size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ImageSizes:
    """Images of one size. `count`: of each sample. `height`, `width`: pixels.

    >>> str(ImageSizes(1, 1024, 768))
    '1x1024x768'
    """

    count: int
    height: int
    width: int

    def __str__(self) -> str:
        """As an option has it."""
        return f"{self.count}x{self.height}x{self.width}"
