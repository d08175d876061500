"""Masters in two halves of 16 bits: exact both ways, and updated to the bits of whole ones, on every kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_optim.kernels.halves import of_halves, to_halves
from rp_optim.kernels.kernel import current_kernel
from rp_optim.kernels.packed import Noise, num_groups
from rp_optim.kernels.updates import (
    AdamNumbers,
    AdamUpdate,
    Factors,
    LionNumbers,
    LionUpdate,
    Matrices,
    ParameterMove,
    SGDNumbers,
    SGDUpdate,
    Small,
    Spot,
)

SPECIAL = (
    *(0x0, 0x1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x007FFFFF, 0x00800000, 0x3F7F8000, 0x3F808000),
    *(0x3F807FFF, 0x3F818000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF),
)
LENGTHS = (1, 7, 127, 128, 129, 1025, 65536 + 33)


def of_bits(bits: torch.Tensor) -> torch.Tensor:
    """From patterns in int64 to fp32."""
    return (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)


def patterns(count: int) -> torch.Tensor:
    """Special numbers of both signs, then numbers of random bits."""
    found = torch.tensor([bits | sign for bits in SPECIAL for sign in (0, 1 << 31)])
    more = torch.randint(0, 1 << 32, (count,), generator=torch.Generator().manual_seed(count))
    return of_bits(torch.cat([found, more])[:count])


def canonical(values: torch.Tensor) -> torch.Tensor:
    """Bits, the same for every NaN."""
    return values.view(torch.int32).masked_fill(values.isnan(), 0x7FC00000)


def nearest(values: torch.Tensor) -> torch.Tensor:
    """The nearest bf16 number, by distances in fp64; of two the one further from zero."""
    below = (values.view(torch.int32) >> 16 << 16).view(torch.float32).double()
    above = ((values.view(torch.int32) >> 16 << 16) + 0x10000).view(torch.float32).double()
    # Beyond the largest number there would be 2^128, which stands for infinity.
    limit = torch.where(above.isinf(), above.sign() * 2.0**128, above)
    goes_up = (limit - values.double()).abs() <= (values.double() - below).abs()
    return torch.where(goes_up, above, below).float().bfloat16()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
@settings(max_examples=examples(100))
def test_halves_are_the_number_and_its_rounding_with_ties_away_from_zero(bits: list[int]) -> None:
    values = of_bits(torch.tensor([*bits, *(pattern & 0xFFFF0000 | 0x8000 for pattern in bits)]))
    weight, rest = to_halves(values)
    assert torch.equal(canonical(of_halves(weight, rest)), canonical(values))
    finite = values.isfinite()
    assert torch.equal(weight[finite].view(torch.int16), nearest(values[finite]).view(torch.int16))
    assert torch.equal(weight.isnan(), values.isnan())


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By the kernel in use."""
    weight, rest = values.bfloat16(), torch.zeros_like(values, dtype=torch.int16)
    current_kernel().to_weight([Spot(values, values, weight, 1.0, rest=rest)])
    return weight, rest


