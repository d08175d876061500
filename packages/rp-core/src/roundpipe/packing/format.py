"""What a format of packed weights is, and what formats have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch

from roundpipe.packing.kernel.layout import Layout


class Format(Protocol):
    """How the elements of a weight become codes, in bytes, and scales, one for each block of elements."""

    @property
    def name(self) -> str:
        """What users write, such as ``nf4``."""
        ...

    def specs(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        """The shape of the codes, and shape and dtype of the scales.

        Raises `ValueError` if weights of this shape cannot be packed.
        """
        ...

    def pack(self, weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Write a weight's codes and scales."""
        ...

    def expand(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write the weight by torch's operations, in fp32 and rounded once. `out`: contiguous, where codes are."""
        ...

    def layout(self, shape: Sequence[int]) -> Layout:
        """Where codes and scales of a weight of this shape are, for a kernel that does what `expand` does."""
        ...


def matrices(tensor: torch.Tensor) -> torch.Tensor:
    """View a weight of at least two dimensions as (number, rows, columns)."""
    return tensor.view(math.prod(tensor.shape[:-2]), *tensor.shape[-2:])


def rows_and_columns(shape: Sequence[int], name: str) -> tuple[int, int]:
    """The last two dimensions of a shape. Raises `ValueError` if it has fewer."""
    if len(shape) < 2:
        raise ValueError(f"{name} packs matrices, but a weight has the shape {tuple(shape)}")
    return shape[-2], shape[-1]


def table(values: tuple[float, ...], columns: int, like: torch.Tensor) -> torch.Tensor:
    """These numbers as fp32 on a tensor's device, (rows, columns); made once, unless operations are traced."""
    # A tracer's tensors have no numbers, and no other tracer takes them.
    made = _kept_table if type(like) is torch.Tensor else _table
    return made(values, columns, like.device)


def _table(values: tuple[float, ...], columns: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device).view(-1, columns)


_kept_table = cache(_table)


def blocks(length: int, block: int) -> int:
    """How many blocks hold so many elements."""
    return math.ceil(length / block)
