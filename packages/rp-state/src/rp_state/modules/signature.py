"""Detect changes from outside the engine that the blocks and device copies of layers depend on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch
from rp_transfer import inner_tensors

Signature = tuple[object, ...]
# Of every parameter and buffer, in the order of the walk.
GradFlags = tuple[bool, ...]


# All modules of each layer, in the order of ``modules()``. Kept since torch's walk is slow and calls need several.
Walk = tuple[tuple[torch.nn.Module, ...], ...]


def walk(layers: Sequence[torch.nn.Module]) -> Walk:
    """List the layers' current modules."""
    return tuple(tuple(layer.modules()) for layer in layers)


def signature(walked: Walk, places: Mapping[int, int]) -> Signature:
    """Return what blocks depend on: all modules, and each tensor's identity and address; see `grad_flags`, too.

    `places`: maps an address in a second block to that in the first, since publication swaps the two.
    """
    tensors = tuple(
        (id(inner), _place(inner, places), has_hooks(tensor))
        for tensor in _tensors(walked)
        for inner in inner_tensors(tensor)
    )
    return walked, tensors


def grad_flags(walked: Walk) -> GradFlags:
    """Return which tensors require grad now. Apart from `signature`: a change of flags alone moves no memory."""
    return tuple(tensor.requires_grad for tensor in _tensors(walked))


def _tensors(walked: Walk) -> Iterator[torch.Tensor]:
    return (
        tensor
        for modules in walked
        for module in modules
        for table in (module._parameters, module._buffers)  # pyright: ignore[reportPrivateUsage] - as `tensors_of` goes by
        for tensor in table.values()
        if tensor is not None
    )


def _place(tensor: torch.Tensor, places: Mapping[int, int]) -> int:
    # Read once: the optimizer's thread may swap the parameter's memory concurrently.
    address = tensor.data_ptr()
    return places.get(address, address)


# Attributes that torch sets on every module; others are set by the module's class or by the user.
_OWN = frozenset(vars(torch.nn.Module()))


def attributes(walked: Walk) -> list[object]:
    """List names and values of all modules' plain attributes, as a dropout's ``p`` or a patched ``forward``.

    What containers hold comes after them: PEFT writes the adapters that are merged, and their scaling, in place.
    """
    found: list[object] = []
    for module in (module for modules in walked for module in modules):
        for name, value in vars(module).items():
            if name in _OWN:
                continue
            found += (name, value)
            # No function of its own: a model with adapters has ten thousand of them, looked at in each call.
            if isinstance(value, dict):
                entries = cast("dict[object, object]", value)
                found.extend(entries)
                found.extend(entries.values())
            elif isinstance(value, list | set):
                found.extend(cast("Iterable[object]", value))
    return found


def training_flags(walked: Walk) -> tuple[tuple[bool, ...], ...]:
    """Return the training flag of every module of every layer, in the order of ``modules()``."""
    return tuple(tuple(module.training for module in modules) for modules in walked)


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return whether hooks run when a gradient of this parameter is computed."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))
