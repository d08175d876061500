"""Nodes by what they are made of: dataclasses, subclasses of dict, `UserDict` and `SimpleNamespace`."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.utils import _pytree as torch_pytree

__all__ = ["close_record", "is_record", "open_record"]

# Attributes with such values are no children, but what parts must have in common.
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
# Of any keys and values, and called with instances of subclasses: hence `Any`.
_DICT: Any = dict
_ORDERED: Any = collections.OrderedDict
_USER: Any = collections.UserDict

Opened = tuple[list[Any], tuple[Any, ...], list[Any]]


@lru_cache
def is_record(cls: Any) -> bool:
    """Return whether instances of a class can be rebuilt exactly from their items, fields and attributes."""
    if issubclass(cls, nn.Module):
        return False
    if dataclasses.is_dataclass(cls):
        # A class with its own `__new__` (tensors, enums, exceptions, builtins) cannot be rebuilt from its fields.
        return cls.__new__ is object.__new__
    return issubclass(cls, (_DICT, _USER, SimpleNamespace)) and not _has_more(cls)


def _has_more(cls: Any) -> bool:
    """Return whether instances have state beside their items and their `__dict__`."""
    return issubclass(cls, collections.defaultdict) or any(getattr(base, "__slots__", ()) for base in cls.__mro__)


def open_record(node: Any) -> Opened:
    """Return the children of an instance, the context that rebuilds it with `close_record`, and the keys."""
    fields = _fields(node)
    items = _items(node)
    attributes = _attributes(node, fields)
    children = {name: value for name, value in attributes.items() if type(value) not in _PLAIN}
    others = {name: value for name, value in attributes.items() if name not in children}
    names = (*fields, *children)
    values = [*items.values(), *(getattr(node, name) for name in fields), *children.values()]
    keys: list[Any] = [*map(torch_pytree.MappingKey, items), *map(torch_pytree.GetAttrKey, names)]
    return values, (_class_of(node), tuple(items), names, others), keys


def close_record(values: Iterable[Any], context: tuple[Any, ...]) -> Any:
    """Build an instance from its children, unlike them in nothing else."""
    # Skip `__init__`, `__setitem__` and `__setattr__`: they may convert or reject values.
    cls, keys, names, others = context
    node = _empty(cls)
    found = iter(values)
    items = dict(zip(keys, found, strict=False))
    for name, value in (*others.items(), *zip(names, found, strict=True)):
        object.__setattr__(node, name, value)
    _fill(node, items)
    return node


def _empty(cls: type) -> Any:
    bases: tuple[Any, ...] = (_ORDERED, _DICT, SimpleNamespace, object)
    return next(base for base in bases if issubclass(cls, base)).__new__(cls)


def _class_of(node: object) -> Any:
    return type(node)


def _fields(node: Any) -> tuple[str, ...]:
    if not dataclasses.is_dataclass(node):
        return ()
    return tuple(field.name for field in dataclasses.fields(node) if hasattr(node, field.name))


def _items(node: Any) -> dict[Any, Any]:
    """Return what a mapping holds, past methods that a subclass has overridden."""
    if isinstance(node, _USER):
        return dict(node.data) if _holds_dict(node) else {}
    if isinstance(node, _ORDERED):
        return dict(_ORDERED.items(node))
    return dict(_DICT.items(node)) if isinstance(node, _DICT) else {}


def _holds_dict(node: Any) -> bool:
    """Return whether the data of a `UserDict` are a plain dict, whose items are children of the `UserDict`."""
    return _class_of(getattr(node, "data", None)) is dict


def _fill(node: Any, items: dict[Any, Any]) -> None:
    if isinstance(node, _USER):
        if "data" not in vars(node):
            object.__setattr__(node, "data", items)
    elif isinstance(node, _ORDERED):
        for key, value in items.items():
            _ORDERED.__setitem__(node, key, value)
    elif isinstance(node, _DICT):
        _DICT.update(node, items)


def _attributes(node: Any, fields: tuple[str, ...]) -> dict[str, Any]:
    """Return the attributes that are not fields or items, without cached properties, stale in a part."""
    cls = _class_of(node)
    attributes: dict[str, Any] = dict(getattr(node, "__dict__", {}))
    if isinstance(node, _USER) and _holds_dict(node):
        del attributes["data"]
    if any(base.__name__ == "BatchEncoding" for base in cls.__mro__):
        # What a tokenizer noted of each row of the batch: in a part it would be of other rows.
        attributes["_encodings"] = None
    others = {name: value for name, value in attributes.items() if name not in fields}
    return {k: v for k, v in others.items() if not isinstance(getattr(cls, k, None), cached_property)}
