"""What a kernel is asked for: the tensors and numbers of one parameter's update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from rp_optim.masters import own_data


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A flat, real view of the same memory, with a version counter of its own."""
    data = own_data(tensor)
    return (torch.view_as_real(data) if data.dtype.is_complex else data).view(-1)


@dataclass(frozen=True, slots=True)
class Spot:
    """One parameter where it is updated: contiguous memory on the host, in any shape; complex numbers are pairs.

    `grad` is worth ``grad * factor``: unscaling, clipping and the sign for maximizing are in the factor. `weight`
    also receives the result, rounded to its dtype.
    """

    param: torch.Tensor
    grad: torch.Tensor
    weight: torch.Tensor | None
    factor: float

    @property
    def count(self) -> int:
        """Of its real numbers."""
        return self.grad.numel() * (2 if self.grad.dtype.is_complex else 1)

    def flat(self) -> Spot:
        """The same memory, flat and real."""
        weight = None if self.weight is None else flat(self.weight)
        return Spot(flat(self.param), flat(self.grad), weight, self.factor)

    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of the tensors that there are."""
        tensors = (self.param, self.grad, self.weight)
        return {tensor.dtype for tensor in tensors if tensor is not None}


@dataclass(frozen=True, slots=True)
class AdamNumbers:
    """`l2` of the parameter joins the gradient; it is multiplied by `shrink`, and moves by `rate` times
    ``exp_avg / (sqrt(exp_avg_sq) * root + eps)``.
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
    """One step of Adam; amsgrad if there is a `max_exp_avg_sq`."""

    spot: Spot
    numbers: AdamNumbers
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    max_exp_avg_sq: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class SGDNumbers:
    """`keep` of the buffer stays, `gain` of the gradient joins it; `first`: the buffer starts as the gradient."""

    l2: float
    rate: float
    keep: float
    gain: float
    nesterov: bool
    first: bool


@dataclass(frozen=True, slots=True)
class SGDUpdate:
    """One step of SGD; with momentum if there is a `buffer`."""

    spot: Spot
    numbers: SGDNumbers
    buffer: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LionNumbers:
    """The parameter is multiplied by `shrink`, and each element moves by `rate` up or down."""

    shrink: float
    rate: float
    beta1: float
    beta2: float


@dataclass(frozen=True, slots=True)
class LionUpdate:
    """One step of Lion."""

    spot: Spot
    numbers: LionNumbers
    exp_avg: torch.Tensor


@dataclass(frozen=True, slots=True)
class Matrices:
    """How a parameter is seen as matrices: ``(batch, rows, cols)``."""

    batch: int
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class Factors:
    """A variance as row times column. row: (batch * rows,), col: (batch * cols,), both fp32 or fp64; no element
    of the variance counts as less than `least`.
    """

    row: torch.Tensor
    col: torch.Tensor
    least: float


@dataclass(frozen=True, slots=True)
class Move:
    """The parameter is multiplied by `shrink`, and moves by `rate` times its scaled gradient."""

    shrink: float
    rate: float


class Kernel(Protocol):
    """Updates parameters in place, some at a time. State tensors have the parameter's dtype.

    Sums come in fp64, added in an order that depends on nothing but the size.
    """

    @property
    def name(self) -> str:
        """The instruction set, or ``torch``."""
        ...

    def adam(self, updates: Sequence[AdamUpdate]) -> None:
        """Adam."""
        ...

    def sgd(self, updates: Sequence[SGDUpdate]) -> None:
        """SGD."""
        ...

    def lion(self, updates: Sequence[LionUpdate]) -> None:
        """Lion."""
        ...

    def to_weight(self, spots: Sequence[Spot]) -> None:
        """Write each parameter into its weight, rounded; their gradients are not looked at."""
        ...

    def squares(self, tensors: Sequence[torch.Tensor]) -> list[float]:
        """The sum of the squares of each contiguous tensor; not finite exactly if one of its elements is not."""
        ...

    def matrix_squares(self, spot: Spot, shape: Matrices) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums of squares of the gradient, without its factor, over rows and over columns: fp64, flat."""
        ...

    def matrix_norm(self, spot: Spot, shape: Matrices, factors: Factors) -> float:
        """The sum of the squares of the gradient over the root of its variance."""
        ...

    def matrix_apply(self, spot: Spot, shape: Matrices, factors: Factors, move: Move) -> None:
        """Move by the gradient over the root of its variance."""
        ...

    def vector_variance(self, spot: Spot, variance: torch.Tensor, gain: float, least: float) -> float:
        """Move the variance by `gain` toward the squared gradient; then `matrix_norm` of it."""
        ...

    def vector_apply(self, spot: Spot, variance: torch.Tensor, least: float, move: Move) -> None:
        """`matrix_apply` of a variance that has every element of its own."""
        ...
