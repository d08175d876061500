"""Matrices of any bits, with scales, and what it means that codes are the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch

DTYPES_OF_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
_BITS = {1: torch.uint8, 4: torch.int32}


def any_matrix(
    rows: int, columns: int, seed: int, device: str = "cpu"
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """A matrix in bfloat16, and scales for its columns and rows. In places all patterns of bits, or subnormal."""
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    usual = torch.randn(rows, columns, generator=generator).bfloat16()
    bits = torch.randint(-(1 << 15), 1 << 15, (rows, columns), generator=generator, dtype=torch.int32)
    matrix = torch.where(_rows_of(usual, generator), bits.short().view(torch.bfloat16), usual)
    matrix = torch.where(_rows_of(usual, generator), usual * 1e-38, matrix)
    matrix = torch.where(_rows_of(usual, generator), torch.zeros_like(usual), matrix)
    scales = [torch.randint(-30, 30, (size, 1), generator=generator) for size in (columns, rows)]
    of_weight, of_input = (torch.exp2(one.float()).to(device) for one in scales)
    return matrix.to(device), (of_weight, of_input)


def _rows_of(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(like.shape[0], 1, generator=generator) < 0.2


def assert_same_codes(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    """The same codes and scales, zeros with their signs; what is no number need not have the same bits."""
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        is_none = one.float().isnan()
        assert torch.equal(is_none, other.float().isnan())
        mine, its = (each.contiguous().view(_BITS[each.itemsize]) for each in (one, other))
        assert torch.equal(mine[~is_none], its[~is_none])
