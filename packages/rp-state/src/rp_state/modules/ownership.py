"""Exclusive ownership of parameters by models: two models would overwrite each other's updates."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary


class Claim:
    """The parameters that one model owns, until this object is garbage-collected.

    >>> layer = nn.Linear(2, 2)
    >>> first, second = Claim("first"), Claim("second")
    >>> first.take([layer])
    >>> second.take([layer])
    Traceback (most recent call last):
    ValueError: parameter 'weight' of layer 0 (Linear) already belongs to the RoundPipe model 'first'; ...
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._held: set[int] = set()

    def take(self, modules: Sequence[nn.Module]) -> None:
        """Own the parameters of these modules; release all others.

        Raises `ValueError` if another model owns one of them.
        """
        named = dict(_named(modules))
        if any(self._other(parameter) for parameter in named):
            # The other model may have been dropped without being collected yet.
            gc.collect()
        for parameter, name in named.items():
            if other := self._other(parameter):
                raise ValueError(
                    f"parameter {name} already belongs to the RoundPipe model {other.name!r}; put both parts "
                    "into one model, give each a copy, or drop the other model first"
                )
        self._held = set(map(id, named))
        for parameter in named:
            _CLAIMS[parameter] = weakref.ref(self)

    def holds(self, parameter: torch.Tensor) -> bool:
        """Return whether the model owns this parameter."""
        return id(parameter) in self._held

    def _other(self, parameter: torch.Tensor) -> Claim | None:
        return next((claim for claim in _claims(parameter) if claim is not self), None)


def owner_of(parameter: torch.Tensor) -> str | None:
    """Return the name of the model that owns a parameter; None if there is none.

    >>> layer, claim = nn.Linear(2, 2), Claim("first")
    >>> claim.take([layer])
    >>> owner_of(layer.weight), owner_of(nn.Linear(2, 2).weight)
    ('first', None)
    """
    return next((claim.name for claim in _claims(parameter)), None)


def _claims(parameter: torch.Tensor) -> list[Claim]:
    """Return the claim of the model that owns a parameter, or nothing."""
    references = cast("list[weakref.ref[Claim]]", [_CLAIMS[parameter]] if parameter in _CLAIMS else [])
    return [claim for reference in references if (claim := reference()) and claim.holds(parameter)]


_CLAIMS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _named(modules: Sequence[nn.Module]) -> Iterable[tuple[torch.Tensor, str]]:
    for index, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            yield parameter, f"{name!r} of layer {index} ({type(module).__name__})"
