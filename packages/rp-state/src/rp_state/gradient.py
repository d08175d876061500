"""The gradients of a weight block on the host: the sum of up to two blocks in 16 bits, or one block in fp32."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from rp_optim import GradientPair, add_to_pair
from rp_transfer import Backend, Conveyor, Layout, Turns

from rp_state.memory.passed_memory import GradientMemory, OwnMemory, PassedMemory
from rp_state.shards import OwnedSegment


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of `dtype` are accumulated: at least fp32.

    >>> sum_dtype(torch.bfloat16)
    torch.float32
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Summand:
    """A block of gradients, (numel,).

    `written`: the indices of the parameters that have a gradient here; one that no loss depends on has none.
    """

    def __init__(self, layout: Layout, block: torch.Tensor) -> None:
        self.block = block
        self.written: set[int] = set()
        # For steps only. Made once: making a view is a torch operation, which releases the GIL.
        self.views = layout.views(block)


class Gradient:
    """The gradients of a weight block, with its layout. Only the holder of its turn may use them.

    A gradient is the sum of its summands. In 16 bits there are two: the first task writes one, the second task the
    other, and nothing is added before the optimizer reads both. Later tasks are added to the two (`add_to_pair`).
    In 32 bits and more there is one, to which the second task is added. Code that changes single gradients needs
    one block, too (`widen`): from then on it is in fp32, until all gradients are dropped.

    `memory`: its own, or what it shares with other blocks, see `share`.
    """

    def __init__(self, backend: Backend, layout: Layout) -> None:
        self.memory: GradientMemory = OwnMemory(backend)
        self.layout = layout
        self._backend = backend
        self._summands: list[Summand] = []
        # By a segment's start: its sum over machines, beside 16-bit gradients.
        self._totals: dict[int, torch.Tensor] = {}
        # Of which parameters a step has used what is held, and left it.
        self.left: set[int] = set()

    @property
    def turns(self) -> Turns:
        """The order of access to its memory."""
        return self.memory.turns

    def share(self, memory: PassedMemory) -> None:
        """Use memory that other gradients use, too: one task writes it, and the next step reads it."""
        self.memory = memory
        memory.members.append(self)

    def move_out(self) -> None:
        """Use separate memory and turns from now on; no task or step may be using what it shares."""
        if self.memory.passes_on:
            self.memory.leave(self)
            self.memory, self._summands = OwnMemory(self._backend), []

    @property
    def counts(self) -> bool:
        """Whether it counts towards memory use: of those that share memory only the first does."""
        return self.memory.counts(self)

    @property
    def written(self) -> set[int]:
        """The indices of the parameters that have a gradient."""
        return set[int]().union(*(summand.written for summand in self._summands))

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        totals = list(self._totals.values())
        own = sum(summand.block.nbytes for summand in self._summands) + sum(total.nbytes for total in totals)
        return self.memory.held_bytes(own) if self.counts else 0

    @property
    def arriving_nbytes(self) -> int:
        """Bytes of the next task's download."""
        return self.layout.numel * self._dtype().itemsize

    def blocks(self) -> list[torch.Tensor]:
        """Return the blocks that hold gradients."""
        return [summand.block for summand in self._summands if summand.written]

    def _dtype(self) -> torch.dtype:
        held = self.blocks()
        return held[0].dtype if held else self.layout.dtype

    # A task's gradients

    def receive(self, sums: torch.Tensor, written: set[int], conveyor: Conveyor) -> bool:
        """Download a task's sums, (numel,) on a device, to an empty summand, or add them to what is there.

        `written`: the indices of the parameters that have a gradient in the sums. Returns whether it has added.
        """
        if unused := self._empty():
            conveyor.download(unused[0].block, sums)
            unused[0].written = set(written)
            return False
        self._add(sums, conveyor)
        self._note_sum(written | self.written)
        return True

    def _empty(self) -> list[Summand]:
        """Return the summands without gradients, one allocated if necessary; there are none if all are in use."""
        self._split_if_unused()
        unused = [summand for summand in self._summands if not summand.written]
        most = 1 if self._dtype() == sum_dtype(self._dtype()) else 2
        if unused or len(self._summands) == most:
            return unused
        passes_on = self.memory.passes_on
        assert not (passes_on and self._summands), "two tasks add to gradients in memory that blocks pass on"
        return [self._append(self.memory.take(self.layout))]

    def _split_if_unused(self) -> None:
        # An fp32 block has the size of two 16-bit blocks.
        if not self.written and self._summands and self._summands[0].block.dtype != self.layout.dtype:
            memory = self._summands.pop().block.view(self.layout.dtype)
            self._append(memory[: self.layout.numel])
            self._append(memory[self.layout.numel :])

    def _append(self, block: torch.Tensor) -> Summand:
        self._summands.append(Summand(self.layout, block))
        return self._summands[-1]

    def _add(self, sums: torch.Tensor, conveyor: Conveyor) -> None:
        self._clear_dropped()
        if len(self._summands) == 1:
            conveyor.add(self._summands[0].block, sums)
        else:
            conveyor.combine(self.blocks(), sums, _add_to_pair)

    def _note_sum(self, written: set[int]) -> None:
        for summand in self._summands:
            summand.written = set(written)

    def _clear_dropped(self) -> None:
        for summand in self._summands:
            dropped = set(range(len(self.layout.extents))) - summand.written
            self._backend.host_touch(write=(summand.block,) if dropped else (), what="dropped gradients")
            for index in dropped:
                # Dropping a gradient leaves its old values in the block.
                self.layout.extents[index].of(summand.block).zero_()

    # Several machines

    @property
    def is_wide(self) -> bool:
        """Whether one 16-bit block does not hold these gradients: there are two, or the one is in fp32 already."""
        held = self.blocks()
        return len(held) > 1 or (bool(held) and held[0].dtype != self.layout.dtype)

    def to_reduce(self, *, wide: bool) -> torch.Tensor:
        """Return this machine's part of a sum over machines, (numel,), with zeros where it has no gradient.

        `wide`: in the accumulation dtype, otherwise in the layout's, which one block must hold.
        """
        if wide:
            return self._with_zeros(self.widen())
        held = [summand for summand in self._summands if summand.written] or self._empty()
        return self._with_zeros(held[0].block)

    def total(self, segment: OwnedSegment, part: torch.Tensor) -> torch.Tensor:
        """Return memory for a segment of the sum over machines, at least fp32: in `part` if that is as wide."""
        if part.dtype == sum_dtype(part.dtype):
            return segment.of(part)
        if segment.start not in self._totals:
            # Devices do not use it, so it is not pinned.
            count = segment.stop - segment.start
            self._totals[segment.start] = torch.empty(count, dtype=sum_dtype(part.dtype), device="cpu")
        return self._totals[segment.start]

    def _with_zeros(self, block: torch.Tensor) -> torch.Tensor:
        self._clear_dropped()
        return block

    # Single gradients

    def source(self, index: int) -> torch.Tensor | GradientPair | None:
        """Return one parameter's gradient for a step, contiguous; None if there is none."""
        held = [summand.views[index].contiguous() for summand in self._summands if index in summand.written]
        return GradientPair(*held) if len(held) == 2 else next(iter(held), None)

    def view(self, index: int) -> torch.Tensor:
        """Return a new view of one parameter's gradient, which the caller may give to the user.

        Two blocks are summed into one first.
        """
        held = self.blocks()
        return self.layout.extents[index].of(held[0] if len(held) == 1 else self.widen())

    def widen(self) -> torch.Tensor:
        """Sum all gradients into one block of the accumulation dtype, unless they are in one, and return it."""
        dtype = sum_dtype(self.layout.dtype)
        if not self._summands or self._summands[0].block.dtype != dtype:
            self._sum_into(self._backend.host_empty((self.layout.numel,), dtype))
        return self._summands[0].block

    def _sum_into(self, total: torch.Tensor) -> None:
        self._clear_dropped()
        held, written = self.blocks(), self.written
        self._backend.host_touch(read=held, write=(total,), what="summing gradients")
        total.zero_()
        for block in held:
            total.add_(block)
        self._summands = []
        self._append(total).written = written

    def put(self, index: int, value: torch.Tensor) -> None:
        """Replace one parameter's gradient."""
        self.layout.extents[index].of(self.widen()).copy_(value)
        self._summands[0].written.add(index)

    def collect(self, indices: Iterable[int], parameters: Sequence[torch.Tensor]) -> None:
        """Move the ``.grad`` of these parameters of the block into the block, adding to what is there."""
        for index in indices:
            gradient = parameters[index].grad
            assert gradient is not None
            parameters[index].grad = None
            self._add_one(index, gradient.to_dense() if gradient.is_sparse else gradient)

    def _add_one(self, index: int, value: torch.Tensor) -> None:
        if index not in self.written:
            self.put(index, value)
            return
        block = self.widen()
        self._backend.host_touch(read=(block,), write=(block,), what="gradients from outside")
        self.layout.extents[index].of(block).add_(value)

    def drop(self, indices: Iterable[int] | None = None) -> None:
        """Drop the gradients of some parameters; of all by default."""
        dropped = self.written if indices is None else set(indices)
        self.left -= dropped
        for summand in self._summands:
            summand.written -= dropped


def _add_to_pair(pieces: Sequence[torch.Tensor], arrived: torch.Tensor) -> None:
    first, second = pieces
    add_to_pair(GradientPair(first, second), arrived)
