"""Packets, which are trees of tensors on the host passed between tasks, and the names of their slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import rp_batch
import torch
from rp_transfer import Backend, Event, Strides, gaps, in_order, laid_out

Arrival = Callable[[Any], Event | None]


def _no_arrival(leaf: Any) -> None:
    del leaf


class Slot(NamedTuple):
    """The name of a place for one packet.

    `at`: for ``"input"`` (activations) and ``"grad"`` (their gradients) the boundary before layer `at`; for
    ``"label"`` and ``"loss"`` the last boundary; for ``"buffers"``, ``"saved"``, ``"prepared"`` and
    ``"sketch"`` (numbers by which outputs are compared) the layer.
    """

    what: Literal["input", "grad", "label", "loss", "buffers", "saved", "prepared", "sketch"]
    at: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class FlatTree:
    """A user's tree, flattened once: its leaves, and rp_batch's opaque description of the tree around them."""

    leaves: tuple[Any, ...]
    treedef: Any

    @classmethod
    def of(cls, tree: Any) -> FlatTree:
        """Flatten a tree."""
        leaves, treedef = rp_batch.flatten(tree)
        return cls(tuple(leaves), treedef)


@dataclass(frozen=True, slots=True)
class Alias:
    """Memory that is shared in plain PyTorch. `holder`: who has it beside the leaves, in words; None: nobody."""

    number: int
    holder: str | None = None


@dataclass(frozen=True, slots=True)
class Packet:
    """A tree on the host. `leaves`: host tensors or other objects. `grads`: which leaves require grad.

    The tensors may be read after all `events`. `strides`: of those that have gaps in their memory on a device, by
    position. `aliases`: of those that share memory in plain PyTorch, by position.
    """

    treedef: Any  # rp_batch's opaque description of the tree
    leaves: tuple[Any, ...]
    grads: tuple[bool, ...]
    events: tuple[Event, ...] = ()
    strides: Mapping[int, Strides] = field(default_factory=dict[int, Strides])
    aliases: Mapping[int, Alias] = field(default_factory=dict[int, Alias])

    @classmethod
    def of(
        cls,
        backend: Backend,
        tree: FlatTree,
        *,
        with_grads: bool,
        arrival: Arrival = _no_arrival,
        is_whole: bool = False,
    ) -> Packet:
        """Copy a user's tree to host memory that devices copy from, so that the user may then change the original.

        `is_whole`: the tree is no part of a batch, so that layers see the gaps in its tensors' memory.
        `arrival(leaf)`: the event of a leaf that an earlier call is still downloading to such memory, otherwise
        None. A leaf with an event is not copied.
        """
        leaves = tree.leaves
        arrivals = list(map(arrival, leaves))
        held = tuple(
            leaf.detach() if event else _to_host(backend, leaf)
            for leaf, event in zip(leaves, arrivals, strict=True)
        )
        grads = tuple(with_grads and isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
        strides = gaps(leaves, held) if is_whole else {}
        return cls(tree.treedef, held, grads, tuple(dict.fromkeys(event for event in arrivals if event)), strides)

    def tree(self) -> Any:
        """Return the tree of host tensors; readable after `events`."""
        return rp_batch.unflatten(self.treedef, self.leaves)

    def tensors(self) -> list[torch.Tensor]:
        """Return the leaves that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is strided, neither sparse nor nested."""
    return tensor.layout == torch.strided and not tensor.is_nested


def _to_host(backend: Backend, tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return tensor.copy() if rp_batch.is_array(tensor) else tensor
    if not is_dense(tensor):
        raise TypeError(f"inputs must be dense tensors, but one has layout {tensor.layout}; convert it first")
    # A microbatch of a transposed batch has gaps between its rows, but what it is a part of may have none.
    memory = in_order(tensor.detach())
    held = backend.host_empty(memory.shape, tensor.dtype, short_lived=True)
    with torch.no_grad():
        return laid_out(held.copy_(memory), tensor)
