"""Trees of arguments and results: tuples, lists and mappings of tensors and plain values."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, ModuleType, NoneType
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor

# Types of immutable values, which all layers may share.
_PLAIN = (bool, int, float, complex, str, bytes, NoneType, enum.Enum, slice, torch.dtype, torch.device, torch.Size)

Box = MutableMapping[Any, Any] | list[Any]


def is_box(tree: object) -> TypeGuard[Box]:
    """Return whether a tree is a writable container: a list or a mapping.

    >>> is_box({}), is_box(()), is_box([])
    (True, False, True)
    """
    return _kind(type(tree)) in (list, MutableMapping)


def is_plain(leaf: object) -> bool:
    """Return whether a leaf is a constant. A function is one if it holds only constants.

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
    """Return a copy of the tree with each leaf replaced by `fn(leaf)`; containers keep their types.

    >>> mapped(lambda number: number + 1, (1, [2], {"a": 3}))
    (2, [3], {'a': 4})
    """
    kind = _kind(tree.__class__)
    if kind is None:
        return fn(tree)
    if kind is tuple:
        return like_tuple(
            cast("tuple[Any, ...]", tree), [mapped(fn, item) for item in cast("tuple[Any, ...]", tree)]
        )
    if kind is list:
        return [mapped(fn, item) for item in cast("list[Any]", tree)]
    copied = copy.copy(cast("MutableMapping[Any, Any]", tree))
    for key in list(copied):
        copied[key] = mapped(fn, copied[key])
    return copied


@lru_cache(maxsize=1024)
def _kind(kind: type[object]) -> type[object] | None:
    """Return which container objects of a type are: tuple, list or mapping; None for leaves.

    Remembered: asking whether something is a mapping goes through Python, and most leaves are not.
    """
    if issubclass(kind, torch.Size):
        return None
    return next((one for one in (tuple, list, MutableMapping) if issubclass(kind, one)), None)


def like_tuple(old: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """Return a tuple of the same type as `old`, such as a named tuple, with other items."""
    make = getattr(type(old), "_make", None)
    return tuple(items) if make is None else make(items)


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of a tree, in the order in which `mapped` visits them.

    >>> list(leaves(({"a": 1}, [None])))
    [1, None]
    """
    kind = _kind(tree.__class__)
    if kind is None:
        yield tree
        return
    items: Any = cast("MutableMapping[Any, Any]", tree).values() if kind is MutableMapping else tree
    for item in items:
        if _kind(item.__class__) is None:
            yield item
        else:
            yield from leaves(item)


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in a tree."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def emptied(box: Box) -> Box:
    """Return an empty container of the same type."""
    copied = copy.copy(box)
    copied.clear()
    return copied


def filled(empty: Box, contents: Any) -> Box:
    """Return a container of the type of `empty` with these contents, a list or a dict."""
    copied = copy.copy(empty)
    refill(copied, contents)
    return copied


def refill(box: Box, contents: Any) -> None:
    """Replace the contents of a container."""
    box.clear()
    if isinstance(box, list):
        box.extend(contents)
    else:
        box.update(contents)


def contents_of(box: Box) -> Any:
    """Return the contents of a container as a new list or dict."""
    return list(box) if isinstance(box, list) else dict(box)


def same(one: Any, other: Any) -> bool:
    """Return whether two trees hold the same objects in the same places."""
    ones, others = list(leaves(one)), list(leaves(other))
    return len(ones) == len(others) and all(a is b for a, b in zip(ones, others, strict=True))


def frozen(tree: Any) -> Hashable:
    """Return a value that is equal for trees of the same types, keys and constants; other leaves equal themselves.

    >>> frozen([1, {"a": None}]) == frozen([1, {"a": None}]), frozen([1]) == frozen((1,)), frozen(1) == frozen(1.0)
    (True, False, False)
    """
    if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        return type(cast("object", tree)), tuple(map(frozen, cast("tuple[Any, ...]", tree)))
    if isinstance(tree, MutableMapping):
        items = cast("MutableMapping[Any, Any]", tree).items()
        return type(cast("object", tree)), tuple((key, frozen(value)) for key, value in items)
    leaf = cast("object", tree)
    try:
        hash(leaf)
    except TypeError:
        # Such as a slice in Python 3.11.
        leaf = _Same(leaf)
    return type(leaf), leaf


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """Is equal to itself alone. `held`: as long as it lives, nothing else has its address."""

    held: object
