"""Parameters, gradients and ten steps of an optimizer, ours or torch's, for tests that compare them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import rp_optim
import torch

WIDTHS = (4, 8, 16, 32, 64, 128)
"""Elements in a register of each instruction set, unrolled or not."""

LENGTHS = (0, *sorted({width + off for width in (2, *WIDTHS) for off in (-1, 0, 1)}), 1023, 1024, 1025)
STEPS = 10


def shapes() -> list[tuple[int, ...]]:
    """Vectors of every length, a number, and matrices."""
    return [*((length,) for length in LENGTHS), (), (3, 5), (17, 33), (2, 3, 16), (1, 7), (40, 1), (2, 2, 3, 3)]


def start() -> list[torch.Tensor]:
    """What the parameters are at first."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes()]


def gradients(like: Sequence[torch.Tensor], dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """`STEPS` times one gradient each, of very different sizes."""
    generator = torch.Generator().manual_seed(1)
    sizes = [10.0 ** (step % 4 - 2) for step in range(STEPS)]
    return [[(torch.randn(t.shape, generator=generator) * size).to(dtype) for t in like] for size in sizes]


_FOUND: dict[str, tuple[list[torch.Tensor], torch.optim.Optimizer]] = {}


def train_torch(
    make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, options: dict[str, Any]
) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """Ten steps of torch's own optimizer, in fp32, on gradients that were once of `dtype`; not to be changed."""
    key = f"{make} {dtype} {options}"
    if key not in _FOUND:
        _FOUND[key] = _train_torch(make, gradients(start(), dtype), options)
    return _FOUND[key]


def _train_torch(
    make: Callable[..., torch.optim.Optimizer], grads: Sequence[Sequence[torch.Tensor]], options: dict[str, Any]
) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    # Empty parameters have no gradient: torch's Adafactor divides by zero.
    parameters = [torch.nn.Parameter(value) for value in start()]
    optimizer = make(parameters, **options)
    for step in grads:
        for parameter, grad in zip(parameters, step, strict=True):
            parameter.grad = grad.float() if grad.numel() else None
        optimizer.step()
    return [parameter.data for parameter in parameters], optimizer


def train_plain(
    make: Callable[..., torch.optim.Optimizer], grads: Sequence[Sequence[torch.Tensor]], options: dict[str, Any]
) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """The same with ours on plain parameters."""
    parameters = [torch.nn.Parameter(value) for value in start()]
    optimizer = make(parameters, **options)
    for step in grads:
        for parameter, grad in zip(parameters, step, strict=True):
            parameter.grad = grad.float()
        optimizer.step()
    return [parameter.data for parameter in parameters], optimizer


def train_linked(
    make: Callable[..., torch.optim.Optimizer],
    grads: Sequence[Sequence[torch.Tensor]],
    options: dict[str, Any],
    weight_dtype: torch.dtype,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The same with masters linked to the gradients; returns masters and weights."""
    masters = [rp_optim.Master(value) for value in start()]
    weights = [torch.full(master.shape, torch.nan, dtype=weight_dtype) for master in masters]
    optimizer = make(masters, **options)
    for step in grads:
        for master, grad, weight in zip(masters, step, weights, strict=True):
            rp_optim.link(master, lambda grad=grad: grad, lambda weight=weight: weight)
        optimizer.step()
        for master in masters:
            assert rp_optim.unlink(master) is rp_optim.UNCHANGED
    return [master.data for master in masters], weights


def muon(parameters: Sequence[torch.Tensor], **options: Any) -> rp_optim.Muon:
    """Muon for all matrices and stacks of them, and AdamW with the same rate for the others."""
    others = [one for one in parameters if one.dim() not in (2, 3)]
    matrices = [one for one in parameters if one.dim() in (2, 3)]
    return rp_optim.Muon(
        [{"params": others, "use_muon": False, "lr": options.get("lr", 1e-3)}, {"params": matrices}], **options
    )


def combinations(**options: Sequence[Any]) -> list[dict[str, Any]]:
    """Every choice of one value for each option."""
    return [dict(zip(options, values, strict=True)) for values in product(*options.values())]
