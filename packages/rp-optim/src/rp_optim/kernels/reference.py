"""The kernels' arithmetic in torch operations: the reference for their tests, and the fallback.

The fallback runs if there is no compiler, and for fp64. It works in pieces, so that it makes no full copy in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from rp_optim.kernels.halves import of_halves, to_halves
from rp_optim.kernels.packed import (
    exact_sqrt,
    num_groups,
    pack_roots,
    pack_signed,
    to_bfloat16,
    unpack_roots,
    unpack_signed,
)
from rp_optim.kernels.row_codes import code_rows
from rp_optim.kernels.updates import (
    AdamNumbers,
    AdamUpdate,
    Factors,
    LionNumbers,
    LionUpdate,
    Matrices,
    MomentumUpdate,
    ParameterMove,
    SGDNumbers,
    SGDUpdate,
    Small,
    Spot,
    flat,
)

# Elements worked on at a time: a few tensors of this size fit the cache.
_PIECE = 1 << 18
_ROW = 1 << 12


def _wide(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a copy in the dtype of the arithmetic: fp64 for fp64 parameters, else fp32."""
    return tensor.to(torch.float64 if like.dtype == torch.float64 else torch.float32, copy=True)


def _places(spot: Spot) -> Iterator[slice]:
    size = spot.grad.numel()
    return (slice(begin, min(begin + _PIECE, size)) for begin in range(0, size, _PIECE))


