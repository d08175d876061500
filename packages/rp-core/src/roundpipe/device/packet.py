"""Packets, which are trees of tensors on the host passed between tasks, and the names of their slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import rp_batch
import torch
from rp_transfer import Backend, Event

Arrival = Callable[[Any], Event | None]


def _no_arrival(leaf: Any) -> None:
    del leaf


class Slot(NamedTuple):
    """The name of a place for one packet.

    `at`: for ``"input"`` (activations) and ``"grad"`` (their gradients) the boundary before layer `at`; for
    ``"label"`` and ``"loss"`` the last boundary; for ``"buffers"``, ``"saved"`` and ``"prepared"`` the layer.
    """

    what: Literal["input", "grad", "label", "loss", "buffers", "saved", "prepared"]
    at: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Packet:
    """A tree on the host. `leaves`: host tensors or other objects. `grads`: which leaves require grad.

    The tensors may be read after all `events`.
    """

    treedef: Any  # rp_batch's opaque description of the tree
    leaves: tuple[Any, ...]
    grads: tuple[bool, ...]
    events: tuple[Event, ...] = ()

    @classmethod
    def of(cls, backend: Backend, tree: Any, *, with_grads: bool, arrival: Arrival = _no_arrival) -> Packet:
        """Copy a user's tree to host memory that devices copy from, so that the user may then change the original.

        `arrival(leaf)`: the event of a leaf that an earlier call is still downloading to such memory, otherwise
        None. A leaf with an event is not copied.
        """
        leaves, treedef = rp_batch.flatten(tree)
        arrivals = list(map(arrival, leaves))
        held = tuple(
            leaf if not isinstance(leaf, torch.Tensor) else leaf.detach() if event else _to_host(backend, leaf)
            for leaf, event in zip(leaves, arrivals, strict=True)
        )
        grads = tuple(with_grads and isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
        return cls(treedef, held, grads, tuple(dict.fromkeys(event for event in arrivals if event)))

    def tree(self) -> Any:
        """Return the tree of host tensors; readable after `events`."""
        return rp_batch.unflatten(self.treedef, self.leaves)

    def tensors(self) -> list[torch.Tensor]:
        """Return the leaves that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is strided, neither sparse nor nested."""
    return tensor.layout == torch.strided and not tensor.is_nested


def _to_host(backend: Backend, tensor: torch.Tensor) -> torch.Tensor:
    if not is_dense(tensor):
        raise TypeError(f"inputs must be dense tensors, but one has layout {tensor.layout}; convert it first")
    held = backend.host_empty(tensor.shape, tensor.dtype, short_lived=True)
    with torch.no_grad():
        return held.copy_(tensor)
