"""Which leaves of a boundary share memory in plain PyTorch, however they travel."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rp_engine.device.packet import Alias, is_dense

# The words for whoever else has a tensor; None if nobody has.
Holder = Callable[[torch.Tensor], str | None]

_numbers = itertools.count()
_NONE: Mapping[int | None, Alias] = {}


def memory_of(value: object) -> int | None:
    """Return the address of the memory that a tensor is a view of; None for what has none."""
    if not isinstance(value, torch.Tensor) or not is_dense(value):
        return None
    try:
        return value.untyped_storage().data_ptr() or None
    except RuntimeError:  # a tensor that only stands for others, without a storage of its own
        return None


class AliasTracker:
    """The aliases of the leaves that a task is given, and of those that it hands on.

    Two leaves that share memory before a boundary between stages have memory of their own behind it, and keep the
    same `Alias`. `holder`: names who else has a tensor that a layer made.
    """

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self._arrived: dict[int | None, Alias] = {}

    def arrive(self, leaves: Sequence[Any], aliases: Mapping[int, Alias]) -> None:
        """Take over the aliases of a packet's leaves, whose memory stays allocated until the next ones arrive."""
        self._arrived = {memory_of(leaves[index]): each for index, each in aliases.items()}

    def of(self, leaves: Sequence[Any]) -> dict[int, Alias]:
        """Return the aliases of those leaves that share memory with others, by position."""
        return aliases_of(leaves, self._holder, self._arrived)


def aliases_of(
    leaves: Sequence[Any], holder: Holder, known: Mapping[int | None, Alias] = _NONE
) -> dict[int, Alias]:
    """Return the aliases of those leaves that share memory with others, by position. `known`: by address."""
    places = list(map(memory_of, leaves))
    counts = Counter(places)
    by_place: dict[int | None, Alias | None] = {**known, None: None}
    for leaf, place in zip(leaves, places, strict=True):
        if place not in by_place:
            held = holder(leaf)
            by_place[place] = Alias(next(_numbers), held) if held is not None or counts[place] > 1 else None
    return {index: alias for index, place in enumerate(places) if (alias := by_place[place]) is not None}
