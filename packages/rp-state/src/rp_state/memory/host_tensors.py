"""Where a block's tensors are on the host: in one piece of memory, or each where it was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from rp_transfer import Layout

from rp_state.codes.layout import CodedLayout
from rp_state.shards import OwnedSegment

_Pieces = Iterable[tuple[torch.Tensor, torch.Tensor]]


class HostTensors(Protocol):
    """The memory of a block's tensors.

    `is_one_piece`: the backend has allocated it. `values`: the tensors, without version counters.
    `allocated_bytes`: of what the backend has allocated.
    """

    values: list[torch.Tensor]

    @property
    def is_one_piece(self) -> bool: ...
    @property
    def allocated_bytes(self) -> int: ...

    @property
    def memories(self) -> Sequence[torch.Tensor]:
        """One tensor, or all."""
        ...

    def pieces(self, target: torch.Tensor) -> _Pieces:
        """Pairs (slice of `target`, host tensor) that together copy all. `target`: (numel,)."""
        ...

    def pieces_beside(self, codes: CodedLayout, target: torch.Tensor) -> _Pieces:
        """Pairs as of `pieces` that together copy what has no codes. `target`: bytes, as `codes` divides them."""
        ...

    def parts(self, segment: OwnedSegment) -> Sequence[torch.Tensor]:
        """Return a segment's memory, in pieces (numel,)."""
        ...


class OnePiece:
    """All tensors in one piece of memory, (numel,): see `HostTensors`."""

    is_one_piece: bool = True

    def __init__(self, memory: torch.Tensor, values: list[torch.Tensor]) -> None:
        self.memory = memory
        self.values = values

    @property
    def allocated_bytes(self) -> int:
        """All."""
        return self.memory.nbytes

    @property
    def memories(self) -> Sequence[torch.Tensor]:
        """The one."""
        return (self.memory,)

    def pieces(self, target: torch.Tensor) -> _Pieces:
        """One copy."""
        yield target, self.memory

    def pieces_beside(self, codes: CodedLayout, target: torch.Tensor) -> _Pieces:
        """One copy for neighbours."""
        dtype = self.memory.dtype
        for start, stop, place in codes.rest:
            nbytes = (stop - start) * dtype.itemsize
            yield target[place : place + nbytes].view(dtype), self.memory[start:stop]

    def parts(self, segment: OwnedSegment) -> Sequence[torch.Tensor]:
        """Return the one slice."""
        return (segment.of(self.memory),)


class Scattered:
    """Each tensor in its own storage: see `HostTensors`."""

    is_one_piece: bool = False
    allocated_bytes: int = 0

    def __init__(self, layout: Layout, values: list[torch.Tensor]) -> None:
        self._layout = layout
        self.values = values

    @property
    def memories(self) -> Sequence[torch.Tensor]:
        """All tensors."""
        return self.values

    def pieces(self, target: torch.Tensor) -> _Pieces:
        """One copy for each tensor."""
        for span, value in zip(self._layout.extents, self.values, strict=True):
            yield target[span.offset : span.offset + span.numel], value.view(-1)

    def pieces_beside(self, codes: CodedLayout, target: torch.Tensor) -> _Pieces:
        """One copy for each tensor."""
        for index, view in codes.others(target).items():
            yield view.view(-1), self.values[index].view(-1)

    def parts(self, segment: OwnedSegment) -> Sequence[torch.Tensor]:
        """Return one piece for each tensor."""
        return [self.values[index].view(-1) for index in segment.indices if self.values[index].numel()]
