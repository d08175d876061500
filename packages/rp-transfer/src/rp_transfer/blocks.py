"""Layouts: where each of several tensors lies in one contiguous piece of memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

# Cache lines on the host, and more than any load instruction of a device needs.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Span:
    """One tensor's place: `offset` counts elements of the layout's dtype."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """This tensor's view of a block: (numel,) of any dtype, on the host or a device."""
        return block.as_strided(self.shape, self.stride, block.storage_offset() + self.offset)


def _is_dense(tensor: torch.Tensor) -> bool:
    # Each element has a place of its own and no place is left over: the strides are the sizes' running products.
    places = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != places:
            return False
        places *= size
    return tensor.numel() > 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Places for tensors of one dtype in a block of `numel` elements.

    >>> layout = Layout.of([torch.zeros(3), torch.zeros(2, 2)])
    >>> [span.offset for span in layout.spans], layout.numel
    ([0, 16], 20)
    """

    dtype: torch.dtype
    spans: tuple[Span, ...]
    numel: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Layout:
        """Lay the tensors out one behind another, each aligned; dense strides (such as channels-last) stay."""
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) != 1:
            raise ValueError(f"a layout holds tensors of exactly one dtype, but got {sorted(map(str, dtypes))}")
        dtype = dtypes.pop()
        step = max(ALIGNMENT // dtype.itemsize, 1)
        spans: list[Span] = []
        end = 0
        for tensor in tensors:
            offset = -(-end // step) * step
            stride = tensor.stride() if _is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
            spans.append(Span(offset, tensor.shape, stride))
            end = offset + tensor.numel()
        return cls(dtype, tuple(spans), end)

    @property
    def nbytes(self) -> int:
        """Size of a block."""
        return self.numel * self.dtype.itemsize

    def views(self, block: torch.Tensor) -> list[torch.Tensor]:
        """All tensors as views of one block: (numel,) of any dtype."""
        return [span.of(block) for span in self.spans]

    def storages(self, block: torch.Tensor) -> list[torch.Tensor]:
        """All tensors of a host block, each with a storage of its own over the same bytes.

        So each has its own version counter, and saving one does not save the block.
        """
        return [_own_storage(block, span) for span in self.spans]

    def fill(self, block: torch.Tensor, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the tensors into their places; another dtype is cast."""
        with torch.no_grad():
            for view, tensor in zip(self.views(block), tensors, strict=True):
                view.copy_(tensor)


def _own_storage(block: torch.Tensor, span: Span) -> torch.Tensor:
    if span.numel == 0:
        return torch.empty(span.shape, dtype=block.dtype, device="cpu")
    nbytes = span.numel * block.element_size()
    buffer = (ctypes.c_ubyte * nbytes).from_address(block.data_ptr() + span.offset * block.element_size())
    # The new storage keeps the buffer, and the buffer keeps the block.
    buffer.block = block  # pyright: ignore[reportAttributeAccessIssue]
    return torch.frombuffer(buffer, dtype=block.dtype).as_strided(span.shape, span.stride)
