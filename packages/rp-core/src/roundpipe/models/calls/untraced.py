"""Methods that torch's compiler leaves alone, where it compiles a function around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def untraced(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Break the graph at a call of this function, and run all below it as it is.

    Traced, a call took 5 to 14 s, warned of the engine's locks and caches, and froze what it had read of them.

    >>> untraced(len)([1, 2])
    2
    """
    disabled: Callable[_Arguments, _Result] = torch._disable_dynamo(function)  # pyright: ignore

    @wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        # Only then, since the first call of `disabled` imports the compiler, which takes seconds.
        if torch.compiler.is_compiling():
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call