def join(weight: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """By the kernel in use."""
    values = torch.empty(weight.shape)
    current_kernel().to_weight([Spot(weight, weight, values, 1.0, rest=rest)])
    return values


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("length", LENGTHS)
def test_kernels_split_and_join_as_the_reference(length: int) -> None:
    values = patterns(length)
    weight, rest = split(values)
    wanted, left = to_halves(values)
    assert torch.equal(weight.view(torch.int16), wanted.view(torch.int16))
    assert torch.equal(rest, left)
    assert torch.equal(canonical(join(weight, rest)), canonical(values))


@pytest.mark.usefixtures("kernel")
def test_whole_masters_can_be_rounded_alike() -> None:
    values = patterns(1000)
    weight = values.bfloat16()
    current_kernel().to_weight([Spot(values, values, weight, 1.0, rounds_away=True)])
    assert torch.equal(weight.view(torch.int16), to_halves(values)[0].view(torch.int16))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_all_numbers_are_exact_on_the_fastest_kernel() -> None:
    size = 1 << 26
    for first in range(0, 1 << 32, size):
        values = of_bits(torch.arange(first, first + size))
        weight, rest = split(values)
        wanted, left = to_halves(values)
        assert torch.equal(weight.view(torch.int16), wanted.view(torch.int16))
        assert torch.equal(rest, left)
        assert torch.equal(canonical(join(weight, rest)), canonical(values))


# Steps: whole or in halves, what the parameter becomes has the same bits

Step = Callable[[Spot, list[torch.Tensor], Small | None], None]
SHAPE = Matrices(3, 50, 11)
COUNT = 3 * 50 * 11


def adam(amsgrad: bool, **numbers: float) -> Step:
    found = {"l2": 0.0, "shrink": 1.0, "rate": 1e-2, "beta1": 0.9, "beta2": 0.99, "root": 2.0, "eps": 1e-8}

    def step(spot: Spot, state: list[torch.Tensor], small: Small | None) -> None:
        own = state if amsgrad else state[:2]
        current_kernel().adam([AdamUpdate(spot, AdamNumbers(**{**found, **numbers}), *own, small=small)])

    return step


def sgd(first: bool, nesterov: bool, momentum: bool = True) -> Step:
    def step(spot: Spot, state: list[torch.Tensor], small: Small | None) -> None:
        numbers = SGDNumbers(l2=0.1, rate=1e-2, keep=0.9, gain=0.5, nesterov=nesterov, first=first)
        current_kernel().sgd([SGDUpdate(spot, numbers, state[0] if momentum else None, small)])

    return step


def lion(spot: Spot, state: list[torch.Tensor], small: Small | None) -> None:
    current_kernel().lion([LionUpdate(spot, LionNumbers(0.99, 1e-2, 0.9, 0.99), state[0], small)])


def matrix(spot: Spot, state: list[torch.Tensor], small: Small | None) -> None:
    del small
    kernel = current_kernel()
    state[0][0] = kernel.squares([spot.of_param()])[0]
    rows, cols = kernel.matrix_squares(spot, SHAPE)
    factors = Factors(rows.float(), cols.float(), 1e-9)
    move = ParameterMove(0.99, 1e-2 / kernel.matrix_norm(spot, SHAPE, factors))
    kernel.matrix_apply(spot, SHAPE, factors, move)


def vector(spot: Spot, state: list[torch.Tensor], small: Small | None) -> None:
    del small
    kernel = current_kernel()
    squares = kernel.vector_variance(spot, state[0], 0.25, 1e-9)
    kernel.vector_apply(spot, state[0], 1e-9, ParameterMove(0.99, 1e-2 / squares))


STEPS: dict[str, Step] = {
    "Adam": adam(False),
    "Adam with weight decay": adam(False, l2=0.1, beta1=0.3),
    "AdamW": adam(False, shrink=0.99),
    "AdamW with amsgrad": adam(True, shrink=0.99),
    "SGD": sgd(False, False, momentum=False),
    "SGD with momentum, first": sgd(True, False),
    "SGD with Nesterov momentum": sgd(False, True),
    "Lion": lion,
    "Adafactor of matrices": matrix,
    "Adafactor of vectors": vector,
}


def small_of(kind: str) -> Small | None:
    noise = Noise.of(step=3, parameter=1)
    if kind == "8bit":
        scales = [torch.zeros(num_groups(COUNT), dtype=torch.bfloat16) for _ in range(3)]
        return Small(noise, tuple(scales))
    return Small(noise) if kind == "bf16" else None


def state_of(kind: str) -> list[torch.Tensor]:
    if kind == "8bit":
        dtypes = (torch.int8, torch.uint8, torch.uint8)
        return [torch.zeros(COUNT, dtype=dtype) for dtype in dtypes]
    generator = torch.Generator().manual_seed(2)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    return [torch.rand(COUNT, generator=generator).to(dtype) for _ in range(3)]


CASES = [
    *((name, "fp32") for name in STEPS),
    *((name, kind) for name in STEPS if "Adafactor" not in name for kind in ("bf16", "8bit")),
]


@pytest.mark.pairwise
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.parametrize("second_block", [False, True])
def test_steps_have_the_bits_of_whole_masters(name: str, kind: str, second_block: bool) -> None:
    # Matrices so that all paths of sums are the same.
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(COUNT, generator=generator)
    weight, rest = to_halves(whole)
    read = weight.clone()
    first, second = (state_of(kind), small_of(kind)), (state_of(kind), small_of(kind))
    for _ in range(5):
        grad = torch.randn(COUNT, generator=generator).bfloat16()
        more = grad.flip(0)
        STEPS[name](Spot(whole, grad, None, 0.5, more), *first)
        target = torch.zeros_like(weight) if second_block else weight
        STEPS[name](Spot(weight, grad, target, 0.5, more, rest), *second)
        # Those who still read the weights find them as they were.
        assert not second_block or torch.equal(weight, read)
        weight, read = target, target.clone()
        assert torch.equal(of_halves(weight, rest).view(torch.int32), whole.view(torch.int32))
    for one, other in zip(first[0], second[0], strict=True):
        assert torch.equal(one, other)
