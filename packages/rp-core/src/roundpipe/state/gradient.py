"""The gradients of one block on the host: rounded while one task adds to them, fp32 from the second one on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from rp_transfer import Backend, Conveyor, Layout, Turns


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of `dtype` are summed: at least fp32.

    >>> sum_dtype(torch.bfloat16)
    torch.float32
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Gradient:
    """A gradient block with the layout of its weight block. Whoever holds its turn may use it.

    `written` are the indices of the parameters that have a gradient: a parameter that no loss depends on has none.
    """

    def __init__(self, backend: Backend, layout: Layout) -> None:
        self.turns = Turns()
        self.layout = layout
        self.written: set[int] = set()
        self.block: torch.Tensor | None = None
        # For steps, made once: each would be an operation, which lets go of Python's lock. Nobody else has them.
        self.views: list[torch.Tensor] = []
        self._backend = backend
        self._dtype = layout.dtype

    def first(self) -> torch.Tensor:
        """The block for a first task's gradients, which overwrite it."""
        if self.block is None or self.block.dtype != self._dtype:
            return self._hold(self._backend.host_empty((self.layout.numel,), self._dtype))
        return self.block

    def _hold(self, block: torch.Tensor) -> torch.Tensor:
        self.block, self.views = block, self.layout.views(block)
        return block

    @property
    def arriving_nbytes(self) -> int:
        """The bytes in which a task's sums come: those of the block that they overwrite or are added to."""
        dtype = sum_dtype(self.layout.dtype) if self.written else self._dtype
        return self.layout.numel * dtype.itemsize

    def receive(self, sums: torch.Tensor, written: set[int], conveyor: Conveyor) -> None:
        """Overwrite the gradients with a task's sums, rounded, or add them: (numel,) on a device."""
        if self.written:
            conveyor.add(self._summing(), sums)
        else:
            conveyor.download(self.first(), sums)
        self.written |= written

    def _summing(self) -> torch.Tensor:
        block = self.widen()
        dropped = set(range(len(self.layout.spans))) - self.written
        self._backend.host_touch(write=(block,) if dropped else (), what="dropped gradients")
        for index in dropped:
            # Dropped since it was written: its old numbers are still there.
            self.view(index).zero_()
        return block

    def widen(self) -> torch.Tensor:
        """The block in the summing dtype, which it keeps from now on."""
        self._dtype = sum_dtype(self.layout.dtype)
        old = self.first_or_none()
        if old is not None and old.dtype == self._dtype:
            return old
        wide = self._backend.host_empty((self.layout.numel,), self._dtype)
        self._backend.host_touch(read=() if old is None else (old,), write=(wide,), what="widening gradients")
        wide.zero_() if old is None else wide.copy_(old)
        return self._hold(wide)

    def first_or_none(self) -> torch.Tensor | None:
        """The block if it holds gradients."""
        return self.block if self.written else None

    def view(self, index: int) -> torch.Tensor:
        """One parameter's gradient, in the block's dtype: a new tensor, to be given away."""
        if self.block is None:
            raise AssertionError("a gradient that was never written has no view")
        return self.layout.spans[index].of(self.block)

    def put(self, index: int, value: torch.Tensor) -> None:
        """Replace one parameter's gradient."""
        self.widen()
        self.view(index).copy_(value)
        self.written.add(index)

    def collect(self, indices: Iterable[int], parameters: Sequence[torch.Tensor]) -> None:
        """Add the ``.grad`` of these of the block's parameters, and take it off them."""
        for index in indices:
            found = parameters[index].grad
            assert found is not None
            parameters[index].grad = None
            self._add(index, found.to_dense() if found.is_sparse else found)

    def _add(self, index: int, value: torch.Tensor) -> None:
        if index not in self.written:
            self.put(index, value)
            return
        block = self.widen()
        self._backend.host_touch(read=(block,), write=(block,), what="gradients from outside")
        self.view(index).add_(value)

    def drop(self, indices: Iterable[int] | None = None) -> None:
        """Forget the gradients of some parameters, or of all."""
        for index in list(self.written if indices is None else indices):
            self.written.discard(index)
