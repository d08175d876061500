"""Detect changes from outside the engine that the blocks and device copies of layers depend on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, cast

import torch
from rp_transfer import inner_tensors

Signature = tuple[object, ...]
# Of every parameter and buffer, in the order of the walk.
GradFlags = tuple[bool, ...]


class Walk(NamedTuple):
    """All modules of each layer, in the order of ``modules()``, and their parameters and buffers.

    Kept since walking is slow and calls need several.
    """

    modules: tuple[tuple[torch.nn.Module, ...], ...]
    tensors: list[torch.Tensor]


def walk(layers: Sequence[torch.nn.Module]) -> Walk:
    """List the layers' current modules and tensors."""
    modules = tuple(map(modules_of, layers))
    return Walk(modules, _tensors(modules))


def modules_of(module: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """Return what ``module.modules()`` yields, a few times as fast.

    >>> [type(one).__name__ for one in modules_of(torch.nn.Sequential(torch.nn.Tanh(), torch.nn.ReLU()))]
    ['Sequential', 'Tanh', 'ReLU']
    """
    found: dict[torch.nn.Module, None] = {}
    _add_modules(module, found)
    return tuple(found)


def _add_modules(module: torch.nn.Module, found: dict[torch.nn.Module, None]) -> None:
    if module in found:
        return
    kind = type(module)
    if kind.named_modules is not _NAMED_MODULES or kind.modules is not _MODULES:
        # It tells of other modules than it holds, as a wrapped model does.
        found.update(dict.fromkeys(module.modules()))
        return
    found[module] = None
    for child in module._modules.values():  # pyright: ignore[reportPrivateUsage] - torch's own walk has a generator for each
        if child is not None:
            _add_modules(child, found)


_NAMED_MODULES, _MODULES = torch.nn.Module.named_modules, torch.nn.Module.modules  # pyright: ignore[reportUnknownMemberType]


def signature(walked: Walk, places: Mapping[int, int]) -> Signature:
    """Return what blocks depend on: all modules, and each tensor's identity and address; see `grad_flags`, too.

    `places`: maps an address in a second block to that in the first, since publication swaps the two.
    """
    tensors = tuple(
        (id(inner), _place(inner, places), has_hooks(tensor))
        for tensor in walked.tensors
        for inner in inner_tensors(tensor)
    )
    return walked.modules, tensors


def grad_flags(walked: Walk) -> GradFlags:
    """Return which tensors require grad now. Apart from `signature`: a change of flags alone moves no memory."""
    return tuple(tensor.requires_grad for tensor in walked.tensors)


def _tensors(modules: Iterable[Iterable[torch.nn.Module]]) -> list[torch.Tensor]:
    return [
        tensor
        for some in modules
        for module in some
        for table in (module._parameters, module._buffers)  # pyright: ignore[reportPrivateUsage] - as `tensors_of` goes by
        if table
        for tensor in table.values()
        if tensor is not None
    ]


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
    for module in (module for modules in walked.modules for module in modules):
        for name, value in vars(module).items():
            if name in _OWN:
                continue
            found += (name, value)
            # No function of its own: a model with adapters has ten thousand of them, looked at in each call.
            # By type: `isinstance` asks objects for their class, which may be code of their own that raises.
            if issubclass(type(value), dict):
                entries = cast("dict[object, object]", value)
                found.extend(entries)
                found.extend(entries.values())
            elif issubclass(type(value), (list, set)):
                found.extend(cast("Iterable[object]", value))
    return found


def containers(attributes: Iterable[object]) -> list[Iterable[object]]:
    """Return the containers among some attributes whose entries `attributes` lists."""
    return [cast("Iterable[object]", one) for one in attributes if issubclass(type(one), (dict, list, set))]


def held(walked: Walk, among: Iterable[Iterable[object]]) -> tuple[list[str], list[object]]:
    """Return the names of all that modules hold, also of what torch sets on each, and these objects.

    `among`: containers, whose entries come after them. Where all are the same as before, so are `attributes`,
    which take twice as long.
    """
    tables = [vars(module) for modules in walked.modules for module in modules]
    objects = list(chain.from_iterable(table.values() for table in tables))
    for one in among:
        objects.extend(one)
        if isinstance(one, dict):
            objects.extend(cast("dict[object, object]", one).values())
    return list(chain.from_iterable(tables)), objects


def training_flags(walked: Walk) -> tuple[tuple[bool, ...], ...]:
    """Return the training flag of every module of every layer, in the order of ``modules()``."""
    return tuple(tuple(module.training for module in modules) for modules in walked.modules)


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return whether hooks run when a gradient of this parameter is computed."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))
