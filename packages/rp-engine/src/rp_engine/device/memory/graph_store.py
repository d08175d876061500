"""What graphs of one model's layers keep on one device: themselves, and memory whose addresses stay."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from rp_sched import Mode
from rp_state.block import Block
from rp_transfer import GraphPool

# Signatures that are remembered: shapes may come and go without end.
_MOST_ENTRIES = 256


@dataclass(frozen=True, slots=True, eq=False)
class FixedBlock:
    """Memory of a weight block that graphs read, and of the sums that they add gradients to, or None.

    `memory`: one for each form, by dtype, in which the block has come: (numel,).
    """

    memory: Mapping[torch.dtype, torch.Tensor]
    sums: torch.Tensor | None

    def of(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the memory of the form with this dtype; None if no graph reads that."""
        return self.memory.get(dtype)


@dataclass
class GraphWork:
    """What graphs did in one call. Its tasks' threads only ever set these.

    `is_prepared`: some were captured or tried, which takes longer than calls do. `is_replayed`: some ran.
    `is_measured`: layers were timed, which takes longer, too; not where they always are.
    """

    is_prepared: bool = False
    is_replayed: bool = False
    is_measured: bool = False


@dataclass
class Entry:
    """What became of some layers with inputs of one signature, in calls of one mode.

    `modules`: the layers' copies. `graphs`: their graphs, if they were captured; `is_tried`: and may be used,
    as call `tried_at` has shown, and `num_trials` before it.
    `reason`: why they run without, in words; `is_short`: memory is. `num_seen`: in how many calls they came since
    they last lost their graphs; `num_awaited`: so many are awaited before they are captured. `last_call`: the last
    one's number among calls of this mode.
    """

    modules: tuple[torch.nn.Module, ...]
    mode: Mode
    graphs: Any = None
    is_tried: bool = False
    tried_at: int = 0
    num_trials: int = 0
    reason: str | None = None
    is_short: bool = False
    num_seen: int = 0
    num_awaited: int = 2
    last_call: int = 0

    def lose(self) -> None:
        """Free the graphs; they are captured again when their shape has come twice as often as before."""
        if self.graphs is not None:
            self.graphs.close()
            self.graphs, self.is_tried = None, False
            self.num_trials = 0
            self.num_seen, self.num_awaited = 0, 2 * self.num_awaited


@dataclass
class GraphStore:
    """All entries, by signature.

    `fixed`: by block. `pools`: one for each place of layers in a task: tasks of a device never run at once.
    `refused`: layers whose forward cannot be captured. `graphable`: by layer, whether graphs might launch it, as
    it was seen last. `is_off`: memory ran out, so there are none any more. `calls`: by mode, how many calls there
    were, and the number that the latest has among calls of all modes.
    """

    entries: dict[Hashable, Entry] = field(default_factory=dict[Hashable, Entry])
    fixed: dict[Block, FixedBlock] = field(default_factory=dict[Block, FixedBlock])
    pools: list[GraphPool] = field(default_factory=list[GraphPool])
    refused: set[int] = field(default_factory=set[int])
    graphable: dict[int, bool] = field(default_factory=dict[int, bool])
    is_off: bool = False
    calls: dict[Mode, tuple[int, int]] = field(default_factory=dict[Mode, tuple[int, int]])

    @property
    def pool_bytes(self) -> int:
        """The bytes of all pools."""
        return sum(pool.nbytes for pool in self.pools)

    def number(self, mode: Mode, call: int) -> int:
        """The number of a call among those of its mode."""
        count, latest = self.calls.get(mode, (0, -1))
        self.calls[mode] = (count + (call != latest), call)
        return self.calls[mode][0]

    def entry(self, key: Hashable, modules: tuple[torch.nn.Module, ...], mode: Mode) -> Entry:
        """The entry of a signature; the oldest makes room for a new one."""
        if key not in self.entries:
            while len(self.entries) >= _MOST_ENTRIES:
                self.entries.pop(next(iter(self.entries))).lose()
            self.entries[key] = Entry(modules, mode)
        return self.entries[key]

    def drop(self) -> None:
        """Free all graphs and their memory, for good: there is too little of it."""
        self.is_off = True
        self.clear()

    def clear(self) -> None:
        """Free all graphs and their memory."""
        for entry in self.entries.values():
            entry.lose()
        self.entries.clear()
        self.fixed.clear()
        self.pools.clear()

    def drop_unused(self, mode: Mode, call: int) -> None:
        """Free graphs that no call of this mode but some before the last two has used: plans or shapes of then."""
        for entry in self.entries.values():
            if entry.mode == mode and entry.last_call < call - 2:
                entry.lose()
