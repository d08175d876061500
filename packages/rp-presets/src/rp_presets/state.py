"""State of a call that layers write and the next call reads: a key-value cache, handed to layers by reference.

The code around the layers runs several times. Each time it must find the cache as it was before the layers, for
example its length, so all runs but the first are given a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

_MODULE = "transformers."


def is_state(leaf: object) -> bool:
    """Return whether a leaf is a cache of transformers.

    >>> from transformers import DynamicCache
    >>> is_state(DynamicCache()), is_state({})
    (True, False)
    """
    # By name: importing the package does not import transformers, and some families have caches of their own.
    return any(kind.__name__.endswith("Cache") and _is_of_transformers(kind) for kind in type(leaf).__mro__)


class Before:
    """A leaf of the arguments that travel to the row's end: a cache, and its snapshot from before the layers.

    `stand_in`: makes of a tensor one that has its shape, but takes no memory.
    """

    def __init__(self, state: Any, stand_in: Callable[[Tensor], Tensor]) -> None:
        self.state = state
        # Layers have keys of the same shape.
        self.snapshot = _snapshot(state, cached_by_shape(stand_in), {})


def cached_by_shape(stand_in: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function, changed to make one result for all tensors of a shape, dtype and device."""
    made: dict[object, Tensor] = {}

    def known(tensor: Tensor) -> Tensor:
        key = tensor.shape, tensor.dtype, tensor.device
        if key not in made:
            made[key] = stand_in(tensor)
        return made[key]

    return known


def _snapshot(value: Any, stand_in: Callable[[Tensor], Tensor], memo: dict[int, Any]) -> Any:
    """A copy of a cache that has the shapes of its keys and values. Lengths are copied, also those in tensors."""
    if isinstance(value, Tensor):
        # Held until the call's end, keys and values that layers replace would take twice their memory.
        return value.clone() if value.numel() == 1 else stand_in(value)
    if isinstance(value, list | tuple):
        return type(value)(_snapshot(item, stand_in, memo) for item in value)  # pyright: ignore
    if isinstance(value, dict):
        return {key: _snapshot(item, stand_in, memo) for key, item in value.items()}  # pyright: ignore
    if not _has_parts(value):
        return value
    if id(value) not in memo:
        held = cast("dict[str, Any]", vars(value))
        copied: object = object.__new__(type(cast("object", value)))
        memo[id(value)] = copied
        vars(copied).update({name: _snapshot(item, stand_in, memo) for name, item in held.items()})
    return memo[id(value)]


def _has_parts(value: object) -> bool:
    is_open = hasattr(value, "__dict__") and not isinstance(value, type | nn.Module)
    return is_open and _is_of_transformers(type(value)) and not hasattr(value, "to_dict")  # no configuration


def _is_of_transformers(kind: type[object]) -> bool:
    return kind.__module__.startswith(_MODULE)
