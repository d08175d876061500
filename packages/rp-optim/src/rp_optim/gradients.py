"""Reading and scaling a parameter's gradient, whether it is in ``.grad`` or linked to a master."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rp_optim.checks import resolved_matching
from rp_optim.kernels.kernel import kernel_for
from rp_optim.kernels.updates import Spot
from rp_optim.masters import Source, source_link
from rp_optim.pair import GradientPair

# Elements per piece where every element of a gradient is checked.
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class ScaledGradient:
    """A gradient with the value ``tensor * factor`` or ``(tensor + more) * factor``, added in at least fp32."""

    tensor: torch.Tensor
    factor: float
    more: torch.Tensor | None = None

    def spot(self) -> Spot:
        """Return the arguments for kernels that only read the gradient, without the factor."""
        return Spot(self.tensor, self.tensor, None, 1.0, self.more)

    def pieces(self, count: int) -> Iterator[torch.Tensor]:
        """Yield the values without the factor, flat, `count` elements at a time."""
        for begin in range(0, self.tensor.numel(), count):
            piece = self.tensor.reshape(-1)[begin : begin + count]
            if self.more is not None:
                piece = GradientPair(piece, self.more.reshape(-1)[begin : begin + count]).sum()
            yield piece


def gradient_of(parameter: torch.Tensor) -> ScaledGradient | None:
    """Return the gradient, after waiting for it if it is linked; None if there is none.

    Raises `InvalidParameter` for an unsupported gradient.
    """
    if (link := source_link(parameter)) is not None:
        source = link.source(parameter)
        return None if source is None else _of_source(source, link.factor)
    grad = parameter.grad
    if grad is None:
        return None
    return ScaledGradient(resolved_matching("a gradient", grad, parameter), 1.0)


def _of_source(source: Source, factor: float) -> ScaledGradient:
    if isinstance(source, GradientPair):
        return ScaledGradient(source.first, factor, source.second)
    return ScaledGradient(source, factor)


def squares_of(parameters: Sequence[torch.Tensor]) -> list[float | None]:
    """Return each gradient's sum of squares, in fp64; None without a gradient. A linked gradient is read once."""
    gradients = [gradient_of(parameter) for parameter in parameters]
    sums = [_known_squares(parameter) for parameter in parameters]
    unknown = [i for i, gradient in enumerate(gradients) if gradient is not None and sums[i] is None]
    computed = _squares([gradient.spot() for i in unknown if (gradient := gradients[i]) is not None])
    for index, squares in zip(unknown, computed, strict=True):
        sums[index] = squares
        if (link := source_link(parameters[index])) is not None:
            link.squares = squares
    return [
        None if gradient is None or squares is None else squares * gradient.factor**2
        for gradient, squares in zip(gradients, sums, strict=True)
    ]


def _known_squares(parameter: torch.Tensor) -> float | None:
    link = source_link(parameter)
    return None if link is None else link.squares


def _squares(spots: Sequence[Spot]) -> list[float]:
    kernels = [kernel_for(spot) for spot in spots]
    if len(set(map(id, kernels))) == 1:
        return kernels[0].squares(spots)
    return [kernel.squares([spot])[0] for kernel, spot in zip(kernels, spots, strict=True)]


def is_finite(parameter: torch.Tensor) -> bool:
    """Return whether all elements of the gradient are finite; True without a gradient."""
    gradient = gradient_of(parameter)
    if gradient is None:
        return True
    # A sum of fp32 squares cannot overflow fp64. A sum of fp64 squares can, so then each element is checked.
    (squares,) = squares_of([parameter])
    if squares is None or math.isfinite(squares):
        return math.isfinite(gradient.factor)
    if gradient.tensor.dtype not in (torch.float64, torch.complex128):
        return False
    return all(bool(piece.isfinite().all()) for piece in gradient.pieces(_PIECE))


def scale(parameter: torch.Tensor, factor: float) -> None:
    """Multiply the gradient, if there is one: in place, or a linked one when it is next read."""
    if (link := source_link(parameter)) is not None:
        link.factor *= factor
    elif parameter.grad is not None:
        with torch.no_grad():
            parameter.grad.mul_(factor)
