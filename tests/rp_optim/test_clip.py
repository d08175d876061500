"""Clipping by norm against torch's."""

from __future__ import annotations

import math

import pytest
import rp_optim
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_optim import Master, clip_grad_norm_, link, unlink
from rp_optim.clip import _norm


def plain(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    found = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((300, 70), (5,), (), (40_000,))]
    for parameter in found:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return found


def exact(parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """The same gradients in fp64, where torch's own sums are as exact as can be wished."""
    wide = torch.complex128 if parameters[0].is_complex() else torch.float64
    found = [torch.nn.Parameter(parameter.detach().to(wide)) for parameter in parameters]
    for parameter, old in zip(found, parameters, strict=True):
        parameter.grad = old.grad.to(wide)
    return found


NORMS = [2.0, 1.0, math.inf, -math.inf, 0.0, 3.0, 0.5]


@pytest.mark.parametrize("max_norm", [0.1, 1e9])
@pytest.mark.parametrize("norm_type", NORMS)
def test_it_is_torchs(norm_type: float, max_norm: float) -> None:
    mine, theirs = plain(), exact(plain())
    norm = clip_grad_norm_(mine, max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
    for left, right in zip(mine, theirs, strict=True):
        torch.testing.assert_close(left.grad.double(), right.grad, rtol=1e-6, atol=0)


def test_torchs_own_fp32_is_near() -> None:
    norm = clip_grad_norm_(plain()[1:3], 1.0)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain()[1:3], 1.0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("norm_type", NORMS)
def test_it_is_torchs_for_other_dtypes(dtype: torch.dtype, norm_type: float) -> None:
    norm = clip_grad_norm_(plain(dtype), 0.1, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(exact(plain(dtype)), 0.1, norm_type)
    assert norm.dtype == (torch.float32 if dtype == torch.complex64 else torch.float64)
    torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_linked_gradient_is_clipped_as_the_step_reads_it(dtype: torch.dtype, norm_type: float) -> None:
    values = [parameter.grad.to(dtype) for parameter in plain()]
    masters = [Master(torch.ones_like(value, dtype=torch.float32)) for value in values]
    theirs = [torch.nn.Parameter(master.data.double()) for master in masters]
    kept = [value.clone() for value in values]
    for master, value, other in zip(masters, values, theirs, strict=True):
        link(master, lambda value=value: value)
        other.grad = value.double()
    norm = clip_grad_norm_(masters, 0.1, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.1, norm_type)
    torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
    assert all(torch.equal(value, before) for value, before in zip(values, kept, strict=True))
    rp_optim.SGD(masters, lr=1.0).step()
    torch.optim.SGD(theirs, lr=1.0).step()
    for master, other in zip(masters, theirs, strict=True):
        torch.testing.assert_close(master.data.double(), other.data, rtol=1e-6, atol=1e-7)


def test_clipping_twice_is_clipping_to_the_smaller() -> None:
    master, grad = Master(torch.zeros(2)), torch.tensor([3.0, 4.0])
    link(master, lambda: grad)
    assert clip_grad_norm_(master, 2.0).item() == 5.0
    assert clip_grad_norm_(master, 1.0).item() == pytest.approx(2.0, rel=1e-6)
    assert clip_grad_norm_(master, 4.0).item() == pytest.approx(1.0, rel=1e-6)
    torch.testing.assert_close(unlink(master), torch.tensor([0.6, 0.8]))


def test_a_linked_gradient_is_read_once_for_scaling_and_clipping() -> None:
    master, grad = Master(torch.zeros(2)), torch.tensor([3.0, 4.0])
    link(master, lambda: grad)
    optimizer = rp_optim.SGD([master], lr=1.0)
    scaler = rp_optim.GradScaler(init_scale=2.0)
    scaler.unscale_(optimizer)
    # Had it been read again, the norm would be another.
    grad.fill_(100.0)
    assert clip_grad_norm_([master], 1.0).item() == 2.5


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_as_in_torch(value: float) -> None:
    mine, theirs = plain(), plain()
    for parameters in (mine, theirs):
        parameters[1].grad[2] = value
    norm = clip_grad_norm_(mine, 1.0)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    torch.testing.assert_close(norm, expected, equal_nan=True)
    for left, right in zip(mine, theirs, strict=True):
        torch.testing.assert_close(left.grad, right.grad, equal_nan=True)
    with pytest.raises(rp_optim.NonFiniteGradients, match="cannot be clipped"):
        clip_grad_norm_(mine, 1.0, error_if_nonfinite=True)


def test_nothing_to_clip() -> None:
    assert clip_grad_norm_([], 1.0).item() == 0.0
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    assert clip_grad_norm_([frozen], 1.0).item() == 0.0
    with pytest.warns(UserWarning, match=r"no parameter that was given has a gradient.*optim_parameters") as told:
        assert clip_grad_norm_([frozen, torch.nn.Parameter(torch.ones(2))], 1.0).item() == 0.0
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match="generator of parameters is empty"):
        clip_grad_norm_((parameter for parameter in ()), 1.0)


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.floats(-(2.0**50), 2.0**50, width=32), min_size=1, max_size=50), st.floats(1e-3, 1e3))
def test_clipped_gradients_are_no_longer_than_asked_and_as_long_as_they_can_be(
    numbers: list[float], max_norm: float
) -> None:
    weight = torch.nn.Parameter(torch.zeros(len(numbers)))
    weight.grad = torch.tensor(numbers)
    before = weight.grad.double().norm().item()
    clip_grad_norm_([weight], max_norm)
    after = weight.grad.double().norm().item()
    assert after == pytest.approx(min(before, max_norm * before / (before + 1e-6)), rel=1e-5, abs=1e-30)


def test_the_norm_does_not_depend_on_the_order_of_arrival() -> None:
    # In fp64, 2**54 + 1 + 1 + ... stays 2**54; ones that are added up first do count.
    values = [1.0] * 40 + [2.0**27] + [1.0] * 40
    norms = set()
    for late in range(len(values)):
        masters = [Master(torch.zeros(1)) for _ in values]
        for index, (master, value) in enumerate(zip(masters, values, strict=True)):

            def ready(wait: bool, /, there: bool = index != late) -> bool:
                return wait or there

            link(master, lambda value=value: torch.tensor([value]), ready=ready)
        # In fp64: the fp32 norm that is returned would hide it.
        norms.add(_norm(masters, 2.0, "a norm"))
    assert len(norms) == 1
