"""A parameter's gradient wherever it lies: in ``.grad``, or in the source that its master is linked to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rp_optim.checks import check_beside
from rp_optim.kernel import kernel_for
from rp_optim.masters import link_of
from rp_optim.updates import Spot


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient that is worth ``tensor * factor``."""

    tensor: torch.Tensor
    factor: float


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A flat, real view of the same memory, with a version counter of its own."""
    data = tensor.data
    return (torch.view_as_real(data) if data.is_complex() else data).view(-1)


def gradient_of(parameter: torch.Tensor) -> Gradient | None:
    """The gradient, waited for if it is linked; None if there is none.

    Raises `InvalidParameter` for one that the optimizers cannot take.
    """
    link = link_of(parameter)
    if link is not None and link.counts == "source":
        source = link.source(parameter)
        return None if source is None else Gradient(source, link.factor)
    grad = parameter.grad
    if grad is None:
        return None
    check_beside("a gradient", grad, parameter)
    return Gradient(grad, 1.0)


def squares_of(parameter: torch.Tensor) -> float | None:
    """The sum of the squares of the gradient in fp64; None without one. A linked one is read once."""
    gradient = gradient_of(parameter)
    if gradient is None:
        return None
    link = link_of(parameter)
    if link is None or link.counts == "grad":
        return _squares(gradient.tensor)
    if link.squares is None:
        link.squares = _squares(gradient.tensor)
    return link.squares * gradient.factor**2


def _squares(tensor: torch.Tensor) -> float:
    view = flat(tensor)
    return kernel_for(Spot(view, view, None, 1.0)).squares(view)


def is_finite(parameter: torch.Tensor) -> bool:
    """Whether all numbers of the gradient are; True without one."""
    gradient = gradient_of(parameter)
    if gradient is None:
        return True
    # In fp64 no sum of fp32 squares overflows; a sum over fp64 may, and is looked at number by number then.
    squares = squares_of(parameter)
    if squares is None or math.isfinite(squares):
        return math.isfinite(gradient.factor)
    return gradient.tensor.dtype in (torch.float64, torch.complex128) and bool(gradient.tensor.isfinite().all())


def scale(parameter: torch.Tensor, factor: float) -> None:
    """Multiply the gradient, if there is one: a linked one when it is read, another one in place."""
    link = link_of(parameter)
    if link is not None and link.counts == "source":
        link.factor *= factor
    elif parameter.grad is not None:
        with torch.no_grad():
            parameter.grad.mul_(factor)
