"""The peak of overlapping memory allocations."""

from collections.abc import Iterable

Holding = tuple[float, float, int]
"""An allocation: start in ms, end in ms, bytes."""


def peak(holdings: Iterable[Holding]) -> int:
    """The most bytes at any time. An allocation that ends when another starts does not overlap it.

    >>> peak([(0.0, 2.0, 5), (1.0, 3.0, 4), (2.0, 4.0, 3)])
    9
    """
    events: list[tuple[float, int, int]] = []
    for begin, end, size in holdings:
        events += [(begin, 1, size), (end, 0, -size)]
    most = held = 0
    for _, _, size in sorted(events):
        held += size
        most = max(most, held)
    return most
