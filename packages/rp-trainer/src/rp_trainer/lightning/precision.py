"""`HostPrecision`: Lightning's precision plugin for RoundPipe: autocast, clipping, and gradients for hooks."""

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
    'omit it for fp32, set "bf16-mixed" for autocast, or create the model in bfloat16, which gives it fp32 masters'
)


class HostPrecision(Precision):
    """Runs the layers unchanged or under autocast, and clips gradients in the engine's step.

    If the LightningModule or a callback has hooks that read gradients, ``.grad`` is set before these hooks run.

    `grad_norm`: the result of the last clipping by norm; see `SteppedByEngine.clip_at_next_step`.
    """

    def __init__(self, autocast_dtype: torch.dtype | None = None) -> None:
        self.autocast_dtype = autocast_dtype
        if autocast_dtype is not None:
            self.precision = "bf16-mixed"
        self.grad_norm: torch.Tensor | None = None

    def post_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        """Run the hooks after a backward pass."""
        if not module.automatic_optimization or _is_overridden(module.trainer, "on_after_backward"):
            module.trainer.strategy.show_gradients()
        return super().post_backward(tensor, module)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, the hooks before a step, and the step."""

        def run() -> Any:
            result = closure()
            if _is_overridden(model.trainer, "on_before_optimizer_step", "configure_gradient_clipping"):
                model.trainer.strategy.show_gradients()
            return result

        return super().optimizer_step(optimizer, model=model, closure=run, **kwargs)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        """Make the next step clip the norm of its gradients."""
        self.grad_norm = _stepped(optimizer).clip_at_next_step(float(clip_val))

    def clip_grad_by_value(self, optimizer: Any, clip_val: int | float) -> None:
        """Make the next step clip each value of its gradients."""
        _stepped(optimizer).clip_values_at_next_step(float(clip_val))


def on_host(given: Precision | None) -> HostPrecision:
    """Return the `HostPrecision` that does the same as Lightning's plugin.

    Raises `ValueError` for a precision that RoundPipe does not have, with the argument's name.
    """
    if isinstance(given, HostPrecision):
        return given
    if given is None or type(given) is Precision:
        return HostPrecision()
    if type(given) is MixedPrecision and given.precision == "bf16-mixed":
        return HostPrecision(torch.bfloat16)
    plugin = f"plugins={type(given).__name__}" if type(given).__module__.split(".")[0] != "lightning" else ""
    raise ValueError(
        "precision must be 32-true or bf16-mixed with RoundPipeStrategy, but is "
        f"{plugin or given.precision}: {_DTYPES}"
    )


def _is_overridden(trainer: Any, *hooks: str) -> bool:
    """Return whether the LightningModule or a callback overrides one of the hooks, which may read gradients."""
    own, others = trainer.lightning_module, trainer.callbacks
    return any(
        is_overridden(name, own) or any(hasattr(Callback, name) and is_overridden(name, one) for one in others)
        for name in hooks
    )


def _stepped(optimizer: Any) -> SteppedByEngine:
    # Users' code passes Lightning's wrapper around the optimizer.
    inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    assert isinstance(inner, SteppedByEngine)
    return inner
