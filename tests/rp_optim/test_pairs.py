"""Gradients in two tensors: everything that reads them sees their fp32 sum; a third is added in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import rp_optim
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_optim import GradientPair, GradScaler, Master, add_to_pair, clip_grad_norm_, link, unlink
from rp_optim.gradients import squares_of

HALF = (torch.bfloat16, torch.float16)
SHAPES = ((1000,), (), (3, 50), (70_001,), (2, 40, 13))
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": lambda masters: rp_optim.Adam(masters, amsgrad=True, weight_decay=0.1),
    "AdamW": rp_optim.AdamW,
    "SGD": lambda masters: rp_optim.SGD(masters, lr=0.1, momentum=0.9, nesterov=True),
    "plain SGD": lambda masters: rp_optim.SGD(masters, lr=0.1, maximize=True),
    "Lion": rp_optim.Lion,
    "Adafactor": rp_optim.Adafactor,
    "torch's": torch.optim.AdamW,
}

Linked = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | GradientPair]


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def drawn(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def summed(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return one.float() + other.float()


def swapped(one: torch.Tensor, other: torch.Tensor) -> GradientPair:
    return GradientPair(other, one)


def flat(one: torch.Tensor, other: torch.Tensor) -> GradientPair:
    return GradientPair(one.view(-1), other.view(-1))


def trained(kind: str, linked: Linked, dtype: torch.dtype, master_dtype: torch.dtype) -> list[torch.Tensor]:
    """Masters, weights and norms of three scaled and clipped steps."""
    masters = [Master(drawn(9, shape, master_dtype)) for shape in SHAPES]
    weights = [torch.zeros(shape, dtype=dtype) for shape in SHAPES]
    optimizer, scaler, found = KINDS[kind](masters), GradScaler(8.0), list[torch.Tensor]()
    for step in range(3):
        for index, (master, weight) in enumerate(zip(masters, weights, strict=True)):
            one, other = (drawn(7 * step + 3 * index + i, master.shape, dtype) * 8 for i in range(2))
            link(master, lambda one=one, other=other: linked(one, other), lambda weight=weight: weight)
        scaler.unscale_(optimizer)
        found += [clip_grad_norm_(masters, 1.0), clip_grad_norm_(masters, 0.5, norm_type=3)]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        for master in masters:
            assert unlink(master) is None
    return found + [master.data for master in masters] + weights


@pytest.mark.pairwise
@pytest.mark.parametrize(
    ("dtype", "master_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_norms_and_scalers_give_the_bits_of_the_sum(
    kernel: str, kind: str, dtype: torch.dtype, master_dtype: torch.dtype
) -> None:
    assert kernel == rp_optim.kernel_in_use()
    wanted = trained(kind, summed, dtype, master_dtype)
    for linked in (GradientPair, swapped, flat):
        assert all(map(torch.equal, trained(kind, linked, dtype, master_dtype), wanted)), linked


def test_fp64_masters_add_in_fp64(kernel: str) -> None:
    assert kernel
    one, other = drawn(0, (5000,), torch.bfloat16), drawn(1, (5000,), torch.bfloat16) * 2**-12
    master = Master(torch.zeros(5000, dtype=torch.float64))
    link(master, lambda: GradientPair(one, other))
    rp_optim.SGD([master], lr=1.0, maximize=True).step()
    assert torch.equal(master.data, one.double() + other.double())
    unlink(master)


@pytest.mark.parametrize("norm_type", [0.0, 1.0, 2.0, 3.5, math.inf])
def test_norms_are_those_of_the_sum(kernel: str, norm_type: float) -> None:
    assert kernel
    one, other = (drawn(seed, (40_000,), torch.bfloat16) for seed in range(2))
    other[:100] = -one[:100]
    norms = []
    for source in (GradientPair(one, other), summed(one, other)):
        master = Master(torch.zeros(40_000))
        link(master, lambda source=source: source)
        norms.append(clip_grad_norm_([master], 1.0, norm_type))
    assert torch.equal(*norms)


@pytest.mark.parametrize("master_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_grad_is_the_sum_rounded_once(master_dtype: torch.dtype) -> None:
    one, other = drawn(0, (3, 50), torch.bfloat16), drawn(1, (150,), torch.bfloat16)
    master = Master(torch.zeros(3, 50, dtype=master_dtype))
    link(master, lambda: GradientPair(one, other))
    wanted = (one.double() + other.view(3, 50).double()).to(master_dtype)
    assert torch.equal(master.grad, wanted)
    with torch.no_grad():
        master.grad.mul_(2)
    assert torch.equal(unlink(master), wanted * 2)


def test_a_backward_on_a_master_adds_to_the_sum() -> None:
    one = torch.full((3,), 0.5, dtype=torch.bfloat16)
    master = Master(torch.ones(3))
    link(master, lambda: GradientPair(one, one))
    master.square().sum().backward()
    assert torch.equal(master.grad, torch.full((3,), 3.0))


def test_an_untouched_pair_stays_linked() -> None:
    one = torch.ones(3, dtype=torch.bfloat16)
    master = Master(torch.ones(3))
    link(master, lambda: GradientPair(one, one))
    rp_optim.AdamW([master]).step()
    assert unlink(master) is rp_optim.UNCHANGED


@pytest.mark.parametrize(
    ("one", "other", "finite"),
    [(1.0, 2.0, True), (math.inf, 1.0, False), (1.0, math.nan, False), (math.inf, -math.inf, False)],
)
@pytest.mark.parametrize("dtype", [*HALF, torch.float64], ids=str)
def test_a_step_is_skipped_for_what_is_not_finite_in_either(
    kernel: str, dtype: torch.dtype, one: float, other: float, finite: bool
) -> None:
    assert kernel
    master = Master(torch.zeros(5, dtype=torch.promote_types(dtype, torch.float32)))
    halves = [torch.ones(5, dtype=dtype).index_fill_(0, torch.tensor(2), value) for value in (one, other)]
    link(master, lambda: GradientPair(*halves))
    scaler, optimizer = GradScaler(2.0), rp_optim.SGD([master], lr=1.0)
    scaler.step(optimizer)
    scaler.update()
    assert bool(master.any()) is finite
    assert scaler.get_scale() == (2.0 if finite else 1.0)


def test_two_finite_numbers_may_have_an_infinite_sum() -> None:
    for dtype, value in ((torch.bfloat16, 3e38), (torch.float64, 1.5e308)):
        most = torch.full((5,), value, dtype=dtype)
        master = Master(torch.zeros(5, dtype=torch.promote_types(dtype, torch.float32)))
        link(master, lambda most=most: GradientPair(most, most))
        scaler = GradScaler(2.0)
        scaler.step(rp_optim.SGD([master], lr=1.0))
        assert not master.any()


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (torch.ones(4, dtype=torch.bfloat16), "must have the shape"),
        (torch.ones(3, dtype=torch.complex64), "has dtype"),
        (torch.ones(3, dtype=torch.float64), "has dtype"),
        (torch.ones(6, dtype=torch.bfloat16)[::2], "must be contiguous"),
    ],
    ids=str,
)
def test_both_tensors_are_checked(second: torch.Tensor, message: str) -> None:
    first = torch.ones(3, dtype=torch.bfloat16)
    for pair in (GradientPair(first, second), GradientPair(second, first)):
        master = Master(torch.ones(3))
        link(master, lambda pair=pair: pair)
        with pytest.raises(rp_optim.InvalidParameter, match=message):
            rp_optim.AdamW([master]).step()


# Adding in place


def pair_of(first: torch.Tensor, second: torch.Tensor) -> GradientPair:
    return GradientPair(first.clone(), second.clone())


@pytest.mark.parametrize("dtype", HALF, ids=str)
@settings(max_examples=examples(40), deadline=None)
@given(
    seeds=st.permutations(range(5)),
    count=st.integers(3, 5),
    size=st.sampled_from([0, 1, 127, 129, 65_537]),
    scales=st.lists(st.sampled_from([1.0, 1e-3, 300.0, -1.0]), min_size=5, max_size=5),
)
def test_sums_are_those_of_fp64_in_any_order(
    dtype: torch.dtype, seeds: list[int], count: int, size: int, scales: list[float]
) -> None:
    parts = [(drawn(seed, (size,), torch.float32) * scales[seed]).to(dtype) for seed in seeds[:count]]
    pair = pair_of(*parts[:2])
    total, bound = parts[0].double() + parts[1].double(), torch.zeros(size, dtype=torch.float64)
    steps, spacing = (2**-17, 0.0) if dtype == torch.bfloat16 else (2**-22, 2.0**-24)
    for part in parts[2:]:
        add_to_pair(pair, part)
        total += part.double()
        # Two fp32 additions, then two numbers of 16 bits.
        bound += (total.abs() + bound) * steps + spacing + sum(one.double().abs() for one in parts) * 2**-23
    half_of_the_last_digit = pair.first.double().abs() * torch.finfo(dtype).eps / 2 + spacing
    assert bool((pair.second.double().abs() <= half_of_the_last_digit).all())
    assert bool(((pair.sum().double() - total).abs() <= bound).all())


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_additions_give_the_same_bits_on_every_kernel_and_number_of_threads(dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    parts = [every, every.roll(12_345), every.flip(0).roll(54_321)]
    parts = [torch.cat([part, part.roll(7), part.roll(1000)]) for part in parts]
    before, found = rp_optim.kernel_in_use(), []
    try:
        for name in rp_optim.available_kernels():
            for threads in (1, 2, 5):
                rp_optim.use_kernel(name)
                torch.set_num_threads(threads)
                pair = pair_of(*parts[:2])
                add_to_pair(pair, parts[2])
                found.append((pair.first.nan_to_num(nan=7.0), pair.second.nan_to_num(nan=7.0)))
    finally:
        rp_optim.use_kernel(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_infinite_sums_have_no_rest(kernel: str) -> None:
    assert kernel
    top = torch.finfo(torch.float16).max
    pair = pair_of(torch.tensor([top, math.inf, 1.0, -math.inf]).half(), torch.tensor([top, 1.0, 0.0, 0.0]).half())
    add_to_pair(pair, torch.tensor([0.0, 1.0, math.inf, math.inf]).half())
    assert torch.equal(pair.sum()[:3], torch.full((3,), math.inf))
    assert bool(pair.sum()[3].isnan())
    add_to_pair(pair, torch.ones(4).half())
    assert torch.equal(pair.sum()[:3], torch.full((3,), math.inf))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([torch.ones(3)] * 3, "three tensors of bf16 or three of fp16"),
        ([torch.ones(3).half(), torch.ones(3).half(), torch.ones(3).bfloat16()], "three tensors of bf16"),
        ([torch.ones(3).half(), torch.ones(3).half(), torch.ones(4).half()], "one size, but has 3, 3, 4 elements"),
        (
            [torch.ones(3).half(), torch.ones(6).half()[::2], torch.ones(3).half()],
            "contiguous tensors on the host",
        ),
    ],
)
def test_what_cannot_be_added_is_refused(tensors: list[Any], message: str) -> None:
    with pytest.raises(rp_optim.InvalidParameter, match=message):
        add_to_pair(GradientPair(*tensors[:2]), tensors[2])


def test_squares_are_kept_until_the_pair_is_scaled() -> None:
    one = drawn(0, (1000,), torch.bfloat16)
    master = Master(torch.zeros(1000))
    link(master, lambda: GradientPair(one, one))
    assert squares_of([master]) == [pytest.approx((one.double() * 2).square().sum().item())]
    clip_grad_norm_([master], 1.0)
    (after,) = squares_of([master])
    assert after == pytest.approx(1.0, rel=1e-4)
