"""`HostBytes`: host memory by kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import reduce

# What few models have.
CODES = "codes of weights"
_NAMES = {
    "weights": "weights",
    "second_blocks": "second blocks",
    "codes": CODES,
    "buffers": "buffers",
    "gradients": "gradients",
    "masters": "masters",
    "optimizer_state": "optimizer state",
    "activations": "activations and pool",
}


@dataclass(frozen=True, slots=True)
class HostBytes:
    """Bytes of host memory by kind.

    `weights`: frozen and trained ones, without the second blocks of `double_buffer`. `codes`: FP8 codes that
    travel in place of weights, also those of second blocks. `activations`: with results,
    idle buffers kept for later calls, and staging memory of copies.

    >>> (HostBytes(weights=4, masters=2) + HostBytes(weights=1)).total
    7
    """

    weights: int = 0
    second_blocks: int = 0
    codes: int = 0
    buffers: int = 0
    gradients: int = 0
    masters: int = 0
    optimizer_state: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return sum(nbytes for _, nbytes in self.by_kind())

    def by_kind(self) -> list[tuple[str, int]]:
        """Each kind's name for people, and its bytes."""
        return [(_NAMES[field.name], getattr(self, field.name)) for field in fields(self)]

    def beyond(self, held: HostBytes) -> HostBytes:
        """How much of each kind is still missing if these are held already.

        >>> HostBytes(weights=4, masters=2).beyond(HostBytes(weights=5, masters=1)) == HostBytes(masters=1)
        True
        """
        names = [field.name for field in fields(self)]
        return HostBytes(*(max(getattr(self, name) - getattr(held, name), 0) for name in names))

    def __add__(self, other: HostBytes) -> HostBytes:
        names = [field.name for field in fields(self)]
        return HostBytes(*(getattr(self, name) + getattr(other, name) for name in names))


def added(parts: Iterable[HostBytes]) -> HostBytes:
    """The sum by kind."""
    return reduce(HostBytes.__add__, parts, HostBytes())
