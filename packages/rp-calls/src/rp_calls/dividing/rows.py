"""The rows of a model's output, in a few numbers each, which show a difference and are cheap to carry."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import rp_batch
import torch

# A row of more numbers becomes about so many: logits of a batch may take as much memory as the model.
_NUMBERS = 64

# Where a tensor is in the output, and the shape of its rows; None: it is a single number, without rows.
RowKey: TypeAlias = tuple[str, tuple[int, ...] | None]
Rows: TypeAlias = dict[RowKey, torch.Tensor]


def rows_at_end(given: Any, output: Any) -> Rows:
    """Return the rows of a model's output, and of what its last layer is given: that may compute a mere loss.

    >>> [place for place, _ in rows_at_end(torch.zeros(3, 2), torch.tensor(0.0))]
    ['what the last layer is given', 'output']
    """
    entering = {
        (path.replace("output", "what the last layer is given", 1), shape): rows
        for (path, shape), rows in rows_of(given).items()
    }
    return {**entering, **rows_of(output)}


def rows_of(output: Any) -> Rows:
    """Return the tensors that have rows, also from inside of objects; each row in at most about 64 numbers.

    >>> {place: tuple(rows.shape) for place, rows in rows_of({"logits": torch.zeros(3, 40, 50)}).items()}
    {("output['logits']", (40, 50)): (3, 63)}

    How large a row's difference is, relative to the row, stays what it is, about: stretches of a row are added up
    with random signs, which are the same for all rows. A single number is a row.
    """
    found = ((path, _dense(tensor.detach())) for path, tensor in _tensors(output))
    return {
        (path, tuple(dense.shape[1:]) if dense.dim() else None): _shortened(dense if dense.dim() else dense[None])
        for path, dense in found
    }


def whole_shape(length: int, shape: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the shape of a tensor of so many rows, which have this shape; that of a single number is ().

    >>> whole_shape(3, (2,)), whole_shape(1, None)
    ((3, 2), ())
    """
    return () if shape is None else (length, *shape)


def _tensors(output: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for path, leaf in zip(rp_batch.paths(output), rp_batch.flatten(output)[0], strict=True):
        found = [("", leaf)] if isinstance(leaf, torch.Tensor) else rp_batch.tensors_inside(leaf)
        yield from ((f"output{path}{step}", one) for step, one in found if isinstance(one, torch.Tensor))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_nested:
        # Padded rows would be as long as the longest of their batch.
        return torch.stack([one.double().square().sum() for one in tensor.unbind()])
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _shortened(rows: torch.Tensor) -> torch.Tensor:
    numbers = math.prod(rows.shape[1:])
    # Sums of 8-bit numbers, or of whole ones, are not of their kind.
    has_sums = rows.is_complex() or (rows.is_floating_point() and rows.element_size() > 1)
    if numbers <= _NUMBERS or not has_sums:
        return rows
    length = math.ceil(numbers / _NUMBERS)
    full = numbers // length
    flat, signs = rows.reshape(len(rows), numbers), _signs(length).to(rows)
    rest = flat[:, full * length :]
    sums = flat[:, : full * length].reshape(-1, full, length) @ signs
    return torch.cat((sums, (rest @ signs[: rest.shape[1]])[:, None]), 1)


def _signs(length: int) -> torch.Tensor:
    """Return random signs, the same each time, so small that sums with them are about as large as one number."""
    # Not the default generator, whose numbers are the model's.
    drawn = torch.randint(2, (length,), generator=torch.Generator().manual_seed(0))
    return (2 * drawn - 1) / math.sqrt(length)
