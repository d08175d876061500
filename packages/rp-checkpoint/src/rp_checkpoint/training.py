"""The objects of a training beside its model: optimizers, a scaler, schedulers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch


@dataclass(frozen=True, slots=True)
class TrainingObjects:
    """The objects of a training beside its model. `facts`: values that are saved unchanged."""

    optimizers: tuple[torch.optim.Optimizer, ...]
    scaler: Any
    schedulers: tuple[Any, ...]
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def checked(cls, optimizer: Any, scaler: Any, schedulers: Any) -> TrainingObjects:
        """Of one of a kind, several or None. Raises `TypeError` for what is no optimizer, scheduler or scaler."""
        optimizers, several = _several(optimizer), _several(schedulers)
        for one in optimizers:
            if not isinstance(one, torch.optim.Optimizer):
                raise TypeError(
                    f"optimizer must be a torch.optim.Optimizer or several, but is a {type(one).__name__}"
                )
        for one in several:
            if not _has_state(one):
                raise TypeError(
                    f"schedulers must be a learning-rate scheduler or several, but one is a {type(one).__name__}"
                )
        if scaler is not None and not _has_state(scaler):
            raise TypeError(f"scaler must be a GradScaler or None, but is a {type(scaler).__name__}")
        return cls(optimizers, scaler, several)


def _several(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return tuple(cast("Sequence[Any]", given)) if isinstance(given, list | tuple) else (given,)


def _has_state(one: object) -> bool:
    is_other = isinstance(one, torch.optim.Optimizer | torch.nn.Module | type)
    return not is_other and all(callable(getattr(one, name, None)) for name in ("state_dict", "load_state_dict"))


def scaler_state(scaler: Any) -> dict[str, Any] | None:
    """Return a scaler's state; for RoundPipe's scaler, with its pending asynchronous update."""
    if scaler is None:
        return None
    exact: Callable[[], dict[str, Any]] | None = getattr(scaler, "exact_state", None)
    return scaler.state_dict() if exact is None else exact()
