"""Part sizes along the batch dimension: compute and validate them."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

__all__ = ["part_sizes", "read_batch_size", "read_sizes"]


def part_sizes(batch_size: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of `parts` parts of a batch: they differ by at most one, larger ones first.

    >>> part_sizes(8, 3)
    (3, 3, 2)
    """
    small, larger = divmod(batch_size, parts)
    return (small + 1,) * larger + (small,) * (parts - larger)


def read_sizes(sizes: Iterable[int], parts: int) -> tuple[int, ...]:
    """Validate sizes given by a caller: one per part, none negative."""
    given = tuple(sizes)
    if len(given) != parts or not all(map(_is_size, given)):
        raise ValueError(
            f"sizes must hold one size for each of the {parts} parts, an integer of at least 0, but is {given}; "
            "omit it if the sizes are not known"
        )
    return given


def read_batch_size(batch_size: int | None) -> int | None:
    """Validate a batch size given by a caller."""
    if batch_size is None or _is_size(batch_size):
        return batch_size
    raise ValueError(f"batch_size must be an integer of at least 0, but is {batch_size!r}; omit it to infer it")


def _is_size(size: Any) -> bool:
    # `Integral` admits numpy integers.
    return isinstance(size, (int, Integral)) and int(size) >= 0
