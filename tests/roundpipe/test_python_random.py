"""Layers that draw from Python's or NumPy's random generator draw the same numbers on any devices, and again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from plain import PLAN_NAMES, gradients, plans
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from torch import nn

DRAWS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),
    "gauss": lambda: abs(random.gauss(0, 1)),
    "normal": lambda: abs(float(np.random.standard_normal())),
    "all": lambda: (random.random() + float(np.random.rand()) + float(torch.rand(()))) / 3,
}


class Dropped(nn.Module):
    """Half of the time it only adds zero times its weight of one; otherwise it multiplies by that, and by two."""

    def __init__(self, draws: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.draws = draws

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0 * self.weight if DRAWS[self.draws]() < 0.5 else x * self.weight * 2


def call(model: RoundPipe, layers: nn.Sequential, rows: int = 3) -> tuple[float, list[float]]:
    """A training call's loss, and the sum of each layer's gradient."""
    loss = model.forward_backward((torch.ones(rows, 4),), loss_fn=lambda out, _: out.sum())
    model.synchronize()
    sums = [0.0 if one is None else float(one.sum()) for one in gradients(layers).values()]
    model.zero_grad()
    return float(loss), sums


def of_each_call(devices: str, draws: str, plan_name: str, grain: Any = None, microbatches: int = 3) -> list[Any]:
    layers = nn.Sequential(*(Dropped(draws) for _ in range(6)))
    config = RoundPipeRunConfig(
        num_microbatch=microbatches,
        execute_plan=plans(6, microbatches)[plan_name],
        recompute_grain=grain,
    )
    with Runtime(devices) as runtime:
        model = RoundPipe(layers, runtime=runtime, model_run_config=config)
        torch.manual_seed(3)
        return [call(model, layers) for _ in range(4)]


@pytest.mark.pairwise
@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("plan_name", PLAN_NAMES)
@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_gradients_are_those_of_the_network_that_made_the_loss(
    devices: str, draws: str, plan_name: str, grain: Any
) -> None:
    found = of_each_call(devices, draws, plan_name, grain, microbatches=1)

    for loss, sums in found:
        # The gradient of a layer that multiplies by its weight of one sums up to the loss, that of others to zero.
        kept = round(torch.tensor(loss / 12).log2().item())
        assert sorted(sums) == sorted([loss] * kept + [0.0] * (6 - kept))
    assert len({loss for loss, _ in found}) > 1


@pytest.mark.few(1)
@pytest.mark.usefixtures("samples_first")
@pytest.mark.pairwise
@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("plan_name", PLAN_NAMES)
def test_such_layers_draw_the_same_numbers_on_any_devices_under_any_plan(
    devices: str, draws: str, plan_name: str
) -> None:
    wanted = of_each_call("cpu:1", draws, "all fused")

    found = of_each_call(devices, draws, plan_name)

    assert found == wanted


@pytest.mark.parametrize("draws", DRAWS)
def test_a_call_leaves_the_generators_of_python_and_numpy_as_they_were(runtime: Runtime, draws: str) -> None:
    layers = nn.Sequential(*(Dropped(draws) for _ in range(4)))
    model = RoundPipe(layers, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=3))
    random.seed(5)
    np.random.seed(5)

    for _ in range(3):
        call(model, layers)

    found = random.random(), float(np.random.rand())
    random.seed(5)
    np.random.seed(5)
    assert found == (random.random(), float(np.random.rand()))


def test_the_callers_seed_for_torch_decides_what_layers_draw_from_pythons_generator(two: Runtime) -> None:
    layers = nn.Sequential(*(Dropped("python") for _ in range(8)))
    model = RoundPipe(layers, runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=1))
    found = []

    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        random.seed(7)
        found.append(call(model, layers))

    assert found[0] == found[2] != found[1]


def test_a_loss_function_and_a_prepare_draw_the_same_on_any_devices() -> None:
    class Prepared(nn.Module):
        def prepare(self, x: torch.Tensor) -> float:
            del x
            return random.random()

        def forward(self, x: torch.Tensor, prepared: float) -> torch.Tensor:
            return x * prepared

    def losses(devices: str) -> list[float]:
        layers = nn.Sequential(nn.Linear(4, 4), Prepared(), nn.Linear(4, 4))
        for parameter in layers.parameters():
            nn.init.ones_(parameter)
        with Runtime(devices) as runtime:
            model = RoundPipe(layers, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=4))
            torch.manual_seed(3)
            loss_fn = lambda out, _: out.sum() * float(np.random.rand())  # noqa: E731
            return [float(model.forward_backward((torch.ones(4, 4),), loss_fn=loss_fn)) for _ in range(3)]

    wanted = losses("cpu:1")

    assert len(set(wanted)) == 3
    for devices in ("cpu:2", "cpu:4"):
        torch.testing.assert_close(losses(devices), wanted)


def test_a_layer_that_begins_to_draw_when_its_mode_changes_is_seen(two: Runtime) -> None:
    class WhenTraining(Dropped):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if self.training else x * self.weight

    layers = nn.Sequential(*(WhenTraining("python") for _ in range(6)))
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plans(6, 1)["one layer a stage"])
    model = RoundPipe(layers.eval(), runtime=two, model_run_config=config)
    assert call(model, layers) == (12.0, [12.0] * 6)
    model.train()

    for _ in range(3):
        loss, sums = call(model, layers)

        kept = round(torch.tensor(loss / 12).log2().item())
        assert sorted(sums) == sorted([loss] * kept + [0.0] * (6 - kept))
