"""Products of linear layers in FP8: every code, casts by row, the three products, and which layers have them."""

from __future__ import annotations

import math
from itertools import product as pairs
from typing import Any

import pytest
import torch
from rp_packing import Fp8, become, choose, codes_bytes, fp8_refusal
from rp_packing.products.linear import WeightCodes, linear
from rp_packing.products.scaled import transposed
from rp_packing.rows import DTYPES, Kind, Rows, cast_columns, cast_rows, numbers_of
from torch import nn

KINDS: list[Kind] = ["e4m3", "e5m2"]
# Bits of the mantissa, the exponent's bias, the largest number.
SHAPES = {"e4m3": (3, 7, 448.0), "e5m2": (2, 15, 57344.0)}


def slow_code(number: float, kind: Kind) -> float:
    """The nearest number of the format, ties to even; by the format's definition."""
    bits, bias, _ = SHAPES[kind]
    exponent = max(math.frexp(number)[1] - 1, 1 - bias) if number else 1 - bias
    step = 2.0 ** (exponent - bits)
    return round(number / step) * step


def slow_scale(largest: float, kind: Kind) -> float:
    exponent = math.ceil(math.log2(largest / SHAPES[kind][2]))
    return 2.0**exponent


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return ((found.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("kind", KINDS)
def test_all_codes_are_what_their_numbers_are_cast_to(kind: Kind) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(DTYPES[kind])
    finite = codes[codes.float().isfinite()]

    found, scales = cast_rows(finite.float()[None], DTYPES[kind])

    assert scales.item() == 1.0
    assert len(finite) == {"e4m3": 254, "e5m2": 248}[kind]
    assert torch.equal(found.view(torch.uint8), finite[None].view(torch.uint8))


@pytest.mark.parametrize(("kind", "dtype"), list(pairs(KINDS, [torch.bfloat16, torch.float32])))
def test_a_cast_is_the_nearest_code_by_the_least_power_of_two(kind: Kind, dtype: torch.dtype) -> None:
    # Rows of very different sizes, with numbers down to subnormal codes and ties among them.
    numbers = random(40, 64, dtype=torch.float32) * 2.0 ** torch.randint(-20, 6, (40, 64))
    numbers[:20] = (numbers[:20] * 2**6).round() / 2**6
    numbers[3] = 448.0 * torch.linspace(-1, 1, 64)
    numbers = (numbers * 2.0 ** torch.randint(-60, 60, (40, 1))).to(dtype)

    found = numbers_of(cast_rows(numbers, DTYPES[kind]))

    for row, mine in zip(numbers.tolist(), found.tolist(), strict=True):
        scale = slow_scale(max(map(abs, row)), kind)
        assert mine == [slow_code(number / scale, kind) * scale for number in row]


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_infinities_and_the_smallest_and_largest_numbers_are_cast(kind: Kind) -> None:
    # The largest of fp32 is rounded beyond it, as in any format of fewer bits.
    most, least = 1.75 * 2.0**127, torch.finfo(torch.float32).tiny
    rows = torch.tensor([[0.0, -0.0], [most, 1.0], [least, -least], [math.inf, 1.0], [1.0, math.nan], [2.0, -1.0]])

    found = numbers_of(cast_rows(rows, DTYPES[kind]))

    # What is not finite shows in its whole row, and in no other.
    assert found.isnan().all(-1).tolist() == [False, False, False, True, True, False]
    assert found[0].tolist() == [0.0, 0.0]
    assert found[5].tolist() == [2.0, -1.0]
    assert found[1].tolist() == [most, 0.0]
    assert found[2].tolist() == [least, -least]


def test_columns_are_cast_as_rows_of_the_transpose() -> None:
    numbers = random(24, 40)
    for mine, whole in zip(cast_columns(numbers), cast_rows(numbers.t().contiguous()), strict=True):
        assert torch.equal(mine.float(), whole.float())
        assert mine.is_contiguous()


RECIPES = [Fp8(), Fp8(inputs="e5m2", weights="e5m2"), Fp8(inputs="bf16", weights="bf16")]


def emulated(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, recipe: Fp8) -> list[torch.Tensor]:
    """The three products in fp64, of the numbers that the factors are cast to."""

    def cast(matrix: torch.Tensor, kind: str) -> torch.Tensor:
        return numbers_of(cast_rows(matrix, DTYPES[kind])).double()  # type: ignore[index]  # one of two

    of_x, of_w = cast_rows(x), cast_rows(w)
    forward = cast(x, "e4m3") @ cast(w, "e4m3").t()
    inputs, weights = g.double() @ w.double(), g.double().t() @ x.double()
    if recipe.inputs != "bf16":
        inputs = cast(g * of_w.scales.t(), recipe.inputs) @ of_w.codes.double()
    if recipe.weights != "bf16":
        weights = cast((g * of_x.scales).t(), recipe.weights) @ of_x.codes.double()
    return [forward, inputs, weights]


# 50 rows: no multiple of 16, along which the gradients of weights are summed.
@pytest.mark.parametrize(("recipe", "rows", "is_cast"), list(pairs(RECIPES, (64, 50), (True, False))))
def test_the_three_products_are_those_of_the_codes_and_near_the_exact_ones(
    recipe: Fp8, rows: int, is_cast: bool
) -> None:
    x, w, g = random(2, rows, 96), random(64, 96, seed=1), random(2, rows, 64, seed=2)
    # Tokens and outputs of different sizes, which scales by row are for.
    x, w, g = x * torch.rand(2, rows, 1).bfloat16(), w * torch.rand(64, 1).bfloat16() / 50, g * 1e-4
    x.requires_grad_()
    w.requires_grad_()
    of_w = cast_rows(w.detach())
    cast = WeightCodes(of_w, transposed(of_w.codes)) if is_cast else None

    out = linear(x, w, cast, recipe)
    out.backward(g)

    assert x.grad is not None
    assert w.grad is not None
    found = [out.detach().flatten(0, 1), x.grad.flatten(0, 1), w.grad]
    factors = [one.detach().reshape(-1, one.shape[-1]) for one in (x, w, g)]
    for mine, truth in zip(found, emulated(*factors, recipe), strict=True):
        assert mine.dtype == torch.bfloat16
        assert error(mine, truth) < 3e-3
    wide, tall, grad = (one.double() for one in factors)
    exact = [wide @ tall.t(), grad @ tall, grad.t() @ wide]
    bounds = [
        0.04,
        *({"e4m3": 0.04, "e5m2": 0.07, "bf16": 0.003}[kind] for kind in (recipe.inputs, recipe.weights)),
    ]
    for mine, truth, bound in zip(found, exact, bounds, strict=True):
        assert error(mine, truth) < bound


def test_backward_keeps_a_byte_a_number_of_the_input() -> None:
    x, w = random(64, 96).requires_grad_(), random(32, 96, seed=1).requires_grad_()
    kept: list[torch.Tensor] = []
    of_w = cast_rows(w.detach())
    turned = transposed(of_w.codes)
    of_weight = {one.data_ptr() for one in (*of_w, *turned)}

    with torch.autograd.graph.saved_tensors_hooks(lambda one: (kept.append(one), one)[1], lambda one: one):
        linear(x, w, WeightCodes(of_w, turned))

    of_input = [one for one in kept if one.data_ptr() not in of_weight]
    assert sum(one.nbytes for one in of_input) == 64 * 96 + 64 * 4


def layer(*sizes: int, **options: Any) -> nn.Linear:
    made = nn.Linear(*sizes, dtype=torch.bfloat16, **options)
    become(made)
    made.recipe = Fp8()  # type: ignore[assignment]  # of its new class
    return made


def test_a_layer_multiplies_as_told_and_goes_back() -> None:
    made, x = layer(32, 48), random(5, 32)

    found = made(x)
    made.recipe = None  # type: ignore[assignment]  # as above

    assert isinstance(made, nn.Linear)
    assert 0 < error(found, made(x).double()) < 0.05
    assert torch.equal(made(x), nn.functional.linear(x, made.weight, made.bias))
    made.recipe = Fp8()  # type: ignore[assignment]  # as above
    assert made(x[:0]).shape == (0, 48)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(made(x.float()), found)
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match=r"autocast asks for torch.float16"):
        made(x)


def test_codes_that_are_cast_again_stay_where_they_are() -> None:
    made, x = layer(32, 48), random(5, 32)
    made.cast(backward=True)  # type: ignore[operator]  # of its new class
    before = made.codes.data_ptr()  # type: ignore[union-attr, operator]

    with torch.no_grad():
        made.weight.mul_(3)
    made.cast(backward=False)  # type: ignore[operator]

    assert made.codes.data_ptr() == before  # type: ignore[union-attr, operator]
    turned = Rows(made.turned, made.ones)  # type: ignore[arg-type]
    assert torch.equal(numbers_of(turned).t() * made.scales, numbers_of(cast_rows(made.weight.detach())))  # type: ignore[operator]
    held = [made.codes, made.scales, made.turned, made.ones]
    assert codes_bytes(made.weight, backward=True) == sum(one.nbytes for one in held)  # type: ignore[misc, union-attr]
    assert made(x).shape == (5, 48)


class Moe(nn.Module):
    """A router beside its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(32, 16), nn.ModuleList([nn.Linear(32, 32)])
        self.stack = nn.Module()
        self.stack.weight = nn.Parameter(torch.zeros(2, 32, 32))


def test_layers_stay_as_they_are_for_reasons_that_are_told() -> None:
    class Own(nn.Linear):
        pass

    embedding, tied = nn.Embedding(64, 32), nn.Linear(32, 64)
    tied.weight = embedding.weight
    names = {"up": nn.Linear(32, 64), "odd": nn.Linear(32, 24), "lm_head": nn.Linear(32, 64), "own": Own(32, 32)}
    inner = [nn.Linear(32, 32) for _ in range(3)]
    row = nn.ModuleList([embedding, inner[0], nn.ModuleDict(names), Moe(), inner[1], tied]).bfloat16()
    wide = inner[2]

    found, ended = choose([*row, wide], Fp8()), choose([*row, wide], Fp8(skip_ends=1))

    assert found.chosen == ((), ("",), ("up",), ("experts.0",), ("",), (), ())
    assert dict(found.left) == {
        "of float32 rather than bfloat16": 1,
        "routers of experts": 1,
        "skipped by name": 1,
        "stacks of experts": 1,
        "tied to an embedding": 1,
        "with a class or a forward of their own": 1,
        "with a size that is no multiple of 16": 1,
    }
    assert ended.chosen == ((), (), ("up",), ("experts.0",), (), (), ())
    assert "4 linear layers multiply in FP8; as before: 1 of float32" in str(found)


@pytest.mark.parametrize(
    "values",
    [{"inputs": "fp4"}, {"weights": "e4m4"}, {"skip_ends": -1}, {"skip_ends": 1.5}, {"skip": "head"}],
)
def test_a_recipe_that_cannot_be_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=f"{next(iter(values))} must be"):
        Fp8(**values)


def test_devices_without_such_products_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    refused = fp8_refusal(torch.device("cuda", 77))
    assert refused is not None
    assert "8.9 (Ada) or more, but A100 has 8.0" in refused
