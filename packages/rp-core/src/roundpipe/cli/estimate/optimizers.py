"""Optimizers by name, and the size of their state for a model that is not in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from rp_optim import SGD, Adafactor, Adam, AdamW, Lion, state_bytes
from torch import nn

OPTIMIZERS: dict[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": AdamW,
    "adam": Adam,
    "adafactor": Adafactor,
    "lion": Lion,
    "sgd": SGD,
    "sgd-momentum": lambda parameters: SGD(parameters, momentum=0.9),
}


def state_of(name: str, shapes: Sequence[torch.Size], dtype: torch.dtype) -> int:
    """Bytes of an optimizer's state for masters of these shapes.

    >>> state_of("adamw", [torch.Size((10, 10))], torch.float32)
    804
    """
    optimizer = OPTIMIZERS[name]([nn.Parameter(torch.zeros(1, dtype=dtype))])
    # Host optimizers take no parameters without memory, but only shapes count here.
    masters = [nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape in shapes]
    optimizer.param_groups[0]["params"] = masters
    found = state_bytes(optimizer)
    assert found is not None
    return found
