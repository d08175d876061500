"""What graphs of one model's layers keep on one device: themselves, and memory whose addresses stay."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from rp_transfer import GraphPool

from rp_engine.state.block import Block


@dataclass(frozen=True, slots=True, eq=False)
class FixedBlock:
    """Memory of a weight block that graphs read, (numel,), and of the sums that they add gradients to, or None."""

    memory: torch.Tensor
    sums: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.memory.nbytes + (0 if self.sums is None else self.sums.nbytes)


@dataclass
class Entry:
    """What became of some layers with inputs of one signature.

    `span`: their graphs, if they were captured. `reason`: why they run without, in words; `is_short`: since memory
    is. `num_seen`: in how many calls they came; `last_call`: in which one last. `modules`: what was captured.
    """

    modules: tuple[torch.nn.Module, ...]
    span: Any = None
    is_tried: bool = False
    reason: str | None = None
    is_short: bool = False
    num_seen: int = 0
    last_call: int = 0


@dataclass
class GraphStore:
    """All entries, by signature.

    `fixed`: by block. `pools`: one for each place of a span in its task: tasks of a device never run at once.
    `refused`: layers whose forward cannot be captured. `is_off`: memory ran out, so there are none any more.
    """

    entries: dict[Hashable, Entry] = field(default_factory=dict[Hashable, Entry])
    fixed: dict[Block, FixedBlock] = field(default_factory=dict[Block, FixedBlock])
    pools: list[GraphPool] = field(default_factory=list[GraphPool])
    refused: set[int] = field(default_factory=set[int])
    is_off: bool = False

    def drop(self) -> None:
        """Free all graphs and their memory, for good: there is too little of it."""
        self.is_off = True
        for entry in self.entries.values():
            if entry.span is not None:
                entry.span.close()
        self.entries.clear()
        self.fixed.clear()
        self.pools.clear()

    def drop_unused(self, call: int) -> None:
        """Free graphs that neither this call nor one of the two before has used: those of plans that are gone."""
        old = [key for key, entry in self.entries.items() if entry.last_call < call - 2]
        for key in old:
            entry = self.entries.pop(key)
            if entry.span is not None:
                entry.span.close()
