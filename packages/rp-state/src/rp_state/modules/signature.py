"""Detect changes from outside the engine that the blocks and device copies of layers depend on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import FunctionType, ModuleType
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
    At the end is what objects hold, such as a configuration that layers share, in which a setting may be changed.
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
    _add_settings(found)
    return found


def _add_settings(found: list[object]) -> None:
    """Add what the objects among some attributes hold, and the objects and containers in these, each once."""
    seen: set[int] = set()
    level: list[object] = list(found)
    for _ in range(_DEPTH):
        inside: list[object] = []
        for value in level:
            settings = settings_of(value)
            if settings is None or id(settings) in seen or len(settings) > _MOST:
                continue
            seen.add(id(settings))
            inside.append(settings)
            for name, held_there in settings.items():
                if issubclass(type(held_there), (dict, list, set)):
                    inside += (name, *_entries(cast("Collection[object]", held_there)))
                else:
                    inside += (name, held_there)
        found += inside
        level = inside


def _entries(container: Collection[object]) -> Iterator[object]:
    """Yield a container and what is in it, unless it is large."""
    if len(container) <= _MOST:
        yield container
        yield from container
        if isinstance(container, dict):
            yield from cast("dict[object, object]", container).values()


def settings_of(value: object) -> dict[str, object] | None:
    """Return the attributes of an object of a class written in Python, of which each device has a copy; else None.

    >>> from types import SimpleNamespace
    >>> settings_of(SimpleNamespace(rate=2)), settings_of(torch.nn.Tanh()), settings_of(2)
    ({'rate': 2}, None, None)
    """
    kind = type(value)
    if not kind.__dictoffset__ or issubclass(kind, _NO_SETTINGS) or hasattr(kind, "__deepcopy__"):
        return None
    return object.__getattribute__(value, "__dict__")


# What is not copied with a layer, or looked at by itself.
_NO_SETTINGS = (torch.nn.Module, torch.Tensor, type, *(FunctionType, ModuleType, BaseException, partial))
# Configurations have some tens of settings, some of which are configurations. Larger objects are none.
_DEPTH, _MOST = 3, 500


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
