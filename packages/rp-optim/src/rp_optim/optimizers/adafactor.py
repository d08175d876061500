"""Adafactor for parameters on the host, with torch's signature, results and state."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.optim.optimizer import ParamsT

from rp_optim.errors import InvalidParameter
from rp_optim.host import Group, HostOptimizer, State, Taken, state_tensor
from rp_optim.kernels.kept import as_whole, keep
from rp_optim.kernels.kernel import kernel_for
from rp_optim.kernels.updates import Factors, Matrices, ParameterMove, Spot
from rp_optim.places.counters import count_steps
from rp_optim.places.on_disk import StateOption

Scalar = float | torch.Tensor

# Elements of a row that are summed at once, few enough that torch sums them on one thread.
_SUMMED = 1 << 12


class Adafactor(HostOptimizer, torch.optim.Adafactor):
    """Adafactor (Shazeer and Stern, 2018), which stores the second moment of a matrix as one row times one column.

    Takes the arguments of ``torch.optim.Adafactor``; `foreach` is accepted and changes nothing. Its ``state_dict``
    and torch's can load each other. The update is clipped by its own norm, so a step reads the gradient three
    times (that of a vector twice) and the parameter twice. It copies neither, but for a matrix it allocates sums
    in fp64: one for each row, and up to 64 for each column. For stacks of tiny matrices, such as the kernels of a
    convolution, these take as much memory as the parameter. `state`: as for `rp_optim.Adam`, but it saves little.

    >>> weight = torch.nn.Parameter(torch.ones(2, 2))
    >>> optimizer = Adafactor([weight], lr=0.5)
    >>> weight.grad = torch.ones(2, 2)
    >>> optimizer.step()
    >>> weight.data
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])

    Raises `ValueError` as `rp_optim.Adam` does, and for complex parameters.
    """

    _counts_steps = True

    def __init__(
        self,
        params: ParamsT,
        lr: Scalar = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        state: StateOption = "fp32",
    ) -> None:
        self._keep_state_as(state)
        del foreach
        super().__init__(params, lr, beta2_decay, eps, d, weight_decay, maximize=maximize)

    def _check_parameter(self, parameter: torch.Tensor) -> None:
        super()._check_parameter(parameter)
        if parameter.is_complex():
            raise InvalidParameter(
                f"Adafactor needs real parameters, but one is {parameter.dtype}; use Adam for it"
            )

    def _state_shapes(self, group: Group, parameter: torch.Tensor) -> dict[str, Sequence[int]]:
        del group
        *batch, rows, cols = (1, 1, *parameter.shape)
        if parameter.dim() < 2:
            return {"variance": parameter.shape}
        return {"row_var": (*batch[2:], rows, 1), "col_var": (*batch[2:], 1, cols)}

    def _update(self, taken: Sequence[Taken]) -> None:
        steps = count_steps([self.state[each.parameter] for each in taken])
        for each, number in zip(taken, steps, strict=True):
            self._update_one(each.group, each.parameter, each.spot, number)

    def _update_one(self, group: Group, parameter: torch.Tensor, spot: Spot, number: int) -> None:
        state = self.state[parameter]
        if spot.grad.numel() == 0:
            return
        update = _update_vector if parameter.dim() < 2 else _update_matrix
        if self._kind == "fp32":
            update(group, state, parameter, spot, number)
            return
        # The state has one element per row and column, few compared with the parameter: use it in full precision.
        noise, names = self._noise(parameter, number), self._state_shapes(group, parameter)
        whole: State = {name: _wide(as_whole(state, name)) for name in names}
        update(group, whole, parameter, spot, number)
        for array, name in enumerate(names):
            keep(state, name, whole[name], self._kind, noise.draws, array)


def _wide(stored: torch.Tensor | None) -> torch.Tensor | None:
    return None if stored is None else stored.to(torch.float32, copy=True)


def _update_vector(group: Group, state: State, parameter: torch.Tensor, spot: Spot, number: int) -> None:
    kernel = kernel_for(spot)
    variance = state_tensor(state, "variance", parameter)
    least = _eps(group, parameter) ** 2
    rate = _rate(group, spot, number)
    squares = kernel.vector_variance(spot, variance, _gain(group, number), least)
    kernel.vector_apply(spot, variance, least, _move(group, spot, rate, squares))


def _update_matrix(group: Group, state: State, parameter: torch.Tensor, spot: Spot, number: int) -> None:
    kernel = kernel_for(spot)
    rows, cols = parameter.shape[-2:]
    shape = Matrices(parameter.numel() // (rows * cols), rows, cols)
    rate = _rate(group, spot, number)
    row_squares, col_squares = kernel.matrix_squares(spot, shape)
    gain, weight = _gain(group, number), spot.factor**2
    row = _move_factor(state, "row_var", parameter, -1, row_squares * (weight / cols), gain).view(
        shape.batch, rows
    )
    col = _move_factor(state, "col_var", parameter, -2, col_squares * (weight / rows), gain).view(-1)
    eps = _eps(group, parameter)
    relative = row / _means(row).clamp_(min=eps)
    factors = Factors(relative.view(-1), col, eps**2)
    squares = kernel.matrix_norm(spot, shape, factors)
    kernel.matrix_apply(spot, shape, factors, _move(group, spot, rate, squares))


def _move_factor(
    state: State, name: str, parameter: torch.Tensor, dim: int, mean: torch.Tensor, gain: float
) -> torch.Tensor:
    """Interpolate the factor `name` of the variance by `gain` toward `mean`; return the stored values in fp32.

    For an fp64 parameter they are in fp64.
    """
    wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    stored = state.get(name)
    if stored is None:
        shape = list(parameter.shape)
        shape[dim] = 1
        stored = state[name] = torch.zeros(shape, dtype=parameter.dtype, device="cpu")
    moved = stored.to(wide).lerp(mean.to(wide).view(stored.shape), gain)
    stored.copy_(moved)
    return stored.to(wide).contiguous()


def _means(rows: torch.Tensor) -> torch.Tensor:
    """Return the mean of each row: (batch, rows) to (batch, 1).

    Summed in fp64 and in pieces: torch divides a long sum among its threads, so the result would depend on their
    number.
    """
    batch, count = rows.shape
    whole = count // _SUMMED * _SUMMED
    wide = rows.double()
    sums = wide[:, :whole].reshape(batch, -1, _SUMMED).sum(-1).sum(-1) + wide[:, whole:].sum(-1)
    return (sums / count).to(rows.dtype).view(batch, 1)


def _eps(group: Group, parameter: torch.Tensor) -> float:
    eps = group["eps"][0]
    return torch.finfo(parameter.dtype).eps if eps is None else float(eps)


def _gain(group: Group, number: int) -> float:
    return float(number) ** float(group["beta2_decay"])


def _rate(group: Group, spot: Spot, number: int) -> float:
    """Return the step size for an update of root mean square 1, relative to the parameter's root mean square."""
    size = math.sqrt(kernel_for(spot).squares([spot.of_param()])[0] / spot.param.numel())
    return max(float(group["eps"][1]), size) * min(float(group["lr"]), 1 / math.sqrt(number))


def _move(group: Group, spot: Spot, rate: float, squares: float) -> ParameterMove:
    clip = max(1.0, math.sqrt(squares / spot.grad.numel()) / float(group["d"]))
    return ParameterMove(shrink=1 - float(group["lr"]) * float(group["weight_decay"]), rate=rate / clip)
