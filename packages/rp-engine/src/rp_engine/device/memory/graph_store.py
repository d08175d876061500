"""What graphs of one model's layers keep on one device: themselves, and memory whose addresses stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from rp_sched import Mode
from rp_state.block import Block
from rp_transfer import GraphPool

# Signatures that are remembered: shapes may come and go without end.
_MOST_ENTRIES = 256
# Graphs stay while they are not used for so many calls: another plan may be on trial meanwhile.
_UNUSED = 16


@dataclass(frozen=True, slots=True, eq=False)
class FixedBlock:
    """Memory of weights that graphs read, and of the sums that they add gradients to, or None.

    `memory`: one for each form, by dtype, in which the weights have come: (numel,).
    """

    memory: Mapping[torch.dtype, torch.Tensor]
    sums: torch.Tensor | None

    def of(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the memory of the form with this dtype; None if no graph reads that."""
        return self.memory.get(dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of all of it."""
        return sum(one.nbytes for one in (*self.memory.values(), self.sums) if one is not None)


NOT_FIXED = FixedBlock({}, None)


class WeightSlot(NamedTuple):
    """A place for weights of one layout, in each form in which they come: the `number`-th of these in a task."""

    kind: str
    dtype: torch.dtype
    numel: int
    coded_numel: int
    number: int


class TaskMemory:
    """Where graphs have the weights and sums of one task that begins: `fixed`, by block.

    The n-th block of a layout lies in the n-th slot of that layout, whichever task it is: tasks of a device never
    run at once. So there are as many slots of a layout as a task has blocks of it at most.
    """

    def __init__(self, memory: dict[WeightSlot, FixedBlock], blocks: Iterable[Block]) -> None:
        self._memory = memory
        self.slots: dict[Block, WeightSlot] = {}
        seen = Counter[Hashable]()
        for block in dict.fromkeys(blocks):
            coded_numel, _ = block.form(coded=True)
            layout = block.kind, block.layout.dtype, block.layout.numel, coded_numel
            self.slots[block] = WeightSlot(*layout, seen[layout])
            seen[layout] += 1
        self.fixed = {block: memory[slot] for block, slot in self.slots.items() if slot in memory}

    def fix(self, block: Block, memory: FixedBlock) -> None:
        """Let a block of the task, and others in its slot, lie in this memory from now on."""
        self._memory[self.slots[block]] = self.fixed[block] = memory


@dataclass
class GraphWork:
    """What graphs did in one call. Its tasks' threads only ever set these.

    `is_prepared`: some were captured or tried, which takes longer than calls do. `is_awaited`: some are to be
    captured in a later call. `is_replayed`: some ran. `is_measured`: layers were timed, which takes longer, too;
    not where they always are.
    """

    is_prepared: bool = False
    is_awaited: bool = False
    is_replayed: bool = False
    is_measured: bool = False


class HeldState(Protocol):
    """What layers write in place beside what they hand on, such as a key-value cache, as it is now.

    `tensors`: all of them. `facts`: equal as long as these are where they were, and Python knows the same of them.
    """

    tensors: Sequence[torch.Tensor]
    facts: object

    def set_back(self) -> None:
        """Set what Python knows back; what is in the tensors stays."""
        ...


@dataclass
class Entry:
    """What became of some layers with inputs of one signature, in calls of one mode.

    `modules`: the layers' copies. `graphs`: their graphs, if they were captured; `is_tried`: and may be used,
    as call `tried_at` has shown, and `num_trials` before it. `slots`: where these read the weights of their
    blocks; `place`: of the layers in their task, whose pool they have.
    `reason`: why they run without, in words; `is_short`: memory is. `num_seen`: in how many calls they came since
    they last lost their graphs; `num_awaited`: so many are awaited before they are captured. `last_call`: the last
    one's number among calls of this mode. `state`: what they write beside their results, as it was; `num_moved`:
    how often it was elsewhere.
    """

    modules: tuple[torch.nn.Module, ...]
    mode: Mode
    place: int
    graphs: Any = None
    slots: Mapping[Block, WeightSlot] = field(default_factory=dict[Block, WeightSlot])
    is_tried: bool = False
    tried_at: int = 0
    num_trials: int = 0
    reason: str | None = None
    is_short: bool = False
    num_seen: int = 0
    num_awaited: int = 2
    last_call: int = 0
    state: HeldState | None = None
    num_moved: int = 0

    def lose(self) -> None:
        """Free the graphs; they are captured again when their shape has come twice as often as before."""
        if self.graphs is not None:
            self.graphs.close()
            self.graphs, self.is_tried = None, False
            self.num_trials = 0
            self.num_seen, self.num_awaited = 0, 2 * self.num_awaited

    def note_state(self, state: HeldState) -> None:
        """Note where state is now; graphs that know it elsewhere go."""
        if self.state is None or self.state.facts != state.facts:
            self.lose()
            self.num_seen = 0
            self.num_moved += 1
        # One state has all tensors, so that nothing else comes to be where graphs know them.
        self.state = state


@dataclass
class GraphStore:
    """All entries, by signature.

    `slots`: what lies where graphs know it. `graphed`: the blocks that some graph reads. `pools`: one for each
    place of layers in a task, since tasks of a device never run at once. `refused`: layers whose forward cannot be
    captured. `graphable`: by layer, whether graphs might launch it, as it was seen last. `is_off`: memory ran out,
    so there are none any more. `calls`: by mode, how many calls there were, and the number that the latest has
    among calls of all modes.
    """

    entries: dict[Hashable, Entry] = field(default_factory=dict[Hashable, Entry])
    slots: dict[WeightSlot, FixedBlock] = field(default_factory=dict[WeightSlot, FixedBlock])
    graphed: set[Block] = field(default_factory=set[Block])
    pools: dict[int, GraphPool] = field(default_factory=dict[int, GraphPool])
    refused: set[int] = field(default_factory=set[int])
    graphable: dict[int, bool] = field(default_factory=dict[int, bool])
    is_off: bool = False
    calls: dict[Mode, tuple[int, int]] = field(default_factory=dict[Mode, tuple[int, int]])

    @property
    def pool_bytes(self) -> int:
        """The bytes of all pools."""
        return sum(pool.nbytes for pool in list(self.pools.values()))

    @property
    def nbytes(self) -> int:
        """The bytes of all that stays for graphs. On any thread."""
        return self.pool_bytes + sum(slot.nbytes for slot in list(self.slots.values()))

    def memory_of(self, blocks: Iterable[Block]) -> TaskMemory:
        """Return where a task with these blocks has its memory."""
        return TaskMemory(self.slots, blocks)

    def number(self, mode: Mode, call: int) -> int:
        """The number of a call among those of its mode."""
        count, latest = self.calls.get(mode, (0, -1))
        self.calls[mode] = (count + (call != latest), call)
        return self.calls[mode][0]

    def entry(self, key: Hashable, modules: tuple[torch.nn.Module, ...], mode: Mode, place: int) -> Entry:
        """The entry of a signature; the oldest makes room for a new one."""
        if key not in self.entries:
            while len(self.entries) >= _MOST_ENTRIES:
                self.entries.pop(next(iter(self.entries))).lose()
            self.entries[key] = Entry(modules, mode, place)
        return self.entries[key]

    @property
    def has_any(self) -> bool:
        """Whether there are graphs."""
        return any(entry.graphs is not None for entry in self.entries.values())

    def lose(self) -> None:
        """Free all graphs: what they read will be elsewhere."""
        for entry in self.entries.values():
            entry.lose()

    def drop(self) -> None:
        """Free all graphs and their memory, for good: there is too little of it."""
        self.is_off = True
        self.clear()

    def clear(self) -> None:
        """Free all graphs and their memory."""
        self.lose()
        self.entries.clear()
        self.slots.clear()
        self.graphed.clear()
        self.pools.clear()

    def tidy(self, mode: Mode, call: int) -> None:
        """Free graphs that the latest calls of this mode did not use, and what none reads any more.

        `call`: the number of the one that begins.
        """
        for entry in self.entries.values():
            if entry.mode == mode and entry.last_call < call - _UNUSED:
                entry.lose()
        alive = [entry for entry in self.entries.values() if entry.graphs is not None]
        self.graphed = {block for entry in alive for block in entry.slots}
        slots = {slot for entry in alive for slot in entry.slots.values()}
        places = {entry.place for entry in alive}
        for slot in self.slots.keys() - slots:
            del self.slots[slot]
        for place in self.pools.keys() - places:
            del self.pools[place]
