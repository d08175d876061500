"""Host memory of models by kind: what they hold, and what they will hold when they are trained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import reduce

import torch
from rp_state.block import Block
from rp_state.codes.layout import codes_nbytes
from rp_state.gradient import sum_dtype
from rp_state.halves import can_split
from rp_state.layers import goes_to_disk, moves
from rp_state.master import is_split, master_bytes
from rp_state.memory.passed_memory import sharing
from rp_state.model_state import ModelState
from rp_state.options import HostOptions, MasterKind
from rp_state.shards import Owners, Undivided
from rp_transfer import Group

_UNDIVIDED = Undivided()
# What few models have.
CODES = "codes of weights"
_NAMES = {
    "weights": "weights",
    "second_blocks": "second blocks",
    "codes": CODES,
    "buffers": "buffers",
    "gradients": "gradients",
    "masters": "masters",
    "optimizer_state": "optimizer state",
    "activations": "activations and pool",
}


@dataclass(frozen=True, slots=True)
class HostBytes:
    """Bytes of host memory by kind.

    `weights`: frozen and trained ones, without the second blocks of `double_buffer`. `codes`: FP8 codes that
    travel in place of weights, also those of second blocks. `activations`: with results,
    idle buffers kept for later calls, and staging memory of copies.

    >>> (HostBytes(weights=4, masters=2) + HostBytes(weights=1)).total
    7
    """

    weights: int = 0
    second_blocks: int = 0
    codes: int = 0
    buffers: int = 0
    gradients: int = 0
    masters: int = 0
    optimizer_state: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return sum(nbytes for _, nbytes in self.by_kind())

    def by_kind(self) -> list[tuple[str, int]]:
        """Each kind's name for people, and its bytes."""
        return [(_NAMES[field.name], getattr(self, field.name)) for field in fields(self)]

    def beyond(self, held: HostBytes) -> HostBytes:
        """How much of each kind is still missing if these are held already.

        >>> HostBytes(weights=4, masters=2).beyond(HostBytes(weights=5, masters=1)) == HostBytes(masters=1)
        True
        """
        names = [field.name for field in fields(self)]
        return HostBytes(*(max(getattr(self, name) - getattr(held, name), 0) for name in names))

    def __add__(self, other: HostBytes) -> HostBytes:
        names = [field.name for field in fields(self)]
        return HostBytes(*(getattr(self, name) + getattr(other, name) for name in names))


def added(parts: Iterable[HostBytes]) -> HostBytes:
    """The sum by kind."""
    return reduce(HostBytes.__add__, parts, HostBytes())


def held_by(states: Sequence[ModelState]) -> HostBytes:
    """What these models hold now, without the optimizers' state and activations."""
    masters = sum(map(_held_masters_bytes, states))
    return added(_held(block) for state in states for block in state.blocks) + HostBytes(masters=masters)


def _held_masters_bytes(state: ModelState) -> int:
    trained, found = set(state.trainable_tensors()), list(state.masters.items())
    # Of parameters that are frozen now, masters in halves have an upper one of their own.
    own = (one.upper.nbytes for tensor, one in found if tensor not in trained and is_split(one))
    on_disk = 0 if state.remainders is None else state.remainders.memory_bytes
    return sum(master_bytes(one) for _, one in found) + sum(own) + on_disk


def given_to(states: Sequence[ModelState]) -> int:
    """Bytes that the backend allocated for these models' blocks; tensors left in their own memory do not count."""
    # Blocks may be allocated or released by other threads meanwhile.
    blocks = [block for state in states for block in state.blocks]
    return sum(block.host.allocated_bytes for block in blocks) + sum(
        _beside_weights(block).total for block in blocks
    )


