"""Gradient clipping by the total norm."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from types import GeneratorType
from typing import cast

import torch

from rp_optim.arrival import by_arrival
from rp_optim.errors import NonFiniteGradients
from rp_optim.gradients import gradient_of, scale, squares_of
from rp_optim.masters import Master, known_to_all

# Elements per piece for norms other than the 2-norm. Torch sums so few on one thread, so the order of summation
# does not depend on the number of threads.
_PIECE = 1 << 14


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients so that their total norm is at most `max_norm`; return the norm before scaling.

    Like ``torch.nn.utils.clip_grad_norm_``, but the norm is summed in fp64, in the same order for any number of
    threads. Gradients of linked masters are read as they arrive and are not rewritten: the step applies the factor
    when it reads them. Other gradients are scaled in place. `foreach` is accepted and changes nothing. If several
    processes divide linked masters, the norm is that of all processes, identical on each to the last bit.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_grad_norm_([weight], max_norm=1.0)
    tensor(5.)

    Warns if no parameter has a gradient, as those have not whose masters an optimizer steps.
    Returns the norm: 0-dim, fp32, or fp64 if a parameter is fp64 or complex128.
    Raises `NonFiniteGradients` if the norm is not finite and `error_if_nonfinite` is set.
    """
    del foreach
    members = _listed(parameters)
    norm = _norm(members, float(norm_type), f"clipping to {float(max_norm)} the norm of order {float(norm_type)}")
    if error_if_nonfinite and not math.isfinite(norm):
        raise NonFiniteGradients(
            f"the norm of order {norm_type} of the gradients is {norm}, so they cannot be clipped; omit "
            "error_if_nonfinite to scale them anyway"
        )
    factor = float(max_norm) / (norm + 1e-6)
    if not factor >= 1:
        for parameter in members:
            scale(parameter, factor)
    double = any(parameter.dtype in (torch.float64, torch.complex128) for parameter in members)
    return torch.tensor(norm, dtype=torch.float64 if double else torch.float32, device="cpu")


def _listed(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    members = list(parameters)
    if not members and isinstance(parameters, GeneratorType):
        warnings.warn(
            "the generator of parameters is empty, so nothing is clipped; if it was used before, pass a list",
            stacklevel=4,
        )
    return members


def _norm(members: list[torch.Tensor], norm_type: float, purpose: str) -> float:
    """Return the total norm. Gradients are read as they arrive, but summed in the order of `members`."""
    indexed = list(enumerate(members))
    local: dict[int, float | None] = {}
    for arrived in by_arrival(indexed, lambda item: item[1]):
        parts = _parts([parameter for _, parameter in arrived], norm_type)
        local.update(zip((index for index, _ in arrived), parts, strict=True))
    shared = known_to_all(members, purpose, [local[index] for index in range(len(members))])
    parts = [part for part in shared if part is not None]
    # Whoever made masters tells of those whose gradients are elsewhere.
    if not parts and any(one.requires_grad and not isinstance(one, Master) for one in members):
        warnings.warn(
            "no parameter that was given has a gradient, so nothing is clipped; where an optimizer has parameters "
            "of its own, as masters are, give these: clip_grad_norm_(model.optim_parameters(), max_norm)",
            stacklevel=4,
        )
    return math.sqrt(sum(parts)) if norm_type == 2 else _join(parts, norm_type)


def _parts(parameters: list[torch.Tensor], norm_type: float) -> list[float | None]:
    """Return each gradient's sum of squares for the 2-norm, otherwise its norm; None without a gradient."""
    if norm_type == 2:
        return squares_of(parameters)
    return [_part(parameter, norm_type) for parameter in parameters]


def _part(parameter: torch.Tensor, norm_type: float) -> float | None:
    gradient = gradient_of(parameter)
    if gradient is None:
        return None
    norms = [_join(piece, norm_type) for piece in gradient.pieces(_PIECE)]
    # The 0-norm counts the nonzero elements.
    return sum(norms) if norm_type == 0 else _join(norms, norm_type) * abs(gradient.factor)


def _join(values: list[float] | torch.Tensor, norm_type: float) -> float:
    wide = torch.tensor(values, dtype=torch.float64, device="cpu") if isinstance(values, list) else values
    wide = wide.to(torch.complex128).abs() if wide.is_complex() else wide.double()
    # Torch's stub lacks a type here.
    norm = cast(Callable[..., torch.Tensor], torch.linalg.vector_norm)  # pyright: ignore[reportUnknownMemberType]
    return float(norm(wide, norm_type)) if wide.numel() else 0.0
