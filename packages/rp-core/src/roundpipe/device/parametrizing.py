"""Weights that layers parametrize in forward, as PEFT does; torch's cache of them, safe for several devices."""

from __future__ import annotations

import threading
from typing import Any

from torch import nn
from torch.nn.utils import parametrize


class ThreadCounter(threading.local):
    """A count of its own for each thread, in place of a number that code adds to and subtracts from.

    >>> counter = ThreadCounter()
    >>> counter += 1
    >>> bool(counter)
    True
    """

    def __init__(self) -> None:
        self.count = 0

    def __iadd__(self, number: int) -> ThreadCounter:
        self.count += number
        return self

    def __isub__(self, number: int) -> ThreadCounter:
        self.count -= number
        return self

    def __bool__(self) -> bool:
        return bool(self.count)


def cache_by_thread() -> None:
    """Let ``parametrize.cached()`` cache for the thread that is inside it only.

    PEFT computes adapted expert weights (``target_parameters``) in it, anew in each forward. Torch counts for the
    whole process who is inside, and empties the cache when nobody is. While another device's thread is inside, a
    twin's next microbatch would get the weights that the one before has computed.
    """
    torch_has: Any = parametrize
    if not isinstance(torch_has._cache_enabled, ThreadCounter):
        torch_has._cache_enabled = ThreadCounter()


def parametrizes_in_forward(module: nn.Module) -> bool:
    """Whether each forward parametrizes weights inside, as PEFT does for ``target_parameters``.

    Torch then sets such a weight to itself, which counts as writing it.
    """
    return any(cls.__name__ == "ParamWrapper" for cls in type(module).__mro__)
