"""What caches of fixed tensors hold: those that layers write in place, and what Python knows beside them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, cast

from torch import Tensor

from rp_presets.caches.before import PLAIN, has_parts


def is_fixed(cache: Any) -> bool:
    """Return whether a cache's tensors stay where they are while layers write them, as transformers tells.

    >>> from transformers import DynamicCache
    >>> is_fixed(DynamicCache())
    False
    """
    return bool(getattr(cache, "is_compileable", False))


class HeldCaches:
    """What some caches hold now.

    >>> from transformers import Qwen3Config, StaticCache
    >>> cache = StaticCache(Qwen3Config(num_hidden_layers=1), max_cache_len=4)
    >>> state = HeldCaches([cache])
    >>> cache.layers[0].is_initialized = True
    >>> HeldCaches([cache]).facts == state.facts
    False
    >>> state.set_back()
    >>> HeldCaches([cache]).facts == state.facts
    True

    `tensors`: all of them. `facts`: equal as long as each tensor is where it was, and all else that caches hold is
    the same: numbers, flags, and how they are put together.
    """

    def __init__(self, caches: Iterable[Any]) -> None:
        self.tensors: list[Tensor] = []
        self.facts: list[Hashable] = []
        self._held: list[tuple[Any, Any]] = []
        self._seen: dict[int, object] = {}
        for cache in caches:
            self._look(cache)

    def set_back(self) -> None:
        """Set attributes and containers back to what they were; what is in the tensors stays."""
        for holder, content in self._held:
            if isinstance(holder, list):
                holder[:] = content
            else:
                holder.clear()
                holder.update(content)

    def _look(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self.tensors.append(value)
            self.facts.append((value.data_ptr(), value.dtype, tuple(value.shape), value.stride()))
        elif value.__class__ in PLAIN:
            # With the class, since 1 and True are equal.
            self.facts.append((value.__class__, value))
        elif id(value) not in self._seen and (isinstance(value, list | tuple | dict) or has_parts(value)):
            self._seen[id(cast("object", value))] = value
            self._open(value)
        else:
            self.facts.append(_Same(value))

    def _open(self, value: Any) -> None:
        if isinstance(value, list | tuple):
            items = cast("list[Any]", value)
            self.facts.append((type(items), len(items)))
            if isinstance(value, list):
                self._held.append((items, items.copy()))
            for item in items:
                self._look(item)
            return
        entries = cast("dict[Hashable, Any]", value if isinstance(value, dict) else vars(value))
        self.facts.append((cast("object", value).__class__, len(entries)))
        self._held.append((entries, entries.copy()))
        for name, item in entries.items():
            self.facts.append(name)
            self._look(item)


class _Same:
    """Is equal to what stands for the same object."""

    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)
