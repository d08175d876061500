"""The host optimizers of `rp_optim`, and what goes with them, under the name that training scripts use."""

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
