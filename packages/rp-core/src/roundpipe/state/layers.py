"""A model's layers on the host, whose tensors move into blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from rp_transfer import Backend, Group, Kind, MappedFiles, give_back_freed, group, tensors_of

from roundpipe.state.block import Block
from roundpipe.state.signature import has_hooks

PinMode = Literal["alloc", "register", "off"]


@dataclass(frozen=True, slots=True)
class LayerState:
    """One layer on the host with the blocks it uses."""

    index: int
    module: torch.nn.Module
    blocks: tuple[Block, ...]

    def __str__(self) -> str:
        """Names its index and type, such as ``layer 3 (Linear)``."""
        return f"layer {self.index} ({type(self.module).__name__})"

    @property
    def trainable(self) -> bool:
        """Whether any of its parameters is trained."""
        return any(block.kind == "trainable" for block in self.blocks)

    @property
    def has_buffers(self) -> bool:
        """Whether it has buffers, which its forward may write."""
        return any(block.kind == "buffer" for block in self.blocks)

    def nbytes(self, *kinds: Kind) -> int:
        """Bytes of its blocks of these kinds, or of all."""
        return sum(block.nbytes for block in self.blocks if not kinds or block.kind in kinds)


# Called with the groups of a model's tensors before their blocks are allocated; may raise to prevent that.
Foresee = Callable[[Sequence[Group]], None]


def build_layers(
    backend: Backend, modules: Sequence[torch.nn.Module], pin: PinMode, foresee: Foresee
) -> tuple[LayerState, ...]:
    """Group the layers' tensors into blocks.

    The tensors of a block are used by exactly the same layers. So a tied parameter gets a block of its own, and a
    module that occurs twice in the sequence has one block for both.

    Raises what `foresee` raises, and `ValueError` for tensors that are not on the host, sparse tensors, parameters
    with hooks, and buffers that require grad.
    """
    for index, module in enumerate(modules):
        for kind, tensor in tensors_of(module):
            _check_tensor(index, module, kind, tensor)
    groups = group(modules)
    foresee(groups)
    blocks = _build_blocks(backend, groups, pin)
    return tuple(
        LayerState(index, module, tuple(block for block in blocks if index in block.users))
        for index, module in enumerate(modules)
    )


def _build_blocks(backend: Backend, groups: Sequence[Group], pin: PinMode) -> list[Block]:
    moving = [found for found in groups if moves(found, pin)]
    memories = backend.host_blocks([found.layout for found in moving])
    files = MappedFiles.now()
    for tensor in (tensor for found in moving for tensor in found.tensors):
        # What code before has read, such as the observation of the model.
        files.give_back(tensor)
    moved: dict[Group, Block] = {}
    # Each block is allocated when the tensors of the one before have moved: no two are in memory twice.
    for found, memory in zip(moving, memories, strict=True):
        moved[found] = Block(backend, found, files, memory)
        give_back_freed()
    staying = [tensor for found in groups if found not in moved for tensor in found.tensors]
    registration = backend.register(staying) if pin == "register" else None
    return [moved.get(found) or Block(backend, found, files, registration=registration) for found in groups]


def moves(found: Group, pin: PinMode) -> bool:
    """Whether these tensors move into a block, rather than stay in the memory where they are."""
    return pin == "alloc" or found.kind == "buffer" or not all(tensor.is_contiguous() for tensor in found.tensors)


def _check_tensor(index: int, module: torch.nn.Module, kind: Kind, tensor: torch.Tensor) -> None:
    where = f"layer {index} ({type(module).__name__})"
    if tensor.device.type != "cpu":
        raise ValueError(f"{where} has a tensor on {tensor.device}, but the model must be on the CPU; call .cpu()")
    if tensor.layout != torch.strided:
        raise ValueError(f"{where} has a {tensor.layout} tensor, but weights must be dense (torch.strided)")
    if has_hooks(tensor):
        raise ValueError(
            f"{where} has a hook on a parameter, which the devices' copies would not run; register it on the "
            "module, or change gradients in the step function"
        )
    if kind == "buffer" and tensor.requires_grad:
        raise ValueError(f"{where} has a buffer that requires grad; register it as a parameter")
