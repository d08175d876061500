"""Copies of what a layer is handed, with the same strides and shared memory, to run it again from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import rp_batch
import torch

# Makes leaves that require grad where the flags say so, over the same memory; returns them first.
Enter = Callable[[Iterable[Any], Sequence[bool]], Sequence[Sequence[Any]]]


def copied(tree: Any) -> Any:
    """The tree with copies of its tensors, without their graph. Tensors that share memory share it in the copy.

    Strides and shared memory stay, since a layer may compute differently by strides and write what it is handed.

    >>> x = torch.zeros(3)
    >>> one, row = copied((x, x.expand(2, 3)))
    >>> one += 1
    >>> row.tolist(), row.stride()
    ([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], (0, 1))
    """
    memories: dict[int, torch.UntypedStorage] = {}
    return _of_tensors(tree, lambda tensor: _copy(tensor, memories))


def changed(tree: Any) -> Any:
    """The tree with other values in place of its tensors' own: in their range, where that is easy to tell.

    >>> changed((torch.tensor([1.0, 2.0]), torch.tensor([3, 4])))
    (tensor([1.5000, 2.7500]), tensor([4, 3]))
    """
    return _of_tensors(tree, _other)


def plain_enter(leaves: Iterable[Any], grads: Sequence[bool]) -> tuple[list[Any]]:
    """Return the leaves, requiring grad where the flags say so; a module must not write such leaves in place."""
    return ([leaf.requires_grad_() if grad else leaf for leaf, grad in zip(leaves, grads, strict=True)],)


def entered(tree: Any, like: Any, enter: Enter = plain_enter) -> Any:
    """The tree with graph-less tensors that require grad where those of `like` do; a layer may write them."""
    leaves, treedef = rp_batch.flatten(tree)
    models = rp_batch.flatten(like)[0]
    grads = [isinstance(model, torch.Tensor) and model.requires_grad for model in models]
    return rp_batch.unflatten(treedef, enter(leaves, grads)[0])


def _of_tensors(tree: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return rp_batch.map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def _copy(tensor: torch.Tensor, memories: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    plain = tensor.detach()
    if type(plain) is not torch.Tensor or plain.layout != torch.strided or plain.is_conj() or plain.is_neg():
        return plain.clone()
    memory = plain.untyped_storage()
    if memory.data_ptr() not in memories:
        memories[memory.data_ptr()] = memory.clone()
    empty = torch.empty(0, dtype=plain.dtype, device=plain.device)
    place = memories[memory.data_ptr()]
    return empty.set_(place, plain.storage_offset(), plain.size(), plain.stride())  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _other(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    if plain.is_floating_point() or plain.is_complex():
        return plain * 1.25 + 0.25
    return plain.flip(tuple(range(plain.ndim))) if plain.ndim and plain.dtype != torch.bool else plain.clone()
