"""`ClosureOptimizer`: the optimizer in Lightning's loop, which runs a closure before it steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rp_trainer.optimizer import SteppedByEngine


class ClosureOptimizer(SteppedByEngine):
    """Like `SteppedByEngine`, but `step` takes a closure, and only parameters in the groups are clipped."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Run `closure` with gradients enabled, then launch a step; return the closure's result."""
        with torch.enable_grad():
            result = None if closure is None else closure()
        self._opt_called = True
        super().step()
        return result

    def _clipped(self) -> list[torch.nn.Parameter]:
        """Return the parameters to clip: those in the groups, as in Lightning."""
        return [one for group in self._stepping.param_groups for one in group["params"]]


def named_like(optimizer: torch.optim.Optimizer) -> type[ClosureOptimizer]:
    """Return a `ClosureOptimizer` class with the name of the user's optimizer, since callbacks log by it."""
    return type(type(optimizer).__name__, (ClosureOptimizer,), {})


# Schedulers warn about an optimizer whose `step` they have not wrapped.
vars(ClosureOptimizer.step)["_wrapped_by_lr_sched"] = True
