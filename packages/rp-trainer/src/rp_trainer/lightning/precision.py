"""`HostPrecision`: Lightning's precision plugin on RoundPipe: gradients for hooks, clipping, and autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

from rp_trainer.optimizer import SteppedByEngine

_DTYPES = (
    'leave it out for fp32, set "bf16-mixed" for autocast, or put the model into bfloat16 where it is made: its '
    "masters are then fp32"
)


class HostPrecision(Precision):
    """Runs the layers as they are, or under autocast; clips gradients in the engine's step.

    Where a LightningModule or callback has hooks that read gradients, parameters have them in ``.grad`` by then.

    `grad_norm`: what the last clipping by norm gave, see `SteppedByEngine.clip_at_next_step`.
    """

    def __init__(self, autocast_dtype: torch.dtype | None = None) -> None:
        self.autocast_dtype = autocast_dtype
        if autocast_dtype is not None:
            self.precision = "bf16-mixed"
        self.grad_norm: torch.Tensor | None = None

    def post_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        """Run the hooks after a backward."""
        if not module.automatic_optimization or _is_read(module.trainer, "on_after_backward"):
            module.trainer.strategy.show_gradients()
        return super().post_backward(tensor, module)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, the hooks before a step, and the step."""

        def run() -> Any:
            found = closure()
            if _is_read(model.trainer, "on_before_optimizer_step", "configure_gradient_clipping"):
                model.trainer.strategy.show_gradients()
            return found

        return super().optimizer_step(optimizer, model=model, closure=run, **kwargs)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        """Let the next step scale its gradients."""
        self.grad_norm = _stepped(optimizer).clip_at_next_step(float(clip_val))

    def clip_grad_by_value(self, optimizer: Any, clip_val: int | float) -> None:
        """Let the next step limit each value of its gradients."""
        _stepped(optimizer).clip_values_at_next_step(float(clip_val))


def on_host(given: Precision | None) -> HostPrecision:
    """What does the same as Lightning's own plugin.

    Raises `ValueError` for a precision that RoundPipe does not have, with the argument's name.
    """
    if isinstance(given, HostPrecision):
        return given
    if given is None or type(given) is Precision:
        return HostPrecision()
    if type(given) is MixedPrecision and given.precision == "bf16-mixed":
        return HostPrecision(torch.bfloat16)
    found = f"plugins={type(given).__name__}" if type(given).__module__.split(".")[0] != "lightning" else ""
    raise ValueError(
        "precision must be 32-true or bf16-mixed with RoundPipeStrategy, but is "
        f"{found or given.precision}: {_DTYPES}"
    )


def _is_read(trainer: Any, *hooks: str) -> bool:
    """Whether somebody has one of the hooks in which gradients are read or changed."""
    own, others = trainer.lightning_module, trainer.callbacks
    return any(
        is_overridden(name, own) or any(hasattr(Callback, name) and is_overridden(name, one) for one in others)
        for name in hooks
    )


def _stepped(optimizer: Any) -> SteppedByEngine:
    # Users' code gets Lightning's wrapper, which keeps attributes of its own.
    found = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    assert isinstance(found, SteppedByEngine)
    return found
