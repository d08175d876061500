"""Host optimizers, gradient clipping and kernel selection, re-exported from `rp_optim`."""

from rp_optim import (
    SGD,
    Adafactor,
    Adam,
    AdamW,
    Lion,
    Muon,
    available_kernels,
    clip_grad_norm_,
    kernel_in_use,
    muon_groups,
    use_kernel,
)

__all__ = [
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "Lion",
    "Muon",
    "available_kernels",
    "clip_grad_norm_",
    "kernel_in_use",
    "muon_groups",
    "use_kernel",
]
