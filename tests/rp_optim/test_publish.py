"""Masters into weights: what copy_ does, on every kernel."""

from __future__ import annotations

import pytest
import rp_optim
import torch
from rp_optim import InvalidParameter, write_row_codes, write_weights
from rp_optim.kernels.row_codes import code_rows

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LENGTHS = (0, 1, 7, 127, 128, 129, 65536, 65537, 200_003)


@pytest.fixture(params=rp_optim.available_kernels(), autouse=True)
def kernel(request: pytest.FixtureRequest) -> object:
    before = rp_optim.kernel_in_use()
    rp_optim.use_kernel(request.param)
    yield
    rp_optim.use_kernel(before)


@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("of", FLOATS)
def test_it_is_copy_for_all_dtypes_and_lengths(of: torch.dtype, to: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    masters = [torch.randn(length, generator=generator).mul(1e3).to(of) for length in LENGTHS]
    weights = [torch.full_like(master, 7, dtype=to) for master in masters]
    write_weights(masters, weights)
    assert all(torch.equal(weight, master.to(to)) for weight, master in zip(weights, masters, strict=True))


def test_it_is_copy_for_what_cannot_be_rounded() -> None:
    master = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e38, -1e-45, 65520.0, 2**-25])
    for dtype in (torch.float16, torch.bfloat16):
        weight = torch.empty_like(master, dtype=dtype)
        write_weights([master], [weight])
        assert torch.equal(weight.nan_to_num(5), master.to(dtype).nan_to_num(5))


def test_strides_views_and_complex_numbers() -> None:
    odd = torch.empty(6, 4, dtype=torch.bfloat16).t()
    inner = torch.empty(9, dtype=torch.bfloat16)[1:8]
    complexes = torch.empty(3, dtype=torch.complex64)
    masters = [torch.randn(4, 6), torch.randn(7), torch.randn(3, dtype=torch.complex64)]
    write_weights(masters, [odd, inner, complexes])
    assert torch.equal(odd, masters[0].bfloat16())
    assert torch.equal(inner, masters[1].bfloat16())
    assert torch.equal(complexes, masters[2])


def test_parameters_that_require_grad_are_written_and_no_graph_is_made() -> None:
    master = torch.nn.Parameter(torch.ones(3))
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    write_weights([master], [weight])
    assert weight.is_leaf
    assert weight.tolist() == [1, 1, 1]


@pytest.mark.parametrize("weights", [[], [torch.empty(2)], [torch.empty(3), torch.empty(3)]])
def test_shapes_must_be_the_same(weights: list[torch.Tensor]) -> None:
    with pytest.raises(InvalidParameter, match="one weight for each master"):
        write_weights([torch.empty(3)], weights)


def all_bf16() -> torch.Tensor:
    return torch.arange(1 << 16).sub(1 << 15).to(torch.int16).view(torch.bfloat16)


def rows_of_all_sizes() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    finite = all_bf16()[all_bf16().isfinite()]
    largest = [finite[finite <= 1.75 * 2.0**power].max() for power in range(-126, 128, 23)]
    beside = [torch.cat([finite[finite.abs() <= one], one.view(1)]).view(1, -1) for one in largest]
    odd = [torch.randn(rows, columns, generator=generator) for rows, columns in ((33, 17), (70, 4099), (0, 5))]
    return [finite.view(-1, 1), all_bf16().view(256, 256), *beside, *(one.bfloat16() for one in odd)]


@pytest.mark.parametrize("weight", rows_of_all_sizes(), ids=lambda weight: "x".join(map(str, weight.shape)))
def test_all_kernels_write_the_same_codes_and_scales(weight: torch.Tensor) -> None:
    found, truth = (
        (torch.full(weight.shape, 9.0).to(torch.float8_e4m3fn), torch.full((len(weight), 1), 9.0)) for _ in "ab"
    )

    write_row_codes(weight, *found)
    code_rows(weight, *truth)

    assert torch.equal(found[0].view(torch.uint8), truth[0].view(torch.uint8))
    assert torch.equal(found[1].view(torch.int32), truth[1].view(torch.int32))


@pytest.mark.parametrize(
    "tensors",
    [
        (torch.ones(2, 3), torch.ones(2, 3).to(torch.float8_e4m3fn), torch.ones(2, 1)),
        (torch.ones(6).bfloat16(), torch.ones(6).to(torch.float8_e4m3fn), torch.ones(6, 1)),
        (torch.ones(2, 3).bfloat16(), torch.ones(2, 3).to(torch.float8_e4m3fn), torch.ones(2)),
        (torch.ones(3, 2).bfloat16().t(), torch.ones(2, 3).to(torch.float8_e4m3fn), torch.ones(2, 1)),
    ],
)
def test_codes_are_of_bf16_matrices(tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(InvalidParameter, match="needs a bf16 matrix"):
        write_row_codes(*tensors)
