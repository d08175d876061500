"""A model's layers on the host, whose tensors move into blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from rp_transfer import Backend, BlockGroup, Kind, MappedFiles, give_back_freed, group, tensors_of

from rp_state.block import Block
from rp_state.frozen.store import FrozenStore
from rp_state.modules.signature import has_hooks

PinMode = Literal["alloc", "register", "off"]


@dataclass(frozen=True, slots=True)
class LayerState:
    """One layer on the host with the blocks it uses."""

    index: int
    module: torch.nn.Module
    blocks: tuple[Block, ...]

    def __str__(self) -> str:
        """Return its index and type, such as ``layer 3 (Linear)``."""
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
        """Return the bytes of its blocks of these kinds, or of all."""
        return sum(block.nbytes for block in self.blocks if not kinds or block.kind in kinds)


# Called with the groups of a model's tensors, and the files that these may lie in, before their blocks are
# allocated; may raise to prevent that.
Foresee = Callable[[Sequence[BlockGroup], MappedFiles], None]


def build_layers(
    backend: Backend,
    modules: Sequence[torch.nn.Module],
    pin: PinMode,
    foresee: Foresee,
    kept: Sequence[Block] = (),
    store: FrozenStore | None = None,
) -> tuple[LayerState, ...]:
    """Group the layers' tensors into blocks.

    The tensors of a block are used by exactly the same layers. So a tied parameter gets a separate block, and a
    module that occurs twice in the sequence has one block for both.

    `kept`: blocks that stay as they are, whether or not their parameters still require grad; other tensors are
    grouped beside them. `store`: where frozen weights are put; None: they are in memory.

    Raises what `foresee` raises, `DiskError` if frozen weights cannot be put on disk, and `ValueError` for tensors
    that are not on the host, sparse and inference tensors, parameters with hooks, and buffers that require grad.
    """
    for index, module in enumerate(modules):
        for kind, tensor in tensors_of(module):
            _check_tensor(index, module, kind, tensor)
    groups = _without(group(modules), kept)
    files = MappedFiles.now()
    foresee(groups, files)
    blocks = [*kept, *_build_blocks(backend, groups, pin, files, store)]
    persistent = _persistent_buffers(modules)
    for block in blocks:
        block.is_persistent = any(id(tensor) in persistent for tensor in block.tensors)
    return tuple(
        LayerState(index, module, tuple(block for block in blocks if index in block.users))
        for index, module in enumerate(modules)
    )


def _without(groups: Sequence[BlockGroup], kept: Sequence[Block]) -> list[BlockGroup]:
    staying = {id(tensor) for block in kept for tensor in block.tensors}
    rest = [(each, tuple(one for one in each.tensors if id(one) not in staying)) for each in groups]
    return [BlockGroup(each.kind, each.users, tensors) for each, tensors in rest if tensors]


def _persistent_buffers(modules: Sequence[torch.nn.Module]) -> set[int]:
    """Return the ids of the buffers that are in state dicts."""
    inner = [one for module in modules for one in module.modules()]
    return {
        id(buffer)
        for module in inner
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if name not in module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage] - no public way
    }


def _build_blocks(
    backend: Backend,
    groups: Sequence[BlockGroup],
    pin: PinMode,
    files: MappedFiles,
    store: FrozenStore | None,
) -> list[Block]:
    on_disk = _on_disk(backend, [each for each in groups if store and goes_to_disk(each)], files, store)
    in_memory = [each for each in groups if each not in on_disk]
    built = on_disk | _in_memory(backend, in_memory, pin, files)
    return [built[each] for each in groups]


def _on_disk(
    backend: Backend, groups: Sequence[BlockGroup], files: MappedFiles, store: FrozenStore | None
) -> dict[BlockGroup, Block]:
    if store is None:
        return {}
    store.reserve([each.tensors for each in groups], files)
    for tensor in (tensor for each in groups for tensor in each.tensors):
        files.give_back(tensor)
    return {each: Block(backend, each, files, on_disk=store.take_in(each.tensors, files)) for each in groups}


def _in_memory(
    backend: Backend, groups: Sequence[BlockGroup], pin: PinMode, files: MappedFiles
) -> dict[BlockGroup, Block]:
    moving = [each for each in groups if moves(each, pin)]
    memories = backend.host_blocks([each.layout for each in moving])
    for tensor in (tensor for each in moving for tensor in each.tensors):
        # Earlier code, such as the observation of the model, may have read the files into memory.
        files.give_back(tensor)
    moved: dict[BlockGroup, Block] = {}
    # Allocated after the previous block's tensors have moved: only one block's tensors are in memory twice.
    for each, memory in zip(moving, memories, strict=True):
        moved[each] = Block(backend, each, files, memory)
        give_back_freed()
    staying = [tensor for each in groups if each not in moved for tensor in each.tensors]
    registration = backend.register(staying) if pin == "register" else None
    return {each: moved.get(each) or Block(backend, each, files, registration=registration) for each in groups}


def goes_to_disk(each: BlockGroup | Block) -> bool:
    """Return whether these tensors are what a `FrozenStore` takes."""
    return each.kind == "frozen"


def moves(each: BlockGroup, pin: PinMode, *, has_disk: bool = False) -> bool:
    """Return whether these tensors move into a block in memory rather than stay where they are, or go to disk."""
    if has_disk and goes_to_disk(each):
        return False
    return pin == "alloc" or each.kind == "buffer" or not all(tensor.is_contiguous() for tensor in each.tensors)


def _check_tensor(index: int, module: torch.nn.Module, kind: Kind, tensor: torch.Tensor) -> None:
    where = f"layer {index} ({type(module).__name__})"
    if tensor.device.type != "cpu":
        raise ValueError(f"{where} has a tensor on {tensor.device}, but the model must be on the CPU; call .cpu()")
    if tensor.layout != torch.strided:
        raise ValueError(f"{where} has a {tensor.layout} tensor, but weights must be dense (torch.strided)")
    if tensor.is_inference():
        raise ValueError(
            f"{where} has a {'buffer' if kind == 'buffer' else 'parameter'} that was made under "
            "torch.inference_mode(), of which torch counts no writes and which nothing may train; make the model, "
            "or replace the tensor by its clone(), outside of it"
        )
    if has_hooks(tensor):
        raise ValueError(
            f"{where} has a hook on a parameter, which the devices' copies would not run; register it on the "
            "module, or change gradients in the step function"
        )
    if kind == "buffer" and tensor.requires_grad:
        raise ValueError(f"{where} has a buffer that requires grad; register it as a parameter")
