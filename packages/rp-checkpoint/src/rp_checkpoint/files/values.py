"""Encode plain Python values as JSON, and their tensors separately, without pickle."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from rp_optim import Deferred

from rp_checkpoint.errors import CheckpointError

_MARK = "__roundpipe__"
# What `keep` is called with: a tensor, or one that is not in memory.
Tensor = torch.Tensor | Deferred

_SCALARS = (bool, int, float, str)


def encode(value: Any, path: str, keep: Callable[[str, Tensor], None]) -> Any:
    """Encode a value for JSON. `path`: its name. `keep` is called with the name of each tensor and the tensor.

    >>> tensors = {}
    >>> encode({"a": (1, torch.ones(2))}, "x", tensors.__setitem__)
    {'a': {'__roundpipe__': 'tuple', 'value': [1, {'__roundpipe__': 'tensor', 'value': 'x.a.1'}]}}

    Raises `CheckpointError` for a value that JSON and tensors do not express.
    """
    if value is None or type(value) in _SCALARS:
        return value
    if isinstance(value, Tensor):
        keep(path, value)
        return _marked("tensor", path)
    if isinstance(value, torch.dtype):
        return _marked("dtype", str(value).removeprefix("torch."))
    if isinstance(value, Mapping):
        return _mapping(cast("Mapping[Any, Any]", value), path, keep)
    if isinstance(value, list | tuple | deque | set | frozenset):
        return _sequence(cast("Any", value), path, keep)
    if _is_number_of_numpy(value):
        return value.item()
    raise CheckpointError(
        f"{_shown(path)} must be made of numbers, text, lists, dicts and tensors, which a checkpoint holds, but "
        f"its type is {type(value).__name__}; omit it, or save what its state_dict() returns, or of an array "
        "torch.from_numpy(...)"
    )


def _is_number_of_numpy(value: Any) -> bool:
    return type(value).__module__ == "numpy" and callable(getattr(value, "item", None)) and value.ndim == 0


def _shown(path: str) -> str:
    """Return the name as the user knows it: ``facts`` are arguments of `save_checkpoint`."""
    return path.removeprefix("facts.")


def _marked(kind: str, value: Any) -> dict[str, Any]:
    return {_MARK: kind, "value": value}


def _sequence(value: Any, path: str, keep: Callable[[str, Tensor], None]) -> Any:
    items = [encode(item, f"{path}.{index}", keep) for index, item in enumerate(value)]
    if type(value) is list:
        return items
    kind = type(value).__name__
    if type(value) in (tuple, set, frozenset):
        return _marked(kind, items)
    if type(value) is deque:
        return {**_marked("deque", items), "maxlen": value.maxlen}
    if issubclass(type(value), tuple):
        raise CheckpointError(f"{_shown(path)} must be a plain tuple, but its type is {kind}")
    return items


def _mapping(value: Mapping[Any, Any], path: str, keep: Callable[[str, Tensor], None]) -> Any:
    kind = type(value).__name__ if type(value) in (Counter, OrderedDict) else "dict"
    if kind == "dict" and all(type(key) is str for key in value) and _MARK not in value:
        return {key: encode(item, f"{path}.{key}", keep) for key, item in value.items()}
    items = [
        [encode(key, f"{path} (a key)", keep), encode(item, f"{path}.{key}", keep)] for key, item in value.items()
    ]
    return _marked(kind, items)


_CONSTRUCTORS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "Counter": lambda items: Counter(dict(items)),
    "OrderedDict": OrderedDict,
    "dtype": lambda name: getattr(torch, name),
}


def decode(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Return the value that was given to `encode`. `tensor`: returns a tensor by its name.

    >>> decode(encode({1: (2.5, None)}, "x", lambda *_: None), lambda _: None)
    {1: (2.5, None)}
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    encoded = cast("dict[str, Any]", value)
    kind = encoded.get(_MARK)
    if kind is None:
        return {key: decode(item, tensor) for key, item in encoded.items()}
    if kind == "tensor":
        return tensor(encoded["value"])
    inner = decode(encoded["value"], tensor)
    return deque(inner, encoded["maxlen"]) if kind == "deque" else _CONSTRUCTORS[kind](inner)
