"""Losses and weights do not depend on the number of machines, and under the same plans they repeat bit by bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from machine_trainings import TRAININGS
from on_machines import on_machines

ONE, TWO = "cpu:1", "cpu:2"
GROUPS = [
    pytest.param(2, TWO, marks=pytest.mark.slow),
    *(
        pytest.param(*group, marks=pytest.mark.nightly)
        for group in ((2, ONE), (3, ONE), (3, TWO), (4, ONE), (4, TWO))
    ),
]


@cache
def _found(machines: int, devices: str) -> list[Any]:
    """What each machine finds, of all trainings: processes take longer to start than to train."""
    return on_machines(machines, "machine_trainings", "run_all", devices)


def _tensors(found: Any) -> dict[str, torch.Tensor]:
    """All tensors in it, by their places."""
    if isinstance(found, torch.Tensor):
        return {"": found}
    items = found.items() if isinstance(found, dict) else enumerate(found)
    return {f"{key}.{place}": tensor for key, value in items for place, tensor in _tensors(value).items()}


@pytest.mark.parametrize(("machines", "devices"), GROUPS)
@pytest.mark.parametrize("name", TRAININGS)
def test_numbers_do_not_depend_on_the_number_of_machines(name: str, machines: int, devices: str) -> None:
    truth = _tensors(_found(1, TWO)[0][name])
    # 16-bit gradients are rounded once on each machine; moments in few bits may be rounded the other way.
    tolerance = {"sixteen_bits": 0.05, "in_few_bits": 2e-3}.get(name, 2e-5)
    for found in _found(machines, devices):
        tensors = _tensors(found[name])
        assert tensors.keys() == truth.keys()
        for place, tensor in tensors.items():
            error = (tensor.double() - truth[place].double()).norm().item()
            size = truth[place].double().norm().item()
            assert error <= tolerance * (size + 1e-3), f"{place}: off by {error:g} of {size:g}"


@pytest.mark.parametrize(("machines", "devices"), GROUPS)
def test_all_machines_have_the_same_bits(machines: int, devices: str) -> None:
    first, *others = map(_tensors, _found(machines, devices))
    for other in others:
        assert all(torch.equal(tensor, other[place]) for place, tensor in first.items())


@pytest.mark.parametrize(("machines", "devices"), [pytest.param(1, TWO), *GROUPS])
def test_a_loss_without_backward_has_the_bits_of_a_training_call_and_draws_in_training_mode_only(
    machines: int, devices: str
) -> None:
    torch.manual_seed(1)
    undrawn = torch.get_rng_state()
    torch.randint(1 << 62, ())
    drawn = torch.get_rng_state()

    for found in _found(machines, devices):
        for mode, state in (("train", drawn), ("eval", undrawn)):
            losses = found["losses_alone"][mode]

            assert all(map(torch.equal, losses["alone"], losses["wanted"]))
            assert torch.equal(losses["drawn"], state)


@pytest.mark.nightly
def test_a_second_run_under_the_same_plans_has_the_same_bits() -> None:
    runs = [on_machines(2, "machine_trainings", "run_all_as_first_planned", TWO)[0] for _ in range(2)]
    first, again = map(_tensors, runs)
    assert all(torch.equal(tensor, again[place]) for place, tensor in first.items())
