"""Blocks: grouping a model's tensors into contiguous pieces of memory, and the layout of each piece."""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

import torch
from torch._utils import (
    _unflatten_dense_tensors,  # pyright: ignore[reportUnknownVariableType, reportPrivateUsage] - torch.nn.parallel uses it
)

from rp_transfer.memory.files import MappedFiles

# In bytes: a cache line of the host, which is also enough for any load instruction of a device.
ALIGNMENT = 64
# In bytes: enough for vector loads and compiled kernels. Models have many small tensors, so this saves memory.
_SMALL_ALIGNMENT = 16
_SMALL_BYTES = 4096

Kind = Literal["trainable", "frozen", "buffer"]


@dataclass(frozen=True, slots=True)
class TensorExtent:
    """The place of one tensor in a block; `offset` counts elements of the layout's dtype.

    >>> TensorExtent(4, torch.Size([2, 3]), (3, 1)).of(torch.arange(10))
    tensor([[4, 5, 6],
            [7, 8, 9]])
    """

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """View this tensor's part of a `block`: (numel,) of any dtype, on the host or a device."""
        return block.as_strided(self.shape, self.stride, block.storage_offset() + self.offset)


def _is_dense(tensor: torch.Tensor) -> bool:
    # Dense: elements neither overlap nor leave gaps, so the sorted strides are running products of the sizes.
    places = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != places:
            return False
        places *= size
    return tensor.numel() > 0


def _alignment(nbytes: int) -> int:
    return ALIGNMENT if nbytes >= _SMALL_BYTES else _SMALL_ALIGNMENT


