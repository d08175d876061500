"""What ``compute="auto"`` decides by measured times, and what is measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rp_packing import (
    Decision,
    Fp8,
    LinearShape,
    candidates,
    choose,
    decide,
    pack_frozen,
    shapes_of,
    time_products,
)
from torch import nn

FP8, MIXED = Fp8(), Fp8(weights="bf16")
POSITIVE = st.floats(1e-3, 1e3)


@given(POSITIVE, POSITIVE, POSITIVE)
def test_the_fastest_is_chosen_if_it_saves_a_twentieth(plain: float, fp8: float, mixed: float) -> None:
    found = decide({None: plain, FP8: fp8, MIXED: mixed}, "2 linear layers, 8 rows").recipe

    best = min(fp8, mixed)
    if best > 0.95 * plain:
        assert found is None
    else:
        assert found == (FP8 if fp8 == best else MIXED)


def test_a_decision_says_what_was_measured() -> None:
    words = "196 linear layers, 16384 rows"

    assert str(decide({None: 8.0, FP8: 7.0, MIXED: 6.1}, words)) == (
        "compute='auto': FP8 with bf16 gradients of weights: 1.31 times bf16 for 196 linear layers, 16384 rows "
        "(measured 6.1 and 8.0 ms)"
    )
    assert decide({None: 8.0, FP8: 7.7}, words).reason == (
        "bf16, since FP8 does not save 5 %: it is 1.04 times bf16 for 196 linear layers, 16384 rows "
        "(measured 7.7 and 8.0 ms)"
    )
    assert decide({None: 8.0}, words).recipe is None


@pytest.mark.parametrize("times", [{FP8: 1.0}, {None: 0.0, FP8: 1.0}, {None: 1.0, FP8: math.nan}, {}])
def test_times_that_are_none_are_refused(times: dict[Fp8 | None, float]) -> None:
    with pytest.raises(ValueError, match="times must be positive, that of bf16 among them"):
        decide(times, "1 linear layers, 8 rows")


@pytest.mark.parametrize("recipe", [None, FP8, Fp8(weights="bf16", skip=("a", "b"), uploads="bf16")])
def test_decisions_go_through_json(recipe: Fp8 | None) -> None:
    decision = Decision(recipe, "why")

    assert Decision.decoded(json.loads(json.dumps(decision.encoded()))) == decision


def test_the_largest_shapes_are_measured_as_often_as_layers_have_them() -> None:
    frozen = nn.Linear(64, 96).requires_grad_(False)
    row = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), frozen, nn.Linear(16, 16), nn.Linear(64, 3))
    row.bfloat16()
    pack_frozen(row, "fp8-rows")

    found = shapes_of(list(row), choose(list(row), Fp8()))

    # All but the one of 16 by 16, which has less than a twentieth of the work.
    assert found == (LinearShape(64, 64, True, 3), LinearShape(96, 64, False, 1))


def test_products_are_run_with_and_without_gradients_of_weights_in_each_recipe() -> None:
    seen: list[tuple[type, bool]] = []
    clocked: list[float] = []

    def run(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        assert rows.shape == (8, 32)
        out = module(rows)
        seen.append((type(out.grad_fn), next(module.parameters()).requires_grad))
        return out

    def clock(body: Callable[[], None]) -> float:
        body()
        clocked.append(1.0)
        return 1.0

    state = torch.get_rng_state()
    shapes = [LinearShape(16, 32, True, 5), LinearShape(48, 32, False, 1)]
    found = time_products(shapes, candidates(trains_weights=True), 8, torch.device("cpu"), clock, calls=4, run=run)

    assert torch.equal(torch.get_rng_state(), state)
    # Beside each call, a quarter of what makes codes ready.
    assert found == {None: 6.0, FP8: 7.5, MIXED: 7.5}
    assert [is_trained for _, is_trained in seen] == [True] * 3 + [False] * 3
    assert len({kind for kind, _ in seen}) == 2
    assert len(clocked) == 10
