"""Trees of arguments and results: tuples, lists and mappings of tensors and plain values."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterator, MutableMapping
from types import BuiltinFunctionType, FunctionType, ModuleType, NoneType
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor

# Values that cannot change, so every layer may have the same object.
_PLAIN = (bool, int, float, complex, str, bytes, NoneType, enum.Enum, slice, torch.dtype, torch.device, torch.Size)

Box = MutableMapping[Any, Any] | list[Any]


def is_box(tree: object) -> TypeGuard[Box]:
    """Whether it is a container that can be written: a list or a mapping.

    >>> is_box({}), is_box(()), is_box([])
    (True, False, True)
    """
    return isinstance(tree, list | MutableMapping)


def is_plain(leaf: object) -> bool:
    """Whether a leaf is a constant. A function is one if it holds nothing else.

    >>> is_plain(len), is_plain(torch.ones(1)), is_plain(torch.ones(1).add)
    (True, False, False)
    """
    if isinstance(leaf, FunctionType):
        cells = [cell.cell_contents for cell in leaf.__closure__ or ()]
        return all(map(is_plain, leaves([*cells, leaf.__defaults__, leaf.__kwdefaults__])))
    if isinstance(leaf, BuiltinFunctionType):
        return leaf.__self__ is None or isinstance(leaf.__self__, ModuleType)
    return isinstance(leaf, (*_PLAIN, type))


def mapped(fn: Callable[[Any], Any], tree: Any) -> Any:
    """A copy of the tree with each leaf replaced by `fn(leaf)`; containers keep their types.

    >>> mapped(lambda number: number + 1, (1, [2], {"a": 3}))
    (2, [3], {'a': 4})
    """
    if isinstance(tree, tuple) and not isinstance(tree, torch.Size):
        return like_tuple(
            cast("tuple[Any, ...]", tree), [mapped(fn, item) for item in cast("tuple[Any, ...]", tree)]
        )
    if isinstance(tree, list):
        return [mapped(fn, item) for item in cast("list[Any]", tree)]
    if isinstance(tree, MutableMapping):
        found = copy.copy(cast("MutableMapping[Any, Any]", tree))
        for key in list(found):
            found[key] = mapped(fn, found[key])
        return found
    return fn(tree)


def like_tuple(old: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """A tuple of the type of `old`, such as a named tuple, with other items."""
    make = getattr(type(old), "_make", None)
    return tuple(items) if make is None else make(items)


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of a tree, in the order in which `mapped` visits them.

    >>> list(leaves(({"a": 1}, [None])))
    [1, None]
    """
    if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        for item in cast("tuple[Any, ...]", tree):
            yield from leaves(item)
    elif isinstance(tree, MutableMapping):
        for item in cast("MutableMapping[Any, Any]", tree).values():
            yield from leaves(item)
    else:
        yield tree


def tensors(tree: Any) -> list[Tensor]:
    """The leaves that are tensors."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def emptied(box: Box) -> Box:
    """A container of the same type without items."""
    found = copy.copy(box)
    found.clear()
    return found


def filled(empty: Box, contents: Any) -> Box:
    """A container of the type of `empty` with these contents: a list, or a dict."""
    found = copy.copy(empty)
    refill(found, contents)
    return found


def refill(box: Box, contents: Any) -> None:
    """Replace what a container holds."""
    box.clear()
    if isinstance(box, list):
        box.extend(contents)
    else:
        box.update(contents)


def contents_of(box: Box) -> Any:
    """What a container holds, as a new list or dict."""
    return list(box) if isinstance(box, list) else dict(box)


def same(one: Any, other: Any) -> bool:
    """Whether two trees hold the same objects in the same places."""
    ones, others = list(leaves(one)), list(leaves(other))
    return len(ones) == len(others) and all(a is b for a, b in zip(ones, others, strict=True))