def needed_by(
    blocks: Iterable[Group | Block],
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


def _masters_bytes(found: Sequence[Group | Block], options: HostOptions, shards: Owners) -> int:
    whole = sum(_master_bytes(block, options.optim_dtype, shards, options.master) for block in found)
    if options.disk is None:
        return whole
    there = [2 * one.numel() for block in found for one in _trained(block, shards) if can_split(one)]
    return whole - sum(there) + options.disk.memory_for(there)


def _passed_on(found: Sequence[Group | Block]) -> set[int]:
    """The blocks, by identity, whose gradients lie in another one's memory, in turn."""
    blocks = {id(one) for one in found if isinstance(one, Block) and not one.gradient.counts}
    groups = sharing(one for one in found if isinstance(one, Group))
    return blocks | {id(one) for shared in groups for one in shared[1:]}


def adam_bytes(
    blocks: Iterable[Group | Block], optim_dtype: torch.dtype | None, shards: Owners = _UNDIVIDED
) -> int:
    """Bytes of Adam's state for a model: two numbers for each that is trained.

    >>> adam_bytes([Group("trainable", (0,), (torch.zeros(8, dtype=torch.bfloat16),))], torch.float32)
    64
    """
    return 2 * sum(_master_bytes(block, optim_dtype, shards, "whole") for block in blocks)


def _master_bytes(
    block: Group | Block, optim_dtype: torch.dtype | None, shards: Owners, master: MasterKind
) -> int:
    return sum(
        tensor.numel() * (2 if master == "split" and can_split(tensor) else (optim_dtype or tensor.dtype).itemsize)
        for tensor in _trained(block, shards)
    )


def gradient_bytes(block: Group | Block, additions: int) -> int:
    """Bytes of a block's gradients to which so many tasks add: in 16 bits two blocks at most, otherwise one.

    >>> found = Group("trainable", (0,), (torch.zeros(8, dtype=torch.bfloat16),))
    >>> [gradient_bytes(found, additions) for additions in (1, 2, 3)]
    [16, 32, 32]
    """
    layout = block.layout
    most = 1 if sum_dtype(layout.dtype) == layout.dtype else 2
    own = min(additions, most) * layout.nbytes
    return block.gradient.memory.most_bytes(own) if isinstance(block, Block) else own


def _trained(block: Group | Block, shards: Owners) -> list[torch.Tensor]:
    return _owned(block, shards) if block.kind == "trainable" else []


def _owned(block: Group | Block, shards: Owners) -> list[torch.Tensor]:
    """The parameters that this machine updates: all, unless there are several."""
    if isinstance(block, Block):
        # Its tensors may have been replaced since, and their owners with them.
        own = (segment for segment in block.segments if segment.owner == shards.rank)
        return [block.tensors[index] for segment in own for index in segment.indices]
    return list(filter(shards.owns, block.tensors))


def _total_bytes(block: Group | Block, additions: int, shards: Owners) -> int:
    """Bytes of the sums over machines, which go beside one 16-bit block of gradients."""
    is_apart = shards.is_divided and additions == 1
    dtype = sum_dtype(block.layout.dtype)
    if not is_apart or dtype == block.layout.dtype:
        return 0
    return sum(tensor.numel() * dtype.itemsize for tensor in _owned(block, shards))


def _held(block: Block) -> HostBytes:
    nbytes = 0 if block.on_disk else sum(tensor.nbytes for tensor in block.host_tensors())
    own = HostBytes(buffers=nbytes) if block.kind == "buffer" else HostBytes(weights=nbytes)
    return own + _beside_weights(block)


def _beside_weights(block: Block) -> HostBytes:
    """Bytes of the second block, of codes, and of the gradients."""
    return HostBytes(
        second_blocks=block.results.allocated_bytes if block.has_back else 0,
        codes=block.codes.nbytes,
        gradients=block.gradient.nbytes,
    )


def _needed(
    block: Group | Block,
    options: HostOptions,
    second_blocks: bool,
    additions: int,
    shards: Owners,
    *,
    has_gradients: bool,
) -> HostBytes:
    if options.frozen is not None and goes_to_disk(block):
        return HostBytes()
    is_moved = moves(block, options.pin) if isinstance(block, Group) else block.host.is_one_piece
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
