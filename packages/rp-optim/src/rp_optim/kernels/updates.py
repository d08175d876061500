"""The `UpdateKernel` protocol, and its arguments: the tensors and numbers of one parameter's update."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from rp_optim.kernels.packed import Noise
from rp_optim.masters import own_data


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a contiguous tensor, with complex numbers as pairs and a separate version counter."""
    data = own_data(tensor)
    return (torch.view_as_real(data) if data.dtype.is_complex else data).view(-1)


@dataclass(frozen=True, slots=True)
class Spot:
    """The tensors of one parameter's update: contiguous, on the host, of any shape. A complex number is a pair.

    The gradient is ``(grad + more) * factor``, added in fp32 (in fp64 for an fp64 `param`); without `more` just
    ``grad * factor``. The factor combines unscaling, clipping and the sign for maximizing. The result is written
    into `param` and, rounded to its dtype, into `weight`.

    `rest`: the remainder (int16) of fp32 numbers whose upper half is a bf16 `param` (see `kernels.halves`). The
    result is then written into `rest` and `weight`, which may be `param` itself. `rounds_away`: a bf16 `weight` is
    rounded with ties away from zero, as halves are.
    """

    param: torch.Tensor
    grad: torch.Tensor
    weight: torch.Tensor | None
    factor: float
    more: torch.Tensor | None = None
    rest: torch.Tensor | None = None
    rounds_away: bool = False

    @property
    def is_halved(self) -> bool:
        """Whether `param` and `rest` are the halves of fp32 numbers."""
        return self.rest is not None and self.param.dtype == torch.bfloat16

    @property
    def writes_halves(self) -> bool:
        """Whether the halves of the result are written into `weight` and, if there is one, `rest`."""
        halves = self.rest is not None or self.rounds_away
        return halves and self.weight is not None and self.weight.dtype == torch.bfloat16

    def of_param(self) -> Spot:
        """Return the arguments for kernels that only read a gradient, with the parameter in its place."""
        return Spot(self.param, self.param, None, 1.0, rest=self.rest)

    @property
    def count(self) -> int:
        """The number of real numbers."""
        return self.grad.numel() * (2 if self.grad.dtype.is_complex else 1)

    def flat(self) -> Spot:
        """Return the same tensors as `flat` views."""
        weight = None if self.weight is None else flat(self.weight)
        more = None if self.more is None else flat(self.more)
        rest = None if self.rest is None else flat(self.rest)
        param = flat(self.param)
        grad = param if self.grad is self.param else flat(self.grad)
        return Spot(param, grad, weight, self.factor, more, rest, self.rounds_away)

    def has_only(self, dtypes: Container[torch.dtype]) -> bool:
        """Return whether all tensors, except `rest`, have one of these dtypes."""
        return (
            self.param.dtype in dtypes
            and self.grad.dtype in dtypes
            and (self.weight is None or self.weight.dtype in dtypes)
            and (self.more is None or self.more.dtype in dtypes)
        )


@dataclass(frozen=True, slots=True)
class Small:
    """The format of an update's small state: 8 bits if there are `scales`, else bf16; see `kernels.packed`.

    scales: one tensor for each of the update's state tensors, in their order, (groups,) bf16.
    """

    noise: Noise
    scales: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class AdamNumbers:
    """The numbers of an Adam step: ``grad += l2 * param``, then ``param = param * shrink - rate * direction``.

    ``direction = exp_avg / (sqrt(exp_avg_sq) * root + eps)``. `rate` and `root` include the bias corrections.
    """

    l2: float
    shrink: float
    rate: float
    beta1: float
    beta2: float
    root: float
    eps: float


@dataclass(frozen=True, slots=True)
class AdamUpdate:
    """One Adam step of one parameter; with amsgrad if there is a `max_exp_avg_sq`."""

    spot: Spot
    numbers: AdamNumbers
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    max_exp_avg_sq: torch.Tensor | None = None
    small: Small | None = None


@dataclass(frozen=True, slots=True)
class SGDNumbers:
    """The numbers of an SGD step: ``grad += l2 * param``, then ``buffer = keep * buffer + gain * grad``.

    `keep`: momentum; `gain`: 1 - dampening. `first`: the buffer has no value yet, and becomes the gradient. The
    parameter moves by `rate` times the buffer; with `nesterov`, times ``grad + keep * buffer``.
    """

    l2: float
    rate: float
    keep: float
    gain: float
    nesterov: bool
    first: bool


