"""Loss scaling for 16-bit gradients."""

from rp_optim.scaler.grad_scaler import GradScaler

__all__ = ["GradScaler"]
