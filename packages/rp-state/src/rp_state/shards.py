"""Which machine owns which parameter: whole ones, balanced by size, neighbours together; one machine owns all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from rp_transfer import Layout

# A parameter smaller than this part of a machine's share has the owner of its neighbour, so that a model's many
# small tensors need no messages of their own.
_SMALL_PART = 256


@dataclass(frozen=True, slots=True)
class OwnedSegment:
    """Neighbouring parameters of a block with one owner: their indices, and their elements in the block.

    >>> OwnedSegment(0, range(1), 2, 5).of(torch.arange(8))
    tensor([2, 3, 4])
    """

    owner: int
    indices: range
    start: int
    stop: int

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """View its part of a block: (numel,)."""
        return block[self.start : self.stop]


class Owners(Protocol):
    """Who updates which trainable parameter of a model.

    `rank`: this machine's number. `numel`: elements that this machine has, once assigned.
    """

    @property
    def is_divided(self) -> bool: ...
    @property
    def rank(self) -> int: ...
    @property
    def numel(self) -> int: ...

    def assign(self, blocks: Sequence[Sequence[torch.Tensor]]) -> None:
        """Give each tensor without an owner to a machine."""
        ...

    def owner(self, tensor: torch.Tensor) -> int:
        """Return the machine that updates this parameter."""
        ...

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether this machine updates the parameter."""
        ...

    def traffic_bytes(self, blocks: Iterable[tuple[Sequence[torch.Tensor], int, int]]) -> int:
        """Return the bytes that the busiest machine sends or receives in a step, whichever are more."""
        ...

    def replace(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Transfer a parameter's owner to the parameter that replaces it."""
        ...

    def segments(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> tuple[OwnedSegment, ...]:
        """Return the parts of a block with one owner each, in order, without the gaps between them."""
        ...


class Undivided:
    """One machine, which updates all parameters: see `Owners`.

    >>> Undivided().owns(torch.zeros(2)), Undivided().owner(torch.zeros(2))
    (True, 0)
    """

    is_divided: bool = False
    rank: int = 0

    def __init__(self) -> None:
        self.numel = 0

    def assign(self, blocks: Sequence[Sequence[torch.Tensor]]) -> None:
        """Count them."""
        self.numel = sum(tensor.numel() for block in blocks for tensor in block)

    def owner(self, tensor: torch.Tensor) -> int:
        """Return this machine."""
        return 0

    def owns(self, tensor: torch.Tensor) -> bool:
        """It does."""
        return True

    def traffic_bytes(self, blocks: Iterable[tuple[Sequence[torch.Tensor], int, int]]) -> int:
        """Nothing is sent."""
        return 0

    def replace(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Both are this machine's."""

    def segments(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> tuple[OwnedSegment, ...]:
        """Return the whole block."""
        return (_segment(0, range(len(tensors)), layout),)


class Shards:
    """The owner of each trainable parameter of a model, the same on all machines. Owners never change.

    `rank`: this machine's number, of `size`.

    >>> big, small = torch.zeros(64, 64), torch.zeros(8)
    >>> shards = Shards(rank=0, size=2)
    >>> shards.assign([[big, small], [torch.zeros(60, 60)]])
    >>> shards.owner(big), shards.owner(small), shards.numel
    (0, 0, 4104)
    """

    is_divided: bool = True

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        # Elements that this machine owns.
        self.numel = 0
        self._owners: dict[torch.Tensor, int] = {}

    def assign(self, blocks: Sequence[Sequence[torch.Tensor]]) -> None:
        """Assign each tensor without an owner to the machine with the fewest elements, largest tensors first."""
        loads = [0] * self.size
        for tensor in (tensor for block in blocks for tensor in block):
            if tensor in self._owners:
                loads[self._owners[tensor]] += tensor.numel()
        small = sum(tensor.numel() for block in blocks for tensor in block) // (self.size * _SMALL_PART)
        units = [unit for block in blocks for unit in self._units(block, small)]
        for unit in sorted(units, key=_numel, reverse=True):
            owner = loads.index(min(loads))
            loads[owner] += _numel(unit)
            self._owners.update(dict.fromkeys(unit, owner))
        self.numel = loads[self.rank]

    def _units(self, block: Sequence[torch.Tensor], small: int) -> list[list[torch.Tensor]]:
        """Return the tensors without an owner, small ones together with a neighbour."""
        units: list[list[torch.Tensor]] = []
        is_next = False
        for tensor in block:
            if tensor in self._owners:
                is_next = False
            elif is_next and min(tensor.numel(), _numel(units[-1])) <= small:
                units[-1].append(tensor)
            else:
                units.append([tensor])
                is_next = True
        return units

    def owner(self, tensor: torch.Tensor) -> int:
        """Return the machine that updates this parameter."""
        return self._owners[tensor]

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether this machine updates the parameter."""
        return self._owners[tensor] == self.rank

    def traffic_bytes(self, blocks: Iterable[tuple[Sequence[torch.Tensor], int, int]]) -> int:
        """Return the bytes that the busiest machine sends or receives in a step, whichever are more.

        Gradients go to the owners, and weights come from there. `blocks`: tensors, with the bytes per element of
        their gradients and of their weights.

        >>> shards = Shards(rank=0, size=2)
        >>> tensors = [torch.zeros(30), torch.zeros(10)]
        >>> shards.assign([tensors])
        >>> shards.traffic_bytes([(tensors, 2, 2)]), shards.traffic_bytes([(tensors, 4, 2)])
        (80, 140)
        """
        gradients, weights = [0] * self.size, [0] * self.size
        for tensors, gradient_bytes, weight_bytes in blocks:
            for tensor in tensors:
                gradients[self._owners[tensor]] += tensor.numel() * gradient_bytes
                weights[self._owners[tensor]] += tensor.numel() * weight_bytes
        others = self.size - 1
        return max(
            max(sum(gradients) - gradient + others * weight, others * gradient + sum(weights) - weight)
            for gradient, weight in zip(gradients, weights, strict=True)
        )

    def replace(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Transfer a parameter's owner to the parameter that replaces it."""
        if old in self._owners:
            self._owners[new] = self._owners.pop(old)

    def segments(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> tuple[OwnedSegment, ...]:
        """Return the parts of a block with one owner each, in order, without the gaps between them."""
        owners = [self._owners[tensor] for tensor in tensors]
        starts = [index for index in range(len(owners)) if index == 0 or owners[index] != owners[index - 1]]
        runs = [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(owners)], strict=True)]
        return tuple(_segment(owners[run.start], run, layout) for run in runs)


def _segment(owner: int, indices: range, layout: Layout) -> OwnedSegment:
    last = layout.extents[indices[-1]]
    return OwnedSegment(owner, indices, layout.extents[indices.start].offset, last.offset + last.numel)


def _numel(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
