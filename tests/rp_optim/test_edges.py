"""The kernels at the edges: NaN, 16-bit state, Adafactor's rounding, threads, several jobs in one call."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import rp_optim
import torch
from rp_optim.gradients import squares_of

pytestmark = pytest.mark.usefixtures("kernel")


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def trained(kind: Any, grads: list[torch.Tensor], start: torch.Tensor, **options: Any) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(start.clone())
    optimizer = kind([weight], **options)
    for grad in grads:
        weight.grad = grad.to(weight.dtype)
        optimizer.step()
    return weight


# NaN


def test_amsgrad_never_forgets_a_nan_in_the_largest_moment() -> None:
    found = []
    for kind in (rp_optim.Adam, torch.optim.Adam):
        weight = torch.nn.Parameter(torch.ones(40))
        optimizer = kind([weight], amsgrad=True)
        for step in range(2):
            weight.grad = torch.ones(40)
            optimizer.step()
            if step == 0:
                optimizer.state[weight]["max_exp_avg_sq"][7] = math.nan
        found.append(optimizer.state[weight]["max_exp_avg_sq"].isnan().nonzero().view(-1).tolist())
        assert weight.isnan().nonzero().view(-1).tolist() == [7]
    assert found == [[7], [7]]


def test_lion_does_not_move_where_there_is_no_direction() -> None:
    # The sign of NaN is 0, as torch has it.
    grads = [torch.tensor([0.0, math.nan, 2.0, -2.0] * 5)]
    weight = trained(rp_optim.Lion, grads, torch.ones(20), lr=0.5)
    expected = torch.tensor([1.0, 1.0, 0.5, 1.5] * 5)
    if rp_optim.kernel_in_use() == "torch":
        expected = 1 - 0.5 * grads[0].sign()
    assert torch.equal(weight.data, expected)


@pytest.mark.parametrize("shape", [(40,), (5, 8)], ids=str)
def test_a_nan_in_adafactors_variance_is_not_taken_for_the_least_one(shape: tuple[int, ...]) -> None:
    found = []
    for kind in (rp_optim.Adafactor, torch.optim.Adafactor):
        weight = torch.nn.Parameter(torch.ones(shape))
        optimizer = kind([weight])
        weight.grad = torch.ones(shape)
        optimizer.step()
        name = "variance" if len(shape) == 1 else "col_var"
        optimizer.state[weight][name].view(-1)[3] = math.nan
        weight.grad = torch.ones(shape)
        optimizer.step()
        found.append(weight.isnan())
    assert found[0].any()
    assert torch.equal(*found)


# 16 bits, more than one step


SIXTEEN = [
    (rp_optim.Adam, {"amsgrad": True, "eps": 1e-3, "betas": (0.5, 0.5)}),
    (rp_optim.SGD, {"momentum": 0.9}),
    (rp_optim.SGD, {"momentum": 0.9, "nesterov": True, "dampening": 0.0}),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("kind", "options"), SIXTEEN, ids=str)
def test_16_bit_state_is_carried_from_step_to_step(kind: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    # Falling gradients: the largest second moment is an old one.
    grads = [torch.linspace(0.5, 4.0, 90) * size for size in (4.0, 1.0, 0.5)]
    start = torch.linspace(-2, 2, 90)
    states = []
    for exact in (dtype, torch.float32):
        weight = torch.nn.Parameter(start.to(exact))
        optimizer = kind([weight], lr=0.125, **options)
        for grad in grads:
            weight.grad = grad.to(dtype).to(exact)
            optimizer.step()
        states.append({name: value.float() for name, value in optimizer.state[weight].items()})
    # Some roundings each step; a state that was not kept would be zero, or what it was long ago.
    for name, value in states[1].items():
        torch.testing.assert_close(states[0][name], value, rtol=16 * torch.finfo(dtype).eps, atol=1e-6)


# Adafactor


def test_the_update_of_a_16_bit_vector_is_measured_as_it_is_made() -> None:
    # The variance is rounded to bf16 before the update divides by it: d is the norm of just that update.
    weight = torch.nn.Parameter(torch.full((257,), 64.0, dtype=torch.bfloat16))
    grad = torch.full((257,), 1.0).bfloat16() * 1.1796875
    weight.grad = grad.bfloat16()
    optimizer = rp_optim.Adafactor([weight], lr=1.0, eps=(1e-6, 1e-3))
    optimizer.step()
    taken = rp_optim.kernels.updates.Spot(weight.data, weight.grad, None, 1.0)
    kernel = rp_optim.kernels.kernel.current_kernel()
    variance = torch.zeros(257, dtype=torch.bfloat16)
    squares = kernel.vector_variance(taken, variance, 1.0, 1e-12)
    moves = weight.grad.float() / variance.float().sqrt()
    assert squares == pytest.approx(moves.double().square().sum().item(), rel=1e-6)
    assert squares != pytest.approx(257.0, rel=1e-4)


@pytest.mark.parametrize("gain", [1.0, 0.75, 0.5, 0.25])
def test_a_variance_moves_from_the_nearer_end(gain: float) -> None:
    # From the far end, what is left of a huge old variance would be its rounding error.
    grad, variance = torch.full((50,), 1e-3), torch.full((50,), 1e10)
    spot = rp_optim.kernels.updates.Spot(torch.zeros(50), grad, None, 1.0)
    expected = torch.lerp(variance, grad.square(), gain)
    rp_optim.kernels.kernel.current_kernel().vector_variance(spot, variance, gain, 1e-30)
    torch.testing.assert_close(variance, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(6, 7), (40,)], ids=str)
def test_adafactor_squares_the_factor_of_its_gradient(shape: tuple[int, ...]) -> None:
    grad = torch.linspace(-3, 5, math.prod(shape)).view(shape)
    master = rp_optim.Master(torch.ones(shape))
    plain = torch.nn.Parameter(torch.ones(shape))
    optimizers = rp_optim.Adafactor([master]), torch.optim.Adafactor([plain])
    for size in (1.0, 8.0):
        rp_optim.link(master, lambda: grad)
        rp_optim.clip_grad_norm_([master], size)
        plain.grad = grad * (size / (grad.norm() + 1e-6))
        for optimizer in optimizers:
            optimizer.step()
        rp_optim.unlink(master)
    torch.testing.assert_close(master.data, plain.data, rtol=1e-6, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("shape", [(70_000, 3), (2, 40_000, 2), (3, 40_003), (4000, 40)], ids=str)
def test_adafactor_does_not_depend_on_the_number_of_threads(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    grads = [torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) for _ in range(2)]
    found = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        found.append(trained(rp_optim.Adafactor, grads, start).data)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.usefixtures("_threads")
def test_the_pieces_of_a_matrix_do_not_depend_on_the_number_of_threads() -> None:
    # In fp64, where the order of the sums shows.
    grad = torch.randn(3000, 67, generator=torch.Generator().manual_seed(0))
    spot = rp_optim.kernels.updates.Spot(grad, grad, None, 1.0)
    shape = rp_optim.kernels.updates.Matrices(1, 3000, 67)
    factors = rp_optim.kernels.updates.Factors(torch.rand(3000) + 1, torch.rand(67) + 1, 1e-30)
    kernel, found = rp_optim.kernels.kernel.current_kernel(), []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        found.append(
            (*kernel.matrix_squares(spot, shape), torch.tensor([kernel.matrix_norm(spot, shape, factors)]))
        )
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


# Several jobs in one call

SIZES = (0, 1, 65536, 5, 0, 2 * 65536, 65537, 127, 65535, 0, 3 * 65536 + 1, 65536)


def together(kind: Any, options: dict[str, Any], *, alone: bool) -> list[torch.Tensor]:
    """Parameters, sums and state after two steps, in one call of the kernel for all or in one for each."""
    generator = torch.Generator().manual_seed(2)
    weights = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]
    optimizers = [kind([weight], **options) for weight in weights] if alone else [kind(weights, **options)]
    sums: list[float | None] = []
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        sums += [squares_of([weight])[0] for weight in weights] if alone else squares_of(weights)
        for optimizer in optimizers:
            optimizer.step()
    state = [value for each in optimizers for state in each.state.values() for value in state.values()]
    return [torch.tensor(sums, dtype=torch.float64), *(weight.data for weight in weights), *state]


@pytest.mark.pairwise
@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(rp_optim.AdamW, {"amsgrad": True}), (rp_optim.SGD, {"momentum": 0.9}), (rp_optim.Lion, {})],
    ids=str,
)
def test_jobs_of_any_sizes_in_one_call_are_what_they_are_alone(
    kind: Any, options: dict[str, Any], threads: int
) -> None:
    torch.set_num_threads(threads)
    found = together(kind, {"lr": 0.01, **options}, alone=False)
    for mine, expected in zip(found, together(kind, {"lr": 0.01, **options}, alone=True), strict=True):
        assert torch.equal(mine, expected)
