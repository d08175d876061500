"""What was seen of the modules of a model's layers, and what of it has changed since."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch

from rp_state.modules.signature import attributes, grad_flags, signature, training_flags, walk


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
        current, flags = attributes(self._walked), grad_flags(self._walked)
        same = (
            flags == self._grad_flags
            and len(current) == len(self._attributes)
            and all(map(operator.is_, current, self._attributes))
        )
        if not same:
            self._attributes, self._grad_flags = current, flags
        return not same
