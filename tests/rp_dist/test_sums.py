"""Sums of parts have the bits of one addition after the other, wherever the result goes."""

from __future__ import annotations

import pytest
import torch
from rp_dist.blocks.sums import add_in_order, sum_dtype

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def one_after_the_other(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].to(sum_dtype(parts[0].dtype))
    for part in parts[1:]:
        total = total + part.to(total.dtype)
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("place", ["apart", "apart, rounded", "the first part", "the last part"])
def test_a_sum_has_the_bits_of_additions_in_order_wherever_it_is_written(
    dtype: torch.dtype, count: int, place: str
) -> None:
    generator = torch.Generator().manual_seed(count)
    parts = [torch.randn(37, generator=generator).to(dtype) for _ in range(count)]
    expected, wide = one_after_the_other(parts), sum_dtype(dtype)
    kept = [part.clone() for part in parts]
    out = {
        "apart": torch.full((37,), torch.nan, dtype=wide),
        "apart, rounded": torch.full((37,), torch.nan, dtype=dtype),
        "the first part": parts[0],
        "the last part": parts[-1],
    }[place]

    add_in_order(parts, out, torch.full((2, 40), torch.nan, dtype=wide))

    assert torch.equal(out, expected.to(out.dtype))
    for part, before in zip(parts, kept, strict=True):
        assert part is out or torch.equal(part, before)
