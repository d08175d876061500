"""Gradient memory that layers pass on, one after another, where the optimizer steps during backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

import torch
from rp_transfer import Backend, Layout, Turns

# At most this many layers of one size have gradients at once: one arrives, one is stepped, one is in between.
_MOST = 3
# The number of layers of one size that share a place, at most.
_LAYERS = 8
# Blocks share a place down to this part of the largest's size: a head is often an embedding plus a norm.
_ALIKE = 7 / 8


class _Held(Protocol):
    """A block of tensors, or the group that it will be made from."""

    @property
    def kind(self) -> str: ...
    @property
    def users(self) -> tuple[int, ...]: ...
    @property
    def layout(self) -> Layout: ...


_Item = TypeVar("_Item", bound=_Held)


class PassedMemory:
    """Memory for the gradients of one block at a time, and `turns`, the order of access to it.

    A task's turn, in which a block's gradients arrive, is followed by the step's, in which they are consumed; then
    comes the next block's task. Each turn waits only for turns that were taken earlier. `members`: the gradients
    that use this memory in turn.
    """

    def __init__(self, backend: Backend, largest: Layout) -> None:
        self.turns = Turns()
        self.members: list[object] = []
        self._backend = backend
        self._numel, self._dtype = largest.numel, largest.dtype
        self._memory: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the host; 0 before it is used for the first time."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def largest_nbytes(self) -> int:
        """Bytes on the host once it is used."""
        return self._numel * self._dtype.itemsize

    def memory(self, numel: int) -> torch.Tensor:
        """Return the first `numel` elements of the memory, which is allocated on first use."""
        if self._memory is None:
            self._memory = self._backend.host_empty((self._numel,), self._dtype)
        return self._memory[:numel]


def sharing(items: Iterable[_Item]) -> list[list[_Item]]:
    """Return the trained blocks, or groups, whose gradients share one memory: one list for each memory.

    Blocks of about one size and of one dtype share it, in turn; the first of a list is the largest. One that
    several layers use is left out, since several tasks may add to its gradients.

    >>> from rp_transfer import Group
    >>> groups = [Group("trainable", (layer,), (torch.zeros(4),)) for layer in range(9)]
    >>> [[group.users[0] for group in shared] for shared in sharing(groups)]
    [[8, 6, 4, 2, 0], [7, 5, 3, 1]]
    """
    shared: list[list[_Item]] = []
    for alike in _of_about_one_size([item for item in items if item.kind == "trainable" and len(item.users) == 1]):
        # Backward goes from the last layer to the first: neighbours have different places.
        alike.sort(key=lambda item: -item.users[0])
        count = min(-(-len(alike) // _LAYERS), _MOST)
        dealt = (alike[number::count] for number in range(count))
        shared += [sorted(one, key=lambda item: -item.layout.numel) for one in dealt]
    return shared


def _of_about_one_size(items: list[_Item]) -> list[list[_Item]]:
    sizes: list[list[_Item]] = []
    for item in sorted(items, key=lambda item: (str(item.layout.dtype), -item.layout.numel)):
        largest = sizes[-1][0].layout if sizes else None
        is_alike = largest is not None and item.layout.dtype == largest.dtype
        if largest is None or not is_alike or item.layout.numel < _ALIKE * largest.numel:
            sizes.append([])
        sizes[-1].append(item)
    return sizes
