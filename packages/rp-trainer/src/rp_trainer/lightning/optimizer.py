"""`ClosureOptimizer`: the optimizer that Lightning's loop holds, which runs a closure before it steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rp_trainer.optimizer import SteppedByEngine


class ClosureOptimizer(SteppedByEngine):
    """Like `SteppedByEngine`; `step` takes a closure, and the norm is that of the optimizer's own parameters."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Run `closure` with gradients enabled, then launch a step; returns what the closure returned."""
        with torch.enable_grad():
            found = None if closure is None else closure()
        self._opt_called = True
        super().step()
        return found

    def _clipped(self) -> list[torch.nn.Parameter]:
        """As Lightning clips: what is in the groups."""
        return [one for group in self._stepping.param_groups for one in group["params"]]


def named_like(optimizer: torch.optim.Optimizer) -> type[ClosureOptimizer]:
    """The class, by the name of the user's optimizer: callbacks log by it."""
    return type(type(optimizer).__name__, (ClosureOptimizer,), {})


# Schedulers warn of an optimizer whose `step` they have not seen.
vars(ClosureOptimizer.step)["_wrapped_by_lr_sched"] = True
