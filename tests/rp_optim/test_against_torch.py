"""Every optimizer against torch's own: all flags, dtypes and lengths, ten steps, on every kernel."""

from __future__ import annotations

from typing import Any

import pytest
import rp_optim
import torch

from . import training
from .training import combinations

FLAGS = (False, True)
ADAM = combinations(
    amsgrad=FLAGS,
    maximize=FLAGS,
    weight_decay=(0.0, 0.1),
    decoupled_weight_decay=FLAGS,
    betas=((0.9, 0.999), (0.4, 0.3)),
)
ADAMW = combinations(amsgrad=FLAGS, maximize=FLAGS, weight_decay=(0.0, 0.1))
SGD = [
    {"momentum": momentum, "dampening": dampening, "nesterov": nesterov, **rest}
    for momentum, dampening, nesterov in ((0, 0, False), (0.9, 0, False), (0.9, 0.5, False), (0.9, 0, True))
    for rest in combinations(weight_decay=(0.0, 0.1), maximize=FLAGS)
]
ADAFACTOR = combinations(
    weight_decay=(0.0, 0.1),
    maximize=FLAGS,
    eps=((None, 1e-3), (1e-6, 1e-2)),
    d=(1.0, 2.0),
    beta2_decay=(-0.8, -0.2),
)
CASES = [
    *((rp_optim.Adam, torch.optim.Adam, options) for options in ADAM),
    *((rp_optim.AdamW, torch.optim.AdamW, options) for options in ADAMW),
    *((rp_optim.SGD, torch.optim.SGD, options) for options in SGD),
    *((rp_optim.Adafactor, torch.optim.Adafactor, options) for options in ADAFACTOR),
]


