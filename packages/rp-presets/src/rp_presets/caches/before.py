"""State of a call that layers write and the next call reads: a key-value cache, handed to layers by reference.

The code around the layers runs several times. Each time it must find the cache as it was before the layers, for
example its length, so all runs but the first are given a snapshot.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from types import NoneType
from typing import Any, cast

import torch
from torch import Tensor, nn

_MODULE = "transformers."


# Most of what caches hold beside tensors.
PLAIN = (bool, int, float, str, NoneType, torch.dtype, torch.device)


def is_state(leaf: object) -> bool:
    """Return whether a leaf is a cache of transformers.

    >>> from transformers import DynamicCache
    >>> is_state(DynamicCache()), is_state({})
    (True, False)
    """
    return _is_cache(type(leaf))


# It is asked of each argument of each layer.
@lru_cache(maxsize=1024)
def _is_cache(kind: type[object]) -> bool:
    # By name: importing the package does not import transformers, and some families have caches of their own.
    return any(base.__name__.endswith("Cache") and _is_of_transformers(base) for base in kind.__mro__)


class Before:
    """A leaf of the arguments that travel to the row's end: a cache, and its snapshot from before the layers.

    `stand_in`: makes of a tensor one that has its shape, but takes no memory.
    """

    def __init__(self, state: Any, stand_in: Callable[[Tensor], Tensor]) -> None:
        self.state = state
        # Held until the call's end, keys and values that layers replace would take twice their memory. And layers
        # have keys of the same shape.
        known = cached_by_shape(stand_in)
        self.snapshot = structure(state, lambda tensor: tensor.clone() if tensor.numel() == 1 else known(tensor))

    # None of the model's own layers reads it: what is captured with one may be replayed with another of the same
    # cache. The code around them does, so an engine captures none of that.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Before) and other.state is self.state

    def __hash__(self) -> int:
        return id(self.state)


def cached_by_shape(stand_in: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function, changed to make one result for all tensors of a shape, dtype and device."""
    made: dict[object, Tensor] = {}

    def known(tensor: Tensor) -> Tensor:
        key = tensor.shape, tensor.dtype, tensor.device
        if key not in made:
            made[key] = stand_in(tensor)
        return made[key]

    return known


def structure(cache: Any, tensor_of: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a cache: its objects and containers are new, its tensors what `tensor_of` makes of them."""
    return _copied(cache, tensor_of, {})


def _copied(value: Any, tensor_of: Callable[[Tensor], Tensor], memo: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return tensor_of(value)
    if value.__class__ in PLAIN:
        return value
    if isinstance(value, list | tuple):
        return type(value)(_copied(item, tensor_of, memo) for item in value)  # pyright: ignore
    if isinstance(value, dict):
        return {key: _copied(item, tensor_of, memo) for key, item in value.items()}  # pyright: ignore
    if not has_parts(value):
        return value
    if id(value) not in memo:
        held = cast("dict[str, Any]", vars(value))
        copied: object = object.__new__(type(cast("object", value)))
        memo[id(value)] = copied
        vars(copied).update({name: _copied(item, tensor_of, memo) for name, item in held.items()})
    return memo[id(value)]


def has_parts(value: object) -> bool:
    """Return whether an object is a cache or a part of one, whose attributes are the state."""
    is_open = hasattr(value, "__dict__") and not isinstance(value, type | nn.Module)
    # Also of a caller's own class that is derived of one. But no configuration.
    kinds = inspect.getmro(type(value))
    return is_open and any(map(_is_of_transformers, kinds)) and not hasattr(value, "to_dict")


def _is_of_transformers(kind: type[object]) -> bool:
    return kind.__module__.startswith(_MODULE)
