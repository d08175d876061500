"""The gradients of a weight block on the host: in the weights' dtype for one task, fp32 from the second one on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from rp_transfer import Backend, Conveyor, Layout, Turns


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of `dtype` are accumulated: at least fp32.

    >>> sum_dtype(torch.bfloat16)
    torch.float32
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Gradient:
    """A gradient block with the layout of its weight block. Only the holder of its turn may use it.

    `written`: the indices of the parameters that have a gradient. A parameter that no loss depends on has none.
    """

    def __init__(self, backend: Backend, layout: Layout) -> None:
        self.turns = Turns()
        self.layout = layout
        self.written: set[int] = set()
        self.block: torch.Tensor | None = None
        # For steps only. Made once: making a view is a torch operation, which releases the GIL.
        self.views: list[torch.Tensor] = []
        self._backend = backend
        self._dtype = layout.dtype

    def first(self) -> torch.Tensor:
        """The block for the first task's gradients, which overwrite its content."""
        if self.block is None or self.block.dtype != self._dtype:
            return self._hold(self._backend.host_empty((self.layout.numel,), self._dtype))
        return self.block

    def _hold(self, block: torch.Tensor) -> torch.Tensor:
        self.block, self.views = block, self.layout.views(block)
        return block

    @property
    def arriving_nbytes(self) -> int:
        """Bytes of the next task's download: the size of the block that it overwrites or adds to."""
        dtype = sum_dtype(self.layout.dtype) if self.written else self._dtype
        return self.layout.numel * dtype.itemsize

    def receive(self, sums: torch.Tensor, written: set[int], conveyor: Conveyor) -> None:
        """Download a task's sums, (numel,) on a device: overwrite if there are no gradients, otherwise add.

        `written`: the indices of the parameters that the sums hold a gradient of.
        """
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
            # Dropping a gradient leaves its old values in the block.
            self.view(index).zero_()
        return block

    def widen(self) -> torch.Tensor:
        """Convert the block to the accumulation dtype for good, and return it."""
        self._dtype = sum_dtype(self.layout.dtype)
        old = self.first_or_none()
        if old is not None and old.dtype == self._dtype:
            return old
        wide = self._backend.host_empty((self.layout.numel,), self._dtype)
        self._backend.host_touch(read=() if old is None else (old,), write=(wide,), what="widening gradients")
        wide.zero_() if old is None else wide.copy_(old)
        return self._hold(wide)

    def first_or_none(self) -> torch.Tensor | None:
        """The block if it holds gradients, otherwise None."""
        return self.block if self.written else None

    def view(self, index: int) -> torch.Tensor:
        """One parameter's gradient, in the block's dtype: a new view, which the caller may give to the user."""
        if self.block is None:
            raise AssertionError("a gradient that was never written has no view")
        return self.layout.spans[index].of(self.block)

    def put(self, index: int, value: torch.Tensor) -> None:
        """Replace one parameter's gradient."""
        self.widen()
        self.view(index).copy_(value)
        self.written.add(index)

    def collect(self, indices: Iterable[int], parameters: Sequence[torch.Tensor]) -> None:
        """Move the ``.grad`` of these parameters of the block into the block, adding to what is there."""
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
        """Drop the gradients of some parameters; of all by default."""
        for index in list(self.written if indices is None else indices):
            self.written.discard(index)
