"""The protocol of formats of packed weights, and functions that formats share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch

from rp_packing.layout import CodeLayout


class Format(Protocol):
    """Converts the elements of a weight to codes, in bytes, and scales, one for each block of elements."""

    @property
    def name(self) -> str:
        """The name that users write, such as ``nf4``."""
        ...

    def specs(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        """Return the shape of the codes, and shape and dtype of the scales.

        Raises `ValueError` if weights of this shape cannot be packed.
        """
        ...

    def pack(self, weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Write a weight's codes and scales."""
        ...

    def expand(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write the weight by torch operations in fp32, rounded once. `out`: contiguous, on the codes' device."""
        ...

    def layout(self, shape: Sequence[int]) -> CodeLayout:
        """Return the layout of the codes and scales of a weight of this shape, for a kernel that expands it."""
        ...


def matrices(tensor: torch.Tensor) -> torch.Tensor:
    """View a weight of at least two dimensions as (number, rows, columns)."""
    return tensor.view(math.prod(tensor.shape[:-2]), *tensor.shape[-2:])


def rows_and_columns(shape: Sequence[int], name: str) -> tuple[int, int]:
    """Return the last two dimensions of a shape. Raises `ValueError` if it has fewer."""
    if len(shape) < 2:
        raise ValueError(f"{name} packs matrices, but a weight has the shape {tuple(shape)}")
    return shape[-2], shape[-1]


def table(values: tuple[float, ...], columns: int, like: torch.Tensor) -> torch.Tensor:
    """Return these numbers as fp32 on a tensor's device, (rows, columns); cached, unless operations are traced."""
    # A tracer's tensors have no values, and cannot be used by another tracer.
    make = _kept_table if type(like) is torch.Tensor else _table
    return make(values, columns, like.device)


def _table(values: tuple[float, ...], columns: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device).view(-1, columns)


_kept_table = cache(_table)


def blocks(length: int, block: int) -> int:
    """Return how many blocks hold `length` elements."""
    return math.ceil(length / block)