@dataclass(frozen=True)
class Layout:
    """The places of tensors of one dtype in a block of `numel` elements.

    >>> layout = Layout.of([torch.zeros(3), torch.zeros(2, 2)])
    >>> [extent.offset for extent in layout.extents], layout.numel
    ([0, 4], 8)
    """

    dtype: torch.dtype
    extents: tuple[TensorExtent, ...]
    numel: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Layout:
        """Lay out tensors one after another, each aligned. Dense strides (such as channels-last) are kept.

        Raises `ValueError` unless all have one dtype.
        """
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) != 1:
            raise ValueError(
                f"a layout holds tensors of exactly one dtype, but got {sorted(map(str, dtypes))}; "
                "make a layout for each dtype"
            )
        dtype = dtypes.pop()
        extents: list[TensorExtent] = []
        end = 0
        for tensor in tensors:
            step = max(_alignment(tensor.numel() * dtype.itemsize) // dtype.itemsize, 1)
            offset = -(-end // step) * step
            stride = tensor.stride() if _is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
            extents.append(TensorExtent(offset, tensor.shape, stride))
            end = offset + tensor.numel()
        return cls(dtype, tuple(extents), end)

    @property
    def nbytes(self) -> int:
        """Size of a block in bytes."""
        return self.numel * self.dtype.itemsize

    def views(self, block: torch.Tensor) -> list[torch.Tensor]:
        """Return all tensors as views of `block`, (numel,) of any dtype."""
        if self._pieces is None:
            return [extent.of(block) for extent in self.extents]
        # One operation of torch, not one for each: operations release the GIL.
        pieces, chosen = self._pieces
        found = cast("Sequence[torch.Tensor]", _unflatten_dense_tensors(block, pieces))
        return [found[index] for index in chosen]

    @cached_property
    def _pieces(self) -> tuple[Sequence[torch.Tensor], Sequence[int]] | None:
        """The shapes that divide a block, as tensors without memory, and which of them are not gaps.

        None if a tensor is empty, or has other strides than row by row.
        """
        pieces: list[torch.Tensor] = []
        chosen: list[int] = []
        end = 0
        for extent in self.extents:
            piece = torch.empty(extent.shape, device="meta")
            if piece.stride() != extent.stride or not extent.numel:
                return None
            if extent.offset > end:
                pieces.append(torch.empty(extent.offset - end, device="meta"))
            chosen.append(len(pieces))
            pieces.append(piece)
            end = extent.offset + extent.numel
        return pieces, chosen

    def storages(self, block: torch.Tensor) -> list[torch.Tensor]:
        """Return all tensors of a host block, each with a separate storage over its part of the block.

        So each has its own version counter, and saving one does not save the whole block.
        """
        return [_own_storage(block, extent) for extent in self.extents]

    def fill(self, block: torch.Tensor, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the tensors into their places in `block`, cast to its dtype."""
        with torch.no_grad():
            for view, tensor in zip(self.views(block), tensors, strict=True):
                view.copy_(tensor)

    def move_in(self, block: torch.Tensor, tensors: Sequence[torch.Tensor], files: MappedFiles) -> None:
        """Copy the tensors into a host block, and point each tensor's ``.data`` at its place there.

        The tensor objects stay the same, so their module saves and loads as before. Of tensors in mapped files, no
        more than a few MiB are resident beside the block at any time.
        """
        with torch.no_grad():
            for view, tensor in zip(self.views(block), tensors, strict=True):
                files.copy(view, tensor.detach())
        for tensor, own in zip(tensors, self.storages(block), strict=True):
            tensor.data = own


@dataclass(frozen=True, slots=True, eq=False)
class BlockGroup:
    """Tensors of one kind and dtype that exactly the same modules use; they are copied as one block.

    `users`: the indices of those modules.

    >>> buffers = BlockGroup("buffer", (0,), (torch.zeros(3), torch.zeros(2, 2)))
    >>> [extent.numel for extent in buffers.layout.extents]
    [3, 4]
    """

    kind: Kind
    users: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]

    @property
    def layout(self) -> Layout:
        """The tensors' places in their block."""
        return Layout.of(self.tensors)


def group(modules: Sequence[torch.nn.Module]) -> tuple[BlockGroup, ...]:
    """Group the tensors of a row of modules by kind (trainable, frozen, buffer), dtype and using modules.

    A tensor that several modules use (tied, or in a module that occurs twice) is in a group with all its users.

    >>> for each in group([torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)]):
    ...     print(each.kind, each.users, each.layout.dtype, len(each.tensors))
    trainable (0,) torch.float32 2
    trainable (1,) torch.float32 2
    buffer (1,) torch.float32 2
    buffer (1,) torch.int64 1
    """
    users: defaultdict[torch.Tensor, list[int]] = defaultdict(list)
    kinds: dict[torch.Tensor, Kind] = {}
    for index, module in enumerate(modules):
        for kind, tensor in tensors_of(module):
            users[tensor].append(index)
            kinds[tensor] = kind
    groups: defaultdict[tuple[tuple[int, ...], Kind, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor, indices in users.items():
        groups[tuple(indices), kinds[tensor], tensor.dtype].append(tensor)
    return tuple(BlockGroup(kind, indices, tuple(tensors)) for (indices, kind, _), tensors in groups.items())


def tensors_of(module: torch.nn.Module) -> Iterable[tuple[Kind, torch.Tensor]]:
    """Yield a module's parameters and buffers, each once, with their kinds; see `inner_tensors` for packed ones.

    >>> [(kind, tuple(tensor.shape)) for kind, tensor in tensors_of(torch.nn.Linear(2, 3))]
    [('trainable', (3, 2)), ('trainable', (3,))]
    """
    for parameter in module.parameters():
        for tensor in inner_tensors(parameter):
            yield ("trainable" if parameter.requires_grad else "frozen"), tensor
    for buffer in module.buffers():
        for tensor in inner_tensors(buffer):
            yield "buffer", tensor


def inner_tensors(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors that hold a tensor's bytes: itself, or the inner tensors of a wrapper subclass.

    A wrapper subclass names its inner tensors in torch's ``__tensor_flatten__``.

    >>> [tuple(inner.shape) for inner in inner_tensors(torch.ones(3))]
    [(3,)]

    Raises `TypeError` for a ``DTensor``, which is a part of a tensor that processes share.
    """
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None:
        return (tensor,)
    if type(tensor).__name__ == "DTensor":
        raise TypeError(
            "a weight is a DTensor, as torch's fully_shard and tensor parallelism make them, which no device of "
            "RoundPipe can have; leave these out: one process drives all GPUs of a machine"
        )
    names: list[str] = flatten(tensor)[0]
    return tuple(inner for name in names for inner in inner_tensors(getattr(tensor, name)))


def _own_storage(block: torch.Tensor, extent: TensorExtent) -> torch.Tensor:
    if extent.numel == 0:
        return torch.empty(extent.shape, dtype=block.dtype, device="cpu")
    nbytes = extent.numel * block.element_size()
    buffer = (ctypes.c_ubyte * nbytes).from_address(block.data_ptr() + extent.offset * block.element_size())
    # The new storage keeps the buffer alive, and the buffer keeps the block alive.
    buffer.block = block  # pyright: ignore[reportAttributeAccessIssue]
    return torch.frombuffer(buffer, dtype=block.dtype).as_strided(extent.shape, extent.stride)
