"""Tensors inside objects that are no trees, where no function of this package reaches them."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from itertools import islice
from typing import Any, cast

import torch
from torch import nn

from rp_batch.arrays import is_array

__all__ = ["is_plain", "tensors_inside"]

# What is farther inside than this, or beyond so many objects, is not looked at.
_LEVELS = 12
_OBJECTS = 10_000
# These hold no tensors that belong to one value: a module's parameters are its own, a class's attributes too.
_CLOSED = (
    *(bool, int, float, complex, str, bytes, bytearray, memoryview, range, slice, type(None), type(...)),
    *(torch.dtype, torch.device, torch.Size, torch.Generator, torch.layout, torch.memory_format),
    *(type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType, types.TracebackType),
    *(nn.Module, Enum, weakref.ReferenceType),
)
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})

Steps = Iterable[tuple[str, Any]]


def is_plain(value: object) -> bool:
    """Return whether a value is of a common type without anything inside.

    >>> is_plain("text"), is_plain([])
    (True, False)
    """
    return type(value) in _PLAIN


def tensors_inside(value: object) -> Iterator[tuple[str, Any]]:
    """Yield the tensors inside an object, and NumPy's arrays, each with the text that leads there.

    >>> class State:
    ...     def __init__(self):
    ...         self.pair = [torch.zeros(2), "text"]
    >>> [(step, tuple(tensor.shape)) for step, tensor in tensors_inside(State())]
    [('.pair[0]', (2,))]

    Attributes, items, closures, arguments of partials, and what generators and iterators hold are looked at, but
    modules, classes and properties are not. A tensor or an array is not inside itself.
    """
    queue: deque[tuple[str, Any, int]] = deque([("", value, 0)])
    # The objects themselves, too: the `id` of one that is gone may come again.
    seen: dict[int, Any] = {id(value): value}
    while queue:
        path, holder, level = queue.popleft()
        for step, item in _opened(holder):
            if id(item) in seen or isinstance(item, _CLOSED):
                continue
            seen[id(item)] = item
            if isinstance(item, torch.Tensor) or is_array(item):
                yield path + step, item
            elif level < _LEVELS and len(seen) < _OBJECTS:
                queue.append((path + step, item, level + 1))


def _opened(value: Any) -> Steps:
    """Return what an object holds, step by step."""
    if isinstance(value, (*_CLOSED, torch.Tensor)) or is_array(value):
        return ()
    steps = [*_items(value), *_attributes(value)]
    return steps or _referents(value)


def _items(value: Any) -> Steps:
    match value:
        case Mapping():
            return _named(lambda: cast("Mapping[Any, Any]", value).items())
        case list() | tuple() | deque() | set() | frozenset():
            items = islice(cast("Iterable[Any]", value), _OBJECTS)
            return [(f"[{index}]", item) for index, item in enumerate(items)]
        case types.FunctionType():
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            closure = [(f" (closure: {name})", cell) for name, cell in cells]
            return [*closure, (" (defaults)", value.__defaults__), (" (defaults)", value.__kwdefaults__)]
        case types.CellType():
            return [("", item) for item in gc.get_referents(value)]
        case types.MethodType():
            return [(".__self__", value.__self__), (".__func__", value.__func__)]
        case functools.partial():
            return [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]  # pyright: ignore[reportUnknownMemberType]
        case types.GeneratorType():
            frame = value.gi_frame
            return [] if frame is None else [(f" (local: {name})", item) for name, item in frame.f_locals.items()]
        case _:
            return ()


def _named(items: Any) -> Steps:
    try:
        return [(f"[{key!r}]", item) for key, item in islice(items(), _OBJECTS)]
    except Exception:  # a user's mapping may raise anything; its attributes are looked at still
        return ()


def _attributes(value: Any) -> Steps:
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and not isinstance(value, types.FunctionType):
        yield from ((f".{name}", item) for name, item in list(cast("dict[str, Any]", attributes).items()))
    for base in type(value).__mro__:
        # Classes in C have such members, too, such as a function's globals.
        members = vars(base).items() if "__slots__" in vars(base) else ()
        for name, member in members:
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield f".{name}", member.__get__(value)
                except AttributeError:  # a slot without a value
                    continue


def _referents(value: Any) -> Steps:
    """Return what an object of a class in C refers to, such as what an iterator is of."""
    if isinstance(value, (Mapping, list, tuple, deque, set, frozenset, types.FunctionType, types.MethodType)):
        return ()
    return [(" (inside)", item) for item in gc.get_referents(value)]