@dataclass(frozen=True, slots=True)
class SGDUpdate:
    """One SGD step of one parameter; with momentum if there is a `buffer`."""

    spot: Spot
    numbers: SGDNumbers
    buffer: torch.Tensor | None = None
    small: Small | None = None


@dataclass(frozen=True, slots=True)
class LionNumbers:
    """The numbers of a Lion step: ``param = param * shrink - rate * sign(direction)``.

    ``direction = exp_avg * beta1 + grad * (1 - beta1)``; then `exp_avg` is updated with `beta2`.
    """

    shrink: float
    rate: float
    beta1: float
    beta2: float


@dataclass(frozen=True, slots=True)
class LionUpdate:
    """One Lion step of one parameter."""

    spot: Spot
    numbers: LionNumbers
    exp_avg: torch.Tensor
    small: Small | None = None


@dataclass(frozen=True, slots=True)
class MomentumUpdate:
    """The first part of a Muon step: ``buffer = buffer * keep + grad * (1 - keep)``, as torch's ``lerp``.

    The update is the buffer; with `nesterov`, ``grad * (1 - keep) + buffer * keep``. It is written into the spot's
    `weight`, and the spot's `param` is left alone.
    """

    spot: Spot
    keep: float
    nesterov: bool
    buffer: torch.Tensor
    small: Small | None = None


@dataclass(frozen=True, slots=True)
class Matrices:
    """The shape of a parameter as a stack of matrices: ``(batch, rows, cols)``."""

    batch: int
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class Factors:
    """Adafactor's variance, factored into ``row * col`` and clamped to at least `least`.

    row: (batch * rows,), col: (batch * cols,), both fp32 or both fp64.
    """

    row: torch.Tensor
    col: torch.Tensor
    least: float


@dataclass(frozen=True, slots=True)
class ParameterMove:
    """The numbers that apply an update to a parameter: ``param = param * shrink - rate * update``.

    Adafactor's update is ``grad / sqrt(variance)``.
    """

    shrink: float
    rate: float


class UpdateKernel(Protocol):
    """Updates parameters in place, several in one call.

    State tensors have the parameter's dtype (fp32 for a parameter in halves), unless the update has a `Small`.

    Sums are in fp64; the order of summation depends only on the size, not on the number of threads.
    """

    @property
    def name(self) -> str:
        """The instruction set, or ``torch``."""
        ...

    def adam(self, updates: Sequence[AdamUpdate]) -> None:
        """Run Adam steps."""
        ...

    def sgd(self, updates: Sequence[SGDUpdate]) -> None:
        """Run SGD steps."""
        ...

    def lion(self, updates: Sequence[LionUpdate]) -> None:
        """Run Lion steps."""
        ...

    def momentum(self, update: MomentumUpdate) -> None:
        """Run the first part of a Muon step."""
        ...

    def move(self, spot: Spot, move: ParameterMove) -> None:
        """Update the parameter by the gradient, as `ParameterMove` says."""
        ...

    def to_weight(self, spots: Sequence[Spot]) -> None:
        """Write each parameter into its weight, rounded or as halves. Gradients are not read."""
        ...

    def add_to_pair(self, spot: Spot) -> None:
        """Add `grad` to the 16-bit pair `param`, `more`: `param` gets the sum, `more` its rounding error."""
        ...

    def squares(self, spots: Sequence[Spot]) -> list[float]:
        """Return the sum of squares of each gradient, without the factor.

        It is finite if and only if all elements are, except in fp64.
        """
        ...

    def matrix_squares(self, spot: Spot, shape: Matrices) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradient's sums of squares per row and per column, without the factor: fp64, flat."""
        ...

    def matrix_norm(self, spot: Spot, shape: Matrices, factors: Factors) -> float:
        """Return the sum of squares of ``grad / sqrt(variance)``, the update before clipping."""
        ...

    def matrix_apply(self, spot: Spot, shape: Matrices, factors: Factors, move: ParameterMove) -> None:
        """Update the parameter by ``grad / sqrt(variance)``; see `ParameterMove`."""
        ...

    def vector_variance(self, spot: Spot, variance: torch.Tensor, gain: float, least: float) -> float:
        """Interpolate the variance by `gain` toward the squared gradient; return the sum of `matrix_norm`."""
        ...

    def vector_apply(self, spot: Spot, variance: torch.Tensor, least: float, move: ParameterMove) -> None:
        """Update the parameter like `matrix_apply`, with a variance that is not factored."""
        ...

    def code_rows(self, weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Write the FP8 codes of a bf16 matrix, and a scale for each row; see `rp_optim.write_row_codes`."""
        ...
