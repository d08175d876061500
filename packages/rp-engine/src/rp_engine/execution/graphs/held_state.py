"""State that layers write in place beside what they hand on, such as a key-value cache, under graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from rp_recompute.sketch import sketch
from rp_transfer import NotCapturable

from rp_engine.device.memory.graph_store import HeldState


def held_in(leaves: Iterable[Any]) -> HeldState | None:
    """Return the state that layers write, by the one leaf that tells it; None if it has no fixed place."""
    # A Protocol that is checked takes 8 µs a leaf.
    told = [leaf for leaf in leaves if hasattr(cast("object", leaf).__class__, "held_state")]
    return told[0].held_state() if len(told) == 1 else None


class Rewound:
    """Lets several runs start from the same state. `tensors`: those that they may write; they are copied."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._before = [tensor.clone() for tensor in tensors]

    def set_back(self) -> None:
        """Let all tensors have the values that they had."""
        for tensor, before in zip(self._tensors, self._before, strict=True):
            tensor.copy_(before)

    def written(self, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return what was written since: a sketch of the change, and whole numbers and flags as they are now."""
        pairs = list(zip(self._tensors, self._before, strict=True))
        changes = (sketch(now - before, device) for now, before in pairs if now.is_floating_point())
        numbers = [now.clone() for now, _ in pairs if not now.is_floating_point()]
        return sum(changes, sketch((), device)), numbers


def compare_written(found: Sequence[torch.Tensor], again: Sequence[torch.Tensor]) -> None:
    """Raise `NotCapturable` if two runs have left other whole numbers or flags."""
    if not all(map(torch.equal, found, again)):
        raise NotCapturable("a replay writes other numbers to their state than a run by Python")
