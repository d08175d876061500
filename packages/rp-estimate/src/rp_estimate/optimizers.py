"""The size of an optimizer's state for a model that is not in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rp_optim import OPTIMIZERS, state_bytes
from torch import nn


def state_of(name: str, shapes: Sequence[torch.Size], dtype: torch.dtype, kind: str = "fp32") -> int:
    """Return the bytes of an optimizer's state for masters of these shapes. `kind`: the state's format.

    >>> state_of("adamw", [torch.Size((10, 10))], torch.float32)
    804
    >>> state_of("adamw", [torch.Size((10, 10))], torch.float32, "8bit")
    220
    """
    if not shapes:
        return 0
    optimizer: torch.optim.Optimizer = OPTIMIZERS[name]([nn.Parameter(torch.zeros(1, 1, dtype=dtype))], state=kind)
    # Host optimizers take no parameters without memory, but only shapes count here.
    masters = [nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape in shapes]
    optimizer.param_groups[0]["params"] = masters
    nbytes = state_bytes(optimizer)
    assert nbytes is not None
    return nbytes


def muon_state_of(
    hidden: Sequence[torch.Size], others: Sequence[torch.Size], dtype: torch.dtype, kind: str = "fp32"
) -> int:
    """Return the bytes of Muon's state for matrices of these shapes, and of AdamW's for the other masters.

    >>> muon_state_of([torch.Size((10, 10))], [torch.Size((10, 10))], torch.float32)
    1204
    """
    return state_of("muon", hidden, dtype, kind) + state_of("adamw", others, dtype, kind)
