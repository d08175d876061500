"""Outputs that a layer has not computed yet, such as `rp_presets.lazy_logits`: who needs them computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeGuard, runtime_checkable

import rp_batch
import torch


@runtime_checkable
class Lazy(Protocol):
    """A tensor that stands for another one. A loss function may compute its loss without that."""

    def materialize(self) -> torch.Tensor:
        """Compute the tensor, with autograd."""
        ...

    def on_backward(self, hook: Callable[[], None]) -> None:
        """Call a function when backward reaches the tensor, which may have no gradient of its own."""
        ...


def computed(tree: Any) -> Any:
    """The tree with ordinary tensors: those that leave a stage are copied as bytes."""
    # An ordinary tensor is what most layers return.
    if type(tree) is torch.Tensor or not any(map(is_lazy, rp_batch.flatten(tree)[0])):
        return tree
    return rp_batch.map_leaves(lambda leaf: leaf.materialize() if is_lazy(leaf) else leaf, tree)


def is_lazy(leaf: object) -> TypeGuard[Lazy]:
    """Whether a leaf is a `Lazy`."""
    # Ordinary tensors first: it is asked of everything between layers, and a protocol takes 8 µs.
    return type(leaf) is not torch.Tensor and isinstance(leaf, torch.Tensor) and isinstance(leaf, Lazy)


def value_of(leaf: Any) -> Any:
    """A leaf without its graph: what is computed for it can be dropped while the loss function uses the leaf."""
    return computed(leaf.detach()) if isinstance(leaf, torch.Tensor) else leaf
