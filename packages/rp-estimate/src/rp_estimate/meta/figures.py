"""What a part of a row takes for one sequence and for two, and so for any number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rp_estimate.meta.facts import Growth, LayerAmounts


@dataclass(frozen=True, slots=True)
class Figures:
    """What a part of a row takes for one number of sequences; see `LayerAmounts`."""

    forward_flops: int = 0
    backward_flops: int = 0
    boundary_bytes: int = 0
    kept_bytes: int = 0
    held_bytes: Sequence[int] = ()


def growing(one: Figures, two: Figures) -> LayerAmounts:
    """Return the facts of a part, from its figures for one sequence and for two."""
    forward, backward, kept = (
        Growth.through(getattr(one, name), getattr(two, name))
        for name in ("forward_flops", "backward_flops", "kept_bytes")
    )
    if len(one.held_bytes) == len(two.held_bytes):
        pairs = zip(one.held_bytes, two.held_bytes, strict=True)
        held = [Growth.through(first - one.kept_bytes, second - two.kept_bytes) for first, second in pairs]
    else:
        # Code that runs once for each sequence: nothing is known to be shared.
        held = [Growth(max(one.held_bytes) - one.kept_bytes)]
    return LayerAmounts(forward, backward, one.boundary_bytes, kept, _most(held))


def _most(held: Sequence[Growth]) -> tuple[Growth, ...]:
    """Return what may be the most for some number of sequences: others have both less shared and less for each."""
    found: list[Growth] = []
    for one in sorted(set(held), key=lambda growth: (-growth.each, -growth.shared)):
        if one.of(1) > 0 and (not found or one.shared > found[-1].shared):
            found.append(one)
    return tuple(found)
