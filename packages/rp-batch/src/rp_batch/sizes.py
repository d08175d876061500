"""The sizes of parts along the batch."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

__all__ = ["part_sizes", "read_batch_size", "read_sizes"]


def part_sizes(batch_size: int, parts: int) -> tuple[int, ...]:
    """Divide a batch into parts whose sizes differ by at most one, larger ones first.

    >>> part_sizes(8, 3)
    (3, 3, 2)
    """
    small, larger = divmod(batch_size, parts)
    return (small + 1,) * larger + (small,) * (parts - larger)


def read_sizes(sizes: Iterable[int], parts: int) -> tuple[int, ...]:
    """Read the sizes that a caller gives: one for each part, none negative."""
    found = tuple(sizes)
    if len(found) != parts or not all(map(_is_size, found)):
        raise ValueError(
            f"sizes must hold one size for each of the {parts} parts, an integer of at least 0, but is {found}; "
            "leave it out if the sizes are not known"
        )
    return found


def read_batch_size(batch_size: int | None) -> int | None:
    """Read the batch size that a caller gives."""
    if batch_size is None or _is_size(batch_size):
        return batch_size
    raise ValueError(
        f"batch_size must be an integer of at least 0, but is {batch_size!r}; leave it out to infer it"
    )


def _is_size(size: Any) -> bool:
    # Not `int` alone: numpy has integers of its own.
    return isinstance(size, (int, Integral)) and int(size) >= 0