def _pieces(spot: Spot) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield each piece's slice, parameter and scaled gradient; the two tensors in the arithmetic's dtype."""
    for place in _places(spot):
        yield place, _param(spot, place), _gradient(spot, place).mul_(spot.factor)


# A piece of a flat spot, or of one that is viewed as matrices.
_Place = slice | tuple[slice, slice]


def _param(spot: Spot, place: _Place) -> torch.Tensor:
    """Return a piece of a spot's parameter in the arithmetic's dtype."""
    if spot.rest is not None and spot.is_halved:
        return of_halves(spot.param[place], spot.rest[place])
    return _wide(spot.param[place], spot.param)


def _gradient(spot: Spot, place: _Place) -> torch.Tensor:
    """Return a piece of a spot's gradient, without the factor, in the arithmetic's dtype."""
    if spot.is_halved and spot.grad is spot.param:
        return _param(spot, place)
    wide = _wide(spot.grad[place], spot.param)
    return wide if spot.more is None else wide.add_(spot.more[place])


def _write(spot: Spot, place: _Place, value: torch.Tensor) -> None:
    if not spot.is_halved:
        spot.param[place] = value
    _write_weight(spot, place, value)


def _write_weight(spot: Spot, place: _Place, value: torch.Tensor) -> None:
    if spot.weight is None:
        return
    if not spot.writes_halves:
        spot.weight[place] = value
        return
    spot.weight[place], rest = to_halves(value.float())
    if spot.rest is not None:
        spot.rest[place] = rest


def _lerp(start: torch.Tensor, end: torch.Tensor, gain: float) -> torch.Tensor:
    # Starts from the nearer end, like torch.lerp. Torch's own may use a fused multiply-add.
    return start + (end - start) * gain if gain < 0.5 else end - (end - start) * (1 - gain)


def _total(values: torch.Tensor) -> torch.Tensor:
    # Sum rows first: torch divides one long sum among its threads, so the result would depend on their number.
    whole = values.numel() // _ROW * _ROW
    return values[:whole].view(-1, _ROW).sum(-1).sum() + values[whole:].sum()


def _sums(values: torch.Tensor) -> torch.Tensor:
    """Sum over the last of three dimensions, with `_total` if there is only one sum."""
    alone = values.shape[0] * values.shape[1] == 1
    return _total(values.reshape(-1)).view(1, 1) if alone else values.sum(-1)


def _squares(values: torch.Tensor) -> float:
    return _total(values.double().square()).item()


class _State:
    """An update's flat state tensors in any format; reads and writes pieces in the arithmetic's dtype."""

    def __init__(self, small: Small | None, *tensors: torch.Tensor) -> None:
        self._small = small
        self._tensors = tensors

    def read(self, array: int, place: slice, like: torch.Tensor) -> torch.Tensor:
        """Read a piece of a state tensor that is not in 8 bits, or whose numbers have a sign."""
        if self._small is None or not self._small.scales:
            return _wide(self._tensors[array][place], like)
        return unpack_signed(self._tensors[array][place], self._scales(array, place))

    def write(self, array: int, place: slice, values: torch.Tensor) -> None:
        """Write a piece of a state tensor that is not in 8 bits, or whose numbers have a sign."""
        if self._small is None:
            self._tensors[array][place] = values
        elif self._small.scales:
            self._put(array, place, pack_signed(values, self._draws(array, place)))
        else:
            self._tensors[array][place] = to_bfloat16(values, self._draws(array, place))

    def read_roots(self, array: int, place: slice) -> torch.Tensor:
        """Read a piece of a state tensor that is stored as square roots in 8 bits."""
        return unpack_roots(self._tensors[array][place], self._scales(array, place))

    def write_roots(self, array: int, place: slice, squares: torch.Tensor) -> torch.Tensor:
        """Write a piece of a state tensor as square roots in 8 bits; return the stored roots."""
        self._put(array, place, pack_roots(squares, self._draws(array, place)))
        return self.read_roots(array, place)

    def _put(self, array: int, place: slice, packed: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._tensors[array][place] = packed[0]
        self._scales(array, place).copy_(packed[1])

    def _scales(self, array: int, place: slice) -> torch.Tensor:
        assert self._small is not None
        return self._small.scales[array][num_groups(place.start) : num_groups(place.stop)]

    def _draws(self, array: int, place: slice) -> torch.Tensor:
        assert self._small is not None
        return self._small.noise.draws(place.start, place.stop - place.start, array)


class _AdamState:
    """Adam's moments. In 8 bits the first moment is stored in units of the second moment's root."""

    def __init__(self, small: Small | None, *tensors: torch.Tensor) -> None:
        self._state = _State(small, *tensors)
        self._is_8bit = small is not None and bool(small.scales)

    def read(self, place: slice, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._is_8bit:
            return self._state.read(0, place, like), self._state.read(1, place, like)
        roots = self._state.read_roots(1, place)
        return self._state.read(0, place, like) * roots, roots * roots

    def read_largest(self, place: slice, like: torch.Tensor) -> torch.Tensor:
        return self._state.read_roots(2, place).square() if self._is_8bit else self._state.read(2, place, like)

    def write(self, place: slice, mean: torch.Tensor, square: torch.Tensor) -> None:
        if self._is_8bit:
            roots = self._state.write_roots(1, place, square)
            self._state.write(0, place, torch.where(roots > 0, mean / roots, 0))
        else:
            self._state.write(0, place, mean)
            self._state.write(1, place, square)

    def write_largest(self, place: slice, square: torch.Tensor) -> None:
        if self._is_8bit:
            self._state.write_roots(2, place, square)
        else:
            self._state.write(2, place, square)


def _adam(spot: Spot, numbers: AdamNumbers, state: _AdamState, *, amsgrad: bool) -> None:
    gain = 1 - numbers.beta2
    for place, param, grad in _pieces(spot):
        if numbers.l2:
            grad += param * numbers.l2
        old_mean, old_square = state.read(place, param)
        mean = _lerp(old_mean, grad, 1 - numbers.beta1)
        square = old_square * numbers.beta2 + (grad * gain) * grad
        state.write(place, mean, square)
        if amsgrad:
            square = torch.maximum(state.read_largest(place, param), square)
            state.write_largest(place, square)
        moves = (mean * numbers.rate) / (exact_sqrt(square) * numbers.root + numbers.eps)
        _write(spot, place, param * numbers.shrink - moves)


def _sgd(spot: Spot, numbers: SGDNumbers, state: _State | None) -> None:
    for place, param, grad in _pieces(spot):
        if numbers.l2:
            grad += param * numbers.l2
        if state is not None:
            first = numbers.first
            moved = grad if first else state.read(0, place, param) * numbers.keep + grad * numbers.gain
            state.write(0, place, moved)
            grad = grad + moved * numbers.keep if numbers.nesterov else moved
        _write(spot, place, param - grad * numbers.rate)


def _lion(spot: Spot, numbers: LionNumbers, state: _State) -> None:
    for place, param, grad in _pieces(spot):
        old = state.read(0, place, param)
        direction = (old * numbers.beta1 + grad * (1 - numbers.beta1)).sign()
        state.write(0, place, old * numbers.beta2 + grad * (1 - numbers.beta2))
        _write(spot, place, param * numbers.shrink - direction * numbers.rate)


def _momentum(update: MomentumUpdate, state: _State) -> None:
    spot = update.spot.flat()
    for place, param, grad in _pieces(spot):
        mean = _lerp(state.read(0, place, param), grad, 1 - update.keep)
        state.write(0, place, mean)
        if spot.weight is not None:
            spot.weight[place] = _ahead(grad, mean, update.keep) if update.nesterov else mean


def _ahead(grad: torch.Tensor, mean: torch.Tensor, keep: float) -> torch.Tensor:
    # Like `_lerp`, but chooses the nearer end by 1 - keep, as the compiled kernels do.
    near = 1 - keep < 0.5
    return mean - (mean - grad) * (1 - keep) if near else grad + (mean - grad) * keep


class TorchKernel:
    """A `Kernel` made of torch's operations.

    >>> gradient = torch.tensor([3.0, 4.0])
    >>> TorchKernel().squares([Spot(gradient, gradient, None, 1.0)])
    [25.0]
    """

    @property
    def name(self) -> str:
        """Always ``torch``."""
        return "torch"

    def adam(self, updates: Sequence[AdamUpdate]) -> None:
        """See `Kernel.adam`."""
        for update in updates:
            largest = update.max_exp_avg_sq
            kept = (update.exp_avg, update.exp_avg_sq, *(() if largest is None else (largest,)))
            state = _AdamState(update.small, *map(flat, kept))
            _adam(update.spot.flat(), update.numbers, state, amsgrad=largest is not None)

    def sgd(self, updates: Sequence[SGDUpdate]) -> None:
        """See `Kernel.sgd`."""
        for update in updates:
            state = None if update.buffer is None else _State(update.small, flat(update.buffer))
            _sgd(update.spot.flat(), update.numbers, state)

    def lion(self, updates: Sequence[LionUpdate]) -> None:
        """See `Kernel.lion`."""
        for update in updates:
            _lion(update.spot.flat(), update.numbers, _State(update.small, flat(update.exp_avg)))

    def momentum(self, update: MomentumUpdate) -> None:
        """See `Kernel.momentum`."""
        _momentum(update, _State(update.small, flat(update.buffer)))

    def move(self, spot: Spot, move: ParameterMove) -> None:
        """See `Kernel.move`."""
        spot = spot.flat()
        for place, param, grad in _pieces(spot):
            _write(spot, place, param * move.shrink - grad * move.rate)

    def to_weight(self, spots: Sequence[Spot]) -> None:
        """See `Kernel.to_weight`."""
        for spot in map(Spot.flat, spots):
            if not (spot.is_halved or spot.writes_halves):
                _write_weight(spot, slice(None), spot.param)
                continue
            for place in _places(spot):
                _write_weight(spot, place, _param(spot, place))

    def code_rows(self, weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """See `Kernel.code_rows`."""
        code_rows(weight, codes, scales)

    def add_to_pair(self, spot: Spot) -> None:
        """See `Kernel.add_to_pair`."""
        spot = spot.flat()
        assert spot.more is not None
        for place, param, grad in _pieces(spot):
            total = param + grad
            spot.param[place] = total
            rest = total - spot.param[place]
            # An infinite sum has no rounding error.
            spot.more[place] = torch.where(rest.isfinite(), rest, 0)

    def squares(self, spots: Sequence[Spot]) -> list[float]:
        """See `Kernel.squares`. A sum over fp64 numbers can overflow to infinity, like torch's norm."""
        return [
            sum((_squares(_gradient(spot, place)) for place in _places(spot)), 0.0)
            for spot in map(Spot.flat, spots)
        ]

    # Adafactor

    def matrix_squares(self, spot: Spot, shape: Matrices) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.matrix_squares`."""
        rows = torch.empty(shape.batch, shape.rows, dtype=torch.float64, device="cpu")
        cols = torch.zeros(shape.batch, shape.cols, dtype=torch.float64, device="cpu")
        spot = _as_matrices(spot, shape)
        for batches, place in _bands(shape):
            squares = _gradient(spot, (batches, place)).double().square()
            rows[batches, place] = _sums(squares)
            cols[batches] += _sums(squares.transpose(-1, -2))
        return rows.view(-1), cols.view(-1)

    def matrix_norm(self, spot: Spot, shape: Matrices, factors: Factors) -> float:
        """See `Kernel.matrix_norm`."""
        spot = _as_matrices(spot, shape)
        bands = (_moves(spot, shape, factors, *band) for band in _bands(shape))
        return sum((_squares(moves.view(-1)) for moves in bands), 0.0)

    def matrix_apply(self, spot: Spot, shape: Matrices, factors: Factors, move: ParameterMove) -> None:
        """See `Kernel.matrix_apply`."""
        spot = _as_matrices(spot, shape)
        for band in _bands(shape):
            moves = _moves(spot, shape, factors, *band)
            _write(spot, band, _param(spot, band) * move.shrink - moves * move.rate)

    def vector_variance(self, spot: Spot, variance: torch.Tensor, gain: float, least: float) -> float:
        """See `Kernel.vector_variance`."""
        total, variance = 0.0, flat(variance)
        for place, param, grad in _pieces(spot.flat()):
            variance[place] = _lerp(_wide(variance[place], param), grad.square(), gain)
            moves = grad / _wide(variance[place], param).clamp(min=least).sqrt()
            total += _squares(moves)
        return total

    def vector_apply(self, spot: Spot, variance: torch.Tensor, least: float, move: ParameterMove) -> None:
        """See `Kernel.vector_apply`."""
        spot, variance = spot.flat(), flat(variance)
        for place, param, grad in _pieces(spot):
            moves = grad / _wide(variance[place], param).clamp(min=least).sqrt()
            _write(spot, place, param * move.shrink - moves * move.rate)


def _as_matrices(spot: Spot, shape: Matrices) -> Spot:
    """Return the same tensors as views in three dimensions."""

    def view(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(shape.batch, shape.rows, shape.cols)

    def view_if(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else view(tensor)

    spot = spot.flat()
    return replace(
        spot,
        param=view(spot.param),
        grad=view(spot.grad),
        weight=view_if(spot.weight),
        more=view_if(spot.more),
        rest=view_if(spot.rest),
    )


def _bands(shape: Matrices) -> Iterator[tuple[slice, slice]]:
    """Split a stack of matrices into bands of about `_PIECE` elements: slices of matrices and of rows."""
    rows = max(1, min(shape.rows, _PIECE // max(1, shape.cols)))
    batches = max(1, _PIECE // max(1, rows * shape.cols)) if rows == shape.rows else 1
    for first in range(0, shape.batch, batches):
        for row in range(0, shape.rows, rows):
            yield slice(first, first + batches), slice(row, row + rows)


def _moves(spot: Spot, shape: Matrices, factors: Factors, batches: slice, rows: slice) -> torch.Tensor:
    row = factors.row.view(shape.batch, shape.rows, 1)[batches, rows]
    col = factors.col.view(shape.batch, 1, shape.cols)[batches]
    grad = _gradient(spot, (batches, rows)).mul_(spot.factor)
    return grad / (row * col).clamp(min=factors.least).sqrt()
