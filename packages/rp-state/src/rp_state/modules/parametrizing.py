"""Make torch's cache of parametrized weights safe for several devices; PEFT's layers use it in forward."""

from __future__ import annotations

import threading
from typing import Any

from torch import nn
from torch.nn.utils import parametrize


class ThreadCounter(threading.local):
    """A counter with a separate value in each thread, for code that adds to and subtracts from a number.

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
    """Make ``parametrize.cached()`` cache only for the thread that is inside it.

    PEFT computes adapted expert weights (``target_parameters``) in it, anew in each forward. Torch counts how many
    of all threads are inside, and empties the cache when none is. While another device's thread is inside, a
    twin's next microbatch would get the weights that were computed for the one before.
    """
    torch_has: Any = parametrize
    if not isinstance(torch_has._cache_enabled, ThreadCounter):
        torch_has._cache_enabled = ThreadCounter()


def parametrizes_in_forward(module: nn.Module) -> bool:
    """Return whether a module's forward parametrizes weights, as PEFT's does for ``target_parameters``.

    Torch then sets such a weight to itself, which counts as writing it.
    """
    return any(cls.__name__ == "ParamWrapper" for cls in type(module).__mro__)
