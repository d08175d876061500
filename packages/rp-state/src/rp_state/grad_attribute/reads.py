"""Notice reads of ``.grad`` of models' own parameters where it is None, though devices have computed gradients."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from typing import Any, Protocol, cast

import torch
from rp_errors import TrainingWarning, warn_user
from rp_optim.masters import own_grad
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

# Torch's own attribute: a descriptor written in C, which has no Python type.
_OWN_GRAD: Any = torch.Tensor.grad
# By parameter, a function that returns the warning, if any. No attribute of the parameter, which would be saved.
_ON_MISSING: WeakIdKeyDictionary = WeakIdKeyDictionary()


class TellsRead(Protocol):
    """Returns, once, what is wrong with a read of a gradient that is not there."""

    def __call__(self, parameter: torch.Tensor, *, drops: bool) -> str | None:
        """Return the words, or None. `drops`: a ``zero_grad`` reads it, which means to drop the gradient."""
        ...


def watch_parameters(parameters: Iterable[torch.Tensor], tell: TellsRead) -> None:
    """Warn as `tell` returns, if it does, whenever ``.grad`` of one of these parameters is read and is None.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> watch_parameters([weight], lambda parameter, drops: print(tuple(parameter.shape), drops))
    >>> weight.grad
    (2,) False
    >>> weight.grad = torch.zeros(2)
    >>> weight.grad
    tensor([0., 0.])
    """
    _watch_torch()
    for parameter in parameters:
        _ON_MISSING[parameter] = tell


@cache
def _watch_torch() -> None:
    """Make ``.grad`` of torch's parameters a property that looks for missing gradients; for the whole process.

    Not a class of our own for a model's parameters: ``nn.Parameter(weight)`` and torch's parametrizations refuse
    any other class, and compiled code cannot read its ``.grad``. A read takes 0.07 microseconds longer.
    """
    watched: Any = property(_read, _OWN_GRAD.__set__, _OWN_GRAD.__delete__, _OWN_GRAD.__doc__)
    nn.Parameter.grad = watched


def _read(parameter: torch.Tensor) -> torch.Tensor | None:
    gradient = own_grad(parameter)
    if gradient is None and parameter in _ON_MISSING:
        _tell(parameter)
    return gradient


def _tell(parameter: torch.Tensor) -> None:
    reader = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    name, module = reader.f_code.co_name, str(reader.f_globals.get("__name__"))
    # Torch looks whether there is something to move or to compile.
    if name == "_apply" or module.startswith("torch._"):
        return
    tell = cast("TellsRead", _ON_MISSING[parameter])
    if (words := tell(parameter, drops=name == "zero_grad")) is not None:
        warn_user(words, TrainingWarning)
