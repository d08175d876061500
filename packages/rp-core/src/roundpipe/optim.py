"""Host optimizers, gradient clipping and kernel selection, re-exported from `rp_optim`."""

from rp_optim import (
    SGD,
    Adafactor,
    Adam,
    AdamW,
    Lion,
    available_kernels,
    clip_grad_norm_,
    kernel_in_use,
    use_kernel,
)

__all__ = [
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "Lion",
    "available_kernels",
    "clip_grad_norm_",
    "kernel_in_use",
    "use_kernel",
]
