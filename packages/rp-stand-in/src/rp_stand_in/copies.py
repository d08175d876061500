"""Copies of a user's model and of its parameters, and what is pickled of them, have the results of all steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, cast

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

# By parameter, what to call before it is copied. No attribute of the parameter, which would be copied, too.
_BEFORE: WeakIdKeyDictionary = WeakIdKeyDictionary()
# Any: torch's methods have no complete types.
_PARAMETER: Any = nn.Parameter
_OWN_DEEPCOPY, _OWN_REDUCE = _PARAMETER.__deepcopy__, _PARAMETER.__reduce_ex__


def copy_after(parameters: Iterable[nn.Parameter], do: Callable[[], object]) -> None:
    """Call `do` before any of these parameters is copied or pickled, alone or in a module.

    >>> import copy
    >>> layer = nn.Linear(1, 1, bias=False)
    >>> copy_after(layer.parameters(), lambda: print("settled"))
    >>> _ = copy.deepcopy(copy.deepcopy(layer))
    settled
    """
    _watch_torch()
    for parameter in parameters:
        _BEFORE[parameter] = do


@cache
def _watch_torch() -> None:
    """Let torch's parameters look for somebody to call, for the whole process: modules need no hooks for copies.

    No class of our own, see `rp_state.grad_attribute.reads`.
    """
    _PARAMETER.__deepcopy__, _PARAMETER.__reduce_ex__ = _deepcopied, _reduced


def _deepcopied(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    if id(parameter) not in memo:
        _prepare(parameter)
    return _OWN_DEEPCOPY(parameter, memo)


def _reduced(parameter: nn.Parameter, protocol: Any) -> Any:
    _prepare(parameter)
    return _OWN_REDUCE(parameter, protocol)


def _prepare(parameter: nn.Parameter) -> None:
    if parameter in _BEFORE:
        cast("Callable[[], object]", _BEFORE[parameter])()  # pyright: ignore[reportUnknownMemberType]
