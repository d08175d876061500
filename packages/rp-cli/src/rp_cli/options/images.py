"""How many images a sample has, and their size, as options give them."""

from __future__ import annotations

from dataclasses import dataclass

from rp_trainer.errors import Refused

from rp_cli.options.kinds import Kind, parsed

_MOST = 2**20


@dataclass(frozen=True, slots=True)
class ImageSizes:
    """Images of one size. `count`: of each sample. `height`, `width`: pixels."""

    count: int
    height: int
    width: int

    def __str__(self) -> str:
        """As it is given."""
        return f"{self.count}x{self.height}x{self.width}"


def _sizes(flag: str, text: str) -> ImageSizes:
    numbers = [parsed(int, part) or 0 for part in text.split("x")]
    if len(numbers) != 3 or not all(0 < one <= _MOST for one in numbers):
        raise Refused(f"{flag} must be a number, a height and a width, such as 1x1024x1024, but is {text!r}")
    return ImageSizes(*numbers)


IMAGES = Kind("NxHxW", _sizes)
