"""Tensors of a state that is loaded: hidden from torch, which casts what it sees, or deferred."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch

from rp_optim.places.deferred import Deferred
from rp_optim.places.place import State


@dataclass(frozen=True, slots=True)
class _Hidden:
    """Wraps a state tensor so that torch does not cast it."""

    tensor: torch.Tensor


def hidden(states: dict[Any, Any]) -> dict[Any, Any]:
    """Return states, by parameter, in which torch sees no tensors but counters."""
    return {
        key: _hide_moments(cast("State", state)) if isinstance(state, dict) else state
        for key, state in states.items()
    }


def _hide_moments(state: State) -> State:
    # Move them to the host, as torch would: they may have been saved on a device.
    return {name: _Hidden(value.cpu()) if _is_moment(name, value) else value for name, value in state.items()}


def _is_moment(name: str, value: object) -> TypeGuard[torch.Tensor]:
    return name != "step" and isinstance(value, torch.Tensor)


def reveal(state: State, parameter: torch.Tensor, *, casts: bool) -> None:
    """Replace what was hidden or deferred by tensors. `casts`: to the parameter's dtype, as torch does."""
    for name, value in state.items():
        if isinstance(value, _Hidden):
            state[name] = value.tensor
        elif isinstance(value, Deferred):
            state[name] = value.read().to(parameter.dtype) if casts else value.read()
