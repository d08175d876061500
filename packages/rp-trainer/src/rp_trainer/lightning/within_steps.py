"""`WithinSteps`: the submodule as the steps of a LightningModule see it."""

from __future__ import annotations

from typing import Any

from rp_trainer.lightning.optimizer import ClosureOptimizer
from rp_trainer.on_devices import OnDevices


class WithinSteps(OnDevices):
    """Like `OnDevices`; `zero_grad` is that of the optimizer.

    `optimizer`: the one that trains the submodule; None while nothing trains it.
    """

    optimizer: ClosureOptimizer | None = None

    def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's: a loss and its gradients in one call."""
        self.note_gradients()
        with self.autocast():
            return self.engine.forward_backward(*args, **kwargs)

    def note_gradients(self) -> None:
        """There are gradients that no step has used."""
        if self.optimizer is not None:
            self.optimizer.note_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that no step has used."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)
