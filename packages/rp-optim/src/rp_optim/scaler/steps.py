"""Which optimizers were unscaled and stepped since the last update, and what their gradients were."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import torch

from rp_optim.arrival import by_arrival
from rp_optim.errors import InvalidParameter, ScalerMisuse
from rp_optim.gradients import gradient_of, is_finite, scale, squares_of
from rp_optim.masters import known_to_all, own_grad
from rp_optim.scaler.numbers import fp32


class _Stage(Enum):
    UNSCALED = "unscaled"
    STEPPED = "stepped"


class ScaledSteps:
    """The steps since the last update; used on the thread that steps."""

    def __init__(self) -> None:
        self._stages: dict[torch.optim.Optimizer, _Stage] = {}
        # Whether an optimizer's gradients have an infinity or NaN; only of those that have gradients.
        self._infinite: dict[torch.optim.Optimizer, bool] = {}

    def has_begun(self) -> bool:
        """Whether any optimizer was unscaled or stepped since the last update."""
        return bool(self._stages)

    def has_any(self) -> bool:
        """Whether the gradients of any optimizer were unscaled."""
        return bool(self._infinite)

    def has_skipped(self) -> bool:
        """Whether any step was skipped, or would be: its gradients had an infinity or NaN."""
        return True in self._infinite.values()

    def unscale(self, optimizer: torch.optim.Optimizer, scaled_by: float) -> None:
        """Divide the optimizer's gradients by their loss's scale and check them. See `GradScaler.unscale_`."""
        if optimizer in self._stages:
            raise ScalerMisuse(
                f"unscale_ came after this optimizer was {self._stages[optimizer].value}; call update before it"
            )
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        _refuse_fp16(parameters)
        # Infinite for a scale that has shrunk to zero, as in torch.
        inverse = fp32(1 / scaled_by) if scaled_by else math.inf
        infinite: dict[int, float | None] = {}
        with torch.no_grad():
            for here in by_arrival(list(enumerate(parameters)), lambda item: item[1]):
                squares_of([one for _, one in here])  # In one kernel call; links cache the results.
                infinite.update((place, _unscale_one(parameter, inverse)) for place, parameter in here)
        purpose = f"a check of gradients of a loss that was scaled by {scaled_by}"
        everywhere = known_to_all(parameters, purpose, [infinite[place] for place in range(len(parameters))])
        if any(one is not None for one in everywhere):
            self._infinite[optimizer] = any(everywhere)
        self._stages[optimizer] = _Stage.UNSCALED

    def step(
        self, optimizer: torch.optim.Optimizer, scaled_by: float, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Unscale, unless done, and step if all gradients are finite. See `GradScaler.step`."""
        if self._stages.get(optimizer) is _Stage.STEPPED:
            raise ScalerMisuse("step was called for this optimizer already; call update before the next one")
        if optimizer not in self._stages:
            self.unscale(optimizer, scaled_by)
        if optimizer not in self._infinite:
            raise ScalerMisuse("no parameter of this optimizer has a gradient; step after a backward")
        self._stages[optimizer] = _Stage.STEPPED
        # The type of a step's result depends on the optimizer.
        step: Callable[..., Any] = optimizer.step
        return None if self._infinite[optimizer] else step(*args, **kwargs)


def _refuse_fp16(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        grad = own_grad(parameter)
        if grad is not None and grad.dtype == torch.float16:
            raise InvalidParameter(
                "an fp16 gradient would lose its small values when unscaled; train fp32 masters (optim_dtype), or "
                "keep fp32 weights under autocast"
            )


def _unscale_one(parameter: torch.Tensor, inverse: float) -> bool | None:
    """Unscale the gradient; return whether it has an infinity or NaN, None if there is no gradient."""
    if gradient_of(parameter) is None:
        return None
    found = not is_finite(parameter)
    scale(parameter, inverse)
    return found
