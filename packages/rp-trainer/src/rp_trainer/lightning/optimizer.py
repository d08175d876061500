"""`ClosureOptimizer`: the optimizer that Lightning's loop holds, which runs a closure before it steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from roundpipe import AutoRoundPipe, RoundPipe

from rp_trainer.optimizer import SteppedByEngine, masters_of, with_own_groups


class ClosureOptimizer(SteppedByEngine):
    """Like `SteppedByEngine`; `step` takes a closure, and the norm is that of the optimizer's own parameters.

    Its groups have the model's own parameters, as callbacks expect. Frozen ones may be among them: they train from
    the first step after somebody has set their ``requires_grad``.
    """

    _keeps_frozen = True

    def __init__(
        self, engine: RoundPipe | AutoRoundPipe, optimizer: torch.optim.Optimizer, *, asynchronous: bool = False
    ) -> None:
        own = [list(group["params"]) for group in optimizer.param_groups]
        super().__init__(engine, optimizer, asynchronous=asynchronous)
        for group, parameters in zip(optimizer.param_groups, own, strict=True):
            group["params"] = parameters
        self._flags = self._found_flags()
        self._has_gradients = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Run `closure` with gradients enabled, then launch a step; returns what the closure returned."""
        with torch.enable_grad():
            found = None if closure is None else closure()
        self._opt_called = True
        self._follow_flags()
        super().step()
        self._has_gradients = False
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that no step has used. It does not wait for an asynchronous step."""
        del set_to_none
        if self._has_gradients or not self._asynchronous:
            self._engine.zero_grad()
        self._has_gradients = False

    def note_gradients(self) -> None:
        """There are gradients that no step has used."""
        self._has_gradients = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model that are trained from now on."""
        self.shown.add_param_group(param_group)
        self._follow_flags()

    def _clipped(self) -> list[torch.nn.Parameter]:
        """As Lightning clips: what is in the groups."""
        return [one for group in self._stepping.param_groups for one in group["params"]]

    # Which parameters train

    def _found_flags(self) -> list[list[bool]]:
        return [[one.requires_grad for one in group["params"]] for group in self.shown.param_groups]

    def _follow_flags(self) -> None:
        """Step the masters of what trains now."""
        if (flags := self._found_flags()) == self._flags:
            return
        self.finish()
        masters = masters_of(self._engine, self.shown.param_groups, keeps_frozen=True)
        # A new one: groups of one that has stepped must not change.
        self._stepping = with_own_groups(self._stepping)
        self._stepping.param_groups += [dict(one) for one in self._added_groups()]
        for group, shown in zip(self._stepping.param_groups, self.shown.param_groups, strict=True):
            group["params"] = [masters[one] for one in shown["params"]]
        self._flags = flags

    def _added_groups(self) -> Iterable[dict[str, Any]]:
        return self.shown.param_groups[len(self._stepping.param_groups) :]


def named_like(optimizer: torch.optim.Optimizer) -> type[ClosureOptimizer]:
    """The class, by the name of the user's optimizer: callbacks log by it."""
    return type(type(optimizer).__name__, (ClosureOptimizer,), {})


# Schedulers warn of an optimizer whose `step` they have not seen.
vars(ClosureOptimizer.step)["_wrapped_by_lr_sched"] = True
