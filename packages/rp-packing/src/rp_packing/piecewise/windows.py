"""Divide a weight into the pieces that are packed or expanded at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Elements at a time on a device: intermediate results are in fp32, several times as large.
WINDOW = 1 << 24
# Elements at a time for each thread of the host, whose intermediate results stay in a core's cache.
HOST_WINDOW = 1 << 18


def window_for(tensor: torch.Tensor) -> int:
    """Return about how many elements of a weight on this tensor's device are in a piece.

    >>> window_for(torch.empty(1))
    262144
    """
    return min(HOST_WINDOW, WINDOW) if tensor.device.type == "cpu" else WINDOW


def stretches(numel: int, multiple: int, most: int) -> list[slice]:
    """Cut `numel` elements in a row into parts of about `most`; parts begin at multiples of `multiple`.

    >>> stretches(10, 4, 5)
    [slice(0, 4, None), slice(4, 8, None), slice(8, 10, None)]
    """
    some = max(most // multiple, 1) * multiple
    return [slice(first, min(first + some, numel)) for first in range(0, numel, some)]


def windows(shape: Sequence[int], multiple: int, most: int) -> list[tuple[slice, slice]]:
    """Cut matrices (number, rows, columns) into parts of about `most` elements: slices of numbers and of rows.

    `multiple`: parts begin at rows that are multiples of this.

    >>> windows((3, 4, 5), 2, 100)
    [(slice(0, 3, None), slice(0, 4, None))]
    >>> windows((1, 4, 5), 2, 10)
    [(slice(0, 1, None), slice(0, 2, None)), (slice(0, 1, None), slice(2, 4, None))]
    """
    number, rows, columns = shape
    whole = max(most // max(rows * columns, 1), 1)
    return [
        (numbers, some)
        for numbers in stretches(number, 1, whole)
        for some in stretches(rows, multiple, most // max(columns, 1))
    ]
