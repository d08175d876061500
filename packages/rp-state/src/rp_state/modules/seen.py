"""What was seen of the modules of a model's layers, and what of it has changed since."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch

from rp_state.modules.signature import (
    attributes,
    containers,
    grad_flags,
    held,
    signature,
    training_flags,
    walk,
)


class SeenModules:
    """The modules and tensors of a model's layers when its blocks were built, and their flags and attributes.

    `flags`: the training flags of each layer's modules. `places`: see `signature`.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], places: Mapping[int, int]) -> None:
        self._places = dict(places)
        self._walked = walk(modules)
        self._signature = signature(self._walked, self._places)
        self._grad_flags = grad_flags(self._walked)
        self.flags = training_flags(self._walked)
        self._attributes: list[object] = attributes(self._walked)
        self._containers = containers(self._attributes)
        self._held = held(self._walked, self._containers)

    def note_places(self, places: Mapping[int, int]) -> None:
        """Add the places of second blocks that were made since."""
        self._places.update(places)

    def have_changed(self, modules: Sequence[torch.nn.Module]) -> bool:
        """Return whether modules or tensors are others now, or elsewhere; walks them, for the other methods."""
        self._walked = walk(modules)
        return signature(self._walked, self._places) != self._signature

    def note_flags(self) -> bool:
        """Record the current training flags; return whether one has changed."""
        flags = training_flags(self._walked)
        has_changed, self.flags = flags != self.flags, flags
        return has_changed

    def note_attributes(self) -> bool:
        """Record plain attributes, and which tensors require grad; return whether one has changed."""
        has_changed, flags = self._note_attributes(), grad_flags(self._walked)
        has_changed |= flags != self._grad_flags
        self._grad_flags = flags
        return has_changed

    def _note_attributes(self) -> bool:
        names, objects = held(self._walked, self._containers)
        if names == self._held[0] and _are_same(objects, self._held[1]):
            return False
        # Perhaps it was a flag of training.
        before, self._attributes = self._attributes, attributes(self._walked)
        self._containers = containers(self._attributes)
        self._held = held(self._walked, self._containers)
        return not _are_same(self._attributes, before)


def _are_same(ones: Sequence[object], others: Sequence[object]) -> bool:
    return len(ones) == len(others) and all(map(operator.is_, ones, others))
