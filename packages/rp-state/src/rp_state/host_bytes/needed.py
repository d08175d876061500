"""What models will hold of host memory when they are trained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from rp_transfer import BlockGroup

from rp_state.block import Block
from rp_state.codes.layout import codes_nbytes
from rp_state.gradient import sum_dtype
from rp_state.halves import can_split
from rp_state.host_bytes.kinds import HostBytes, added
from rp_state.layers import goes_to_disk, moves
from rp_state.memory.passed_memory import sharing
from rp_state.options import HostOptions, MasterKind
from rp_state.shards import Owners, Undivided

_UNDIVIDED = Undivided()


def needed_by(
    blocks: Iterable[BlockGroup | Block],
    options: HostOptions,
    *,
    second_blocks: bool,
    additions: int = 1,
    shards: Owners = _UNDIVIDED,
    coded: frozenset[int] = frozenset(),
) -> HostBytes:
    """What a model will hold once it is trained, without the optimizer's state and activations.

    `blocks`: the model's, or the groups that they will be made from. `additions`: how many tasks add to each
    gradient between two steps. `shards`: which machine owns which parameter. `second_blocks`:
    whether trained weights have them, which `options` may leave open. `coded`: the ids of the weights whose codes
    are published.
    """
    found = list(blocks)
    passed_on = _passed_on(found) if options.steps_in_backward else set[int]()
    needed = added(
        _needed(block, options, second_blocks, additions, shards, has_gradients=id(block) not in passed_on)
        for block in found
    )
    codes = sum(codes_nbytes(block.layout, block.tensors, coded) for block in found if block.kind == "trainable")
    return needed + HostBytes(
        masters=_masters_bytes(found, options, shards), codes=codes * (2 if second_blocks else 1)
    )


def _masters_bytes(found: Sequence[BlockGroup | Block], options: HostOptions, shards: Owners) -> int:
    whole = sum(_master_bytes(block, options.optim_dtype, shards, options.master) for block in found)
    if options.disk is None:
        return whole
    there = [2 * one.numel() for block in found for one in _trained(block, shards) if can_split(one)]
    return whole - sum(there) + options.disk.memory_for(there)


def _passed_on(found: Sequence[BlockGroup | Block]) -> set[int]:
    """The blocks, by identity, whose gradients lie in another one's memory, in turn."""
    blocks = {id(one) for one in found if isinstance(one, Block) and not one.gradient.counts}
    groups = sharing(one for one in found if isinstance(one, BlockGroup))
    return blocks | {id(one) for shared in groups for one in shared[1:]}


def adam_bytes(
    blocks: Iterable[BlockGroup | Block], optim_dtype: torch.dtype | None, shards: Owners = _UNDIVIDED
) -> int:
    """Bytes of Adam's state for a model: two numbers for each that is trained.

    >>> adam_bytes([BlockGroup("trainable", (0,), (torch.zeros(8, dtype=torch.bfloat16),))], torch.float32)
    64
    """
    return 2 * sum(_master_bytes(block, optim_dtype, shards, "whole") for block in blocks)


def _master_bytes(
    block: BlockGroup | Block, optim_dtype: torch.dtype | None, shards: Owners, master: MasterKind
) -> int:
    return sum(
        tensor.numel() * (2 if master == "split" and can_split(tensor) else (optim_dtype or tensor.dtype).itemsize)
        for tensor in _trained(block, shards)
    )


def gradient_bytes(block: BlockGroup | Block, additions: int) -> int:
    """Bytes of a block's gradients to which so many tasks add: in 16 bits two blocks at most, otherwise one.

    >>> found = BlockGroup("trainable", (0,), (torch.zeros(8, dtype=torch.bfloat16),))
    >>> [gradient_bytes(found, additions) for additions in (1, 2, 3)]
    [16, 32, 32]
    """
    layout = block.layout
    most = 1 if sum_dtype(layout.dtype) == layout.dtype else 2
    own = min(additions, most) * layout.nbytes
    return block.gradient.memory.most_bytes(own) if isinstance(block, Block) else own


def _trained(block: BlockGroup | Block, shards: Owners) -> list[torch.Tensor]:
    return _owned(block, shards) if block.kind == "trainable" else []


def _owned(block: BlockGroup | Block, shards: Owners) -> list[torch.Tensor]:
    """The parameters that this machine updates: all, unless there are several."""
    if isinstance(block, Block):
        # Its tensors may have been replaced since, and their owners with them.
        own = (segment for segment in block.segments if segment.owner == shards.rank)
        return [block.tensors[index] for segment in own for index in segment.indices]
    return list(filter(shards.owns, block.tensors))


def _total_bytes(block: BlockGroup | Block, additions: int, shards: Owners) -> int:
    """Bytes of the sums over machines, which go beside one 16-bit block of gradients."""
    is_apart = shards.is_divided and additions == 1
    dtype = sum_dtype(block.layout.dtype)
    if not is_apart or dtype == block.layout.dtype:
        return 0
    return sum(tensor.numel() * dtype.itemsize for tensor in _owned(block, shards))


def _needed(
    block: BlockGroup | Block,
    options: HostOptions,
    second_blocks: bool,
    additions: int,
    shards: Owners,
    *,
    has_gradients: bool,
) -> HostBytes:
    if options.frozen is not None and goes_to_disk(block):
        return HostBytes()
    is_moved = moves(block, options.pin) if isinstance(block, BlockGroup) else block.host.is_one_piece
    nbytes = layout_bytes = block.layout.nbytes
    if not is_moved:
        nbytes = sum(tensor.nbytes for tensor in block.tensors)
    if block.kind != "trainable":
        return HostBytes(buffers=nbytes) if block.kind == "buffer" else HostBytes(weights=nbytes)
    return HostBytes(
        weights=nbytes,
        second_blocks=layout_bytes if is_moved and second_blocks else 0,
        gradients=gradient_bytes(block, additions) + _total_bytes(block, additions, shards)
        if has_gradients
        else 0,
    )
