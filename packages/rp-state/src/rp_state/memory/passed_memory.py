"""The memory of gradients: a block's own, or passed on by layers where the optimizer steps during backward."""

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


class GradientMemory(Protocol):
    """Where a block's gradients get memory, and `turns`, the order of access to it.

    `passes_on`: another block uses it once a step has read these gradients.
    """

    turns: Turns

    @property
    def passes_on(self) -> bool: ...

    def leave(self, member: object) -> None:
        """A member will not use it any more."""
        ...

    def counts(self, member: object) -> bool:
        """Whether its bytes count as this member's: those of shared memory count once."""
        ...

    def held_bytes(self, own: int) -> int:
        """Return the bytes that are held. `own`: those of the member's blocks and sums."""
        ...

    def most_bytes(self, own: int) -> int:
        """Return the bytes once it is used. `own`: what the member would take alone."""
        ...

    def take(self, layout: Layout) -> torch.Tensor:
        """Return memory for one more block of gradients, (numel,)."""
        ...


class OwnMemory:
    """Memory of one block's gradients alone: see `GradientMemory`."""

    passes_on: bool = False

    def __init__(self, backend: Backend) -> None:
        self.turns = Turns()
        self._backend = backend

    def leave(self, member: object) -> None:
        """Nobody else has it."""

    def counts(self, member: object) -> bool:
        """It does."""
        return True

    def held_bytes(self, own: int) -> int:
        """As many."""
        return own

    def most_bytes(self, own: int) -> int:
        """As many."""
        return own

    def take(self, layout: Layout) -> torch.Tensor:
        """Allocate it."""
        return self._backend.host_empty((layout.numel,), layout.dtype)


class PassedMemory:
    """Memory for the gradients of one block at a time, and `turns`, the order of access to it.

    A task's turn, in which a block's gradients arrive, is followed by the step's, in which they are consumed; then
    comes the next block's task. Each turn waits only for turns that were taken earlier. `members`: the gradients
    that use this memory in turn. See `GradientMemory`.
    """

    passes_on: bool = True

    def __init__(self, backend: Backend, largest: Layout) -> None:
        self.turns = Turns()
        self.members: list[object] = []
        self._backend = backend
        self._numel, self._dtype = largest.numel, largest.dtype
        # Empty before it is used for the first time.
        self._memory = torch.empty(0, dtype=self._dtype, device="cpu")

    def leave(self, member: object) -> None:
        """The other members use it still."""
        self.members.remove(member)

    def counts(self, member: object) -> bool:
        """Return whether it is the first."""
        return self.members[0] is member

    def held_bytes(self, own: int) -> int:
        """Return those of the memory; 0 before it is used for the first time."""
        return self._memory.nbytes

    def most_bytes(self, own: int) -> int:
        """Return those of the largest member's."""
        return self._numel * self._dtype.itemsize

    def take(self, layout: Layout) -> torch.Tensor:
        """Return the first elements of the memory, which is allocated on first use."""
        if not self._memory.numel():
            self._memory = self._backend.host_empty((self._numel,), self._dtype)
        return self._memory[: layout.numel]


def sharing(items: Iterable[_Item]) -> list[list[_Item]]:
    """Return the trained blocks, or groups, whose gradients share one memory: one list for each memory.

    Blocks of about one size and of one dtype share it, in turn; the first of a list is the largest. One that
    several layers use is left out, since several tasks may add to its gradients.

    >>> from rp_transfer import BlockGroup
    >>> groups = [BlockGroup("trainable", (layer,), (torch.zeros(4),)) for layer in range(9)]
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
        if not (sizes and _is_alike(item.layout, sizes[-1][0].layout)):
            sizes.append([])
        sizes[-1].append(item)
    return sizes


def _is_alike(layout: Layout, largest: Layout) -> bool:
    return layout.dtype == largest.dtype and layout.numel >= _ALIKE * largest.numel