def name(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else str(value)


def assert_near(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for left, right in zip(mine, theirs, strict=True):
        # What is near zero came from numbers near one.
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.pairwise(apart="options")
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("ours", "torchs", "options"), CASES, ids=name)
def test_ten_steps_are_torchs(ours: Any, torchs: Any, options: dict[str, Any]) -> None:
    options = {"lr": 0.01, **options}
    grads = training.gradients(training.start(), torch.float32)
    mine, my_optimizer = training.train_plain(ours, grads, options)
    theirs, their_optimizer = training.train_torch(torchs, torch.float32, {**options, "foreach": False})
    assert_near(mine, theirs)
    my_state, their_state = my_optimizer.state_dict()["state"], their_optimizer.state_dict()["state"]
    for number, state in their_state.items():
        assert my_state[number].keys() == state.keys()
        for key, value in state.items():
            assert my_state[number][key].shape == value.shape
            torch.testing.assert_close(my_state[number][key], value, rtol=2e-6, atol=1e-6)


FEW = [
    (rp_optim.Adam, torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (rp_optim.AdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    (rp_optim.SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (rp_optim.Adafactor, torch.optim.Adafactor, {"weight_decay": 0.1}),
]
HALF = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.pairwise
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("grad_dtype", HALF, ids=str)
@pytest.mark.parametrize("weight_dtype", HALF, ids=str)
@pytest.mark.parametrize(("ours", "torchs", "options"), FEW, ids=name)
def test_linked_gradients_and_weights_of_every_dtype(
    ours: Any,
    torchs: Any,
    options: dict[str, Any],
    grad_dtype: torch.dtype,
    weight_dtype: torch.dtype,
) -> None:
    options = {"lr": 0.01, **options}
    grads = training.gradients(training.start(), grad_dtype)
    masters, weights = training.train_linked(ours, grads, options, weight_dtype)
    theirs, _ = training.train_torch(torchs, grad_dtype, options)
    assert_near(masters, theirs)
    for master, weight in zip(masters, weights, strict=True):
        assert torch.equal(weight, master.to(weight_dtype))


@pytest.mark.parametrize(("ours", "torchs", "options"), FEW, ids=name)
def test_fp64_is_torchs_to_the_last_digits(ours: Any, torchs: Any, options: dict[str, Any]) -> None:
    mine, theirs = (
        [torch.nn.Parameter(torch.linspace(-1, 1, 35, dtype=torch.float64).view(5, 7))] for _ in range(2)
    )
    ours, torchs = ours(mine, lr=0.01, **options), torchs(theirs, lr=0.01, **options)
    for step in range(10):
        for parameter, optimizer in ((mine[0], ours), (theirs[0], torchs)):
            parameter.grad = parameter.data.sin() * (step + 1)
            optimizer.step()
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-13, atol=1e-13)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize(("ours", "torchs", "options"), FEW[:3], ids=name)
def test_complex_parameters_are_torchs(
    ours: Any, torchs: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    values = torch.complex(torch.linspace(-1, 1, 19), torch.linspace(2, -2, 19)).to(dtype)
    mine, theirs = torch.nn.Parameter(values.clone()), torch.nn.Parameter(values.clone())
    ours, torchs = ours([mine], lr=0.01, **options), torchs([theirs], lr=0.01, **options)
    for step in range(10):
        for parameter, optimizer in ((mine, ours), (theirs, torchs)):
            parameter.grad = parameter.data.conj() * (step + 1j)
            optimizer.step()
    torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-6)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("ours", "torchs", "options"), FEW, ids=name)
def test_16_bit_masters_are_fp32_arithmetic_rounded_once(
    ours: Any, torchs: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    shape = (9, 13)
    value = torch.linspace(-2, 2, 117).view(shape).to(dtype)
    grad = (torch.linspace(1, -3, 117).view(shape) / 7).to(dtype)
    narrow, wide = torch.nn.Parameter(value.clone()), torch.nn.Parameter(value.float())
    narrow.grad, wide.grad = grad, grad.float()
    if ours is rp_optim.Adafactor:
        # Its least variance follows the parameter's dtype.
        options = {**options, "eps": (1e-6, 1e-3)}
    ours([narrow], lr=0.01, **options).step()
    torchs([wide], lr=0.01, **options).step()
    # One rounding of a number that is right to 1e-6 gives the same or, at a tie, the number beside it.
    torch.testing.assert_close(narrow.data.float(), wide.data, rtol=torch.finfo(dtype).eps / 2 + 1e-5, atol=1e-6)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    "options", combinations(maximize=FLAGS, weight_decay=(0.0, 0.1), betas=((0.9, 0.99), (0.3, 0.5))), ids=str
)
def test_lion_is_the_paper(options: dict[str, Any]) -> None:
    grads = training.gradients(training.start(), torch.bfloat16)
    masters, weights = training.train_linked(rp_optim.Lion, grads, {"lr": 0.01, **options}, torch.bfloat16)
    expected, momenta = training.start(), [torch.zeros(shape) for shape in training.shapes()]
    beta1, beta2 = options["betas"]
    for step in grads:
        for value, momentum, grad in zip(expected, momenta, step, strict=True):
            gradient = -grad.float() if options["maximize"] else grad.float()
            direction = (beta1 * momentum + (1 - beta1) * gradient).sign()
            value.sub_(0.01 * (direction + options["weight_decay"] * value))
            momentum.copy_(beta2 * momentum + (1 - beta2) * gradient)
    assert_near(masters, expected)
    assert all(torch.equal(weight, master.bfloat16()) for weight, master in zip(weights, masters, strict=True))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("kind", [rp_optim.AdamW, rp_optim.SGD, rp_optim.Lion])
def test_long_tensors_are_short_ones_in_a_row(kind: Any) -> None:
    # Longer than a thread's unit of work, and not a multiple of it.
    size = 3 * 65536 + 17
    values, grad = torch.linspace(-1, 1, size), torch.linspace(3, -1, size).bfloat16()
    whole, parts = rp_optim.Master(values.clone()), [rp_optim.Master(part.clone()) for part in values.split(1000)]
    weight = torch.empty(size, dtype=torch.bfloat16)
    rp_optim.link(whole, lambda: grad, lambda: weight)
    for part, piece in zip(parts, grad.split(1000), strict=True):
        rp_optim.link(part, lambda piece=piece: piece)
    for parameters in ([whole], parts):
        optimizer = kind(parameters, lr=0.01)
        optimizer.step()
        optimizer.step()
    assert torch.equal(whole, torch.cat([part.data for part in parts]))
    assert torch.equal(weight, whole.bfloat16())


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    "shape", [(70, 1500), (2100, 37), (300, 5, 7), (3, 2050), (1, 70000), (70000, 1)], ids=str
)
def test_adafactor_on_large_matrices_is_torchs(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    mine, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    ours, torchs = rp_optim.Adafactor([mine]), torch.optim.Adafactor([theirs])
    for _ in range(3):
        mine.grad = torch.randn(shape, generator=generator)
        theirs.grad = mine.grad.clone()
        ours.step()
        torchs.step()
    torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-6)
