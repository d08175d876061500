"""Tiny models of every family, trained with graphs on CPU devices: the numbers of runs by Python."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable

import pytest
import torch
from comparison import Outcome
from models_table import IS_NO_ROW
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, wrap_model_to_roundpipe
from rp_engine.execution.graphs.layer_graphs import LayerGraphs
from rp_sched import Plan
from test_families_on_devices import FAMILIES, batch_for, gradients
from torch import nn

# Layers with buffers, experts in a loop, and a plain one.
SAMPLE = ("GPT2LMHeadModel", "MixtralForCausalLM", "Qwen3ForCausalLM")
# Captured in the second call, tried in the third.
CALLS = 5


def trained(model: nn.Module, launch: str) -> list[Outcome]:
    """Loss and summed gradients after each of some calls."""
    batch = batch_for(model)
    with Runtime("cpu:1") as runtime, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = wrap_model_to_roundpipe(model, runtime=runtime)
        assert isinstance(wrapped, RoundPipe)
        # A plan of our own: while plans are tried, layers' times are taken, which graphs do not tell.
        plan = Plan(fused=range(len(wrapped.layer_costs())))
        config = RoundPipeRunConfig(num_microbatch=5, launch=launch, execute_plan=plan)
        found: list[Outcome] = []
        for call in range(CALLS):
            torch.manual_seed(call)
            loss = wrapped.forward_backward(input_kwargs=batch, run_config=config)
            wrapped.synchronize()
            found.append(gradients(model, loss))
    return found


def told_reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    told = [record.getMessage() for record in caplog.records]
    return [one.split("run without graphs: ")[1] for one in told if "run without graphs: " in one]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many replays there were."""
    count, plain = [0], LayerGraphs.replay

    def replay(self: LayerGraphs, *args: object) -> object:
        count[0] += 1
        return plain(self, *args)

    monkeypatch.setattr(LayerGraphs, "replay", replay)
    return lambda: count[0]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.nightly)
        for name in FAMILIES
        if name not in IS_NO_ROW
    ],
)
def test_a_row_has_the_numbers_of_runs_by_python(
    name: str, replays: Callable[[], int], caplog: pytest.LogCaptureFixture
) -> None:
    model = FAMILIES[name].build().train()
    if "labels" not in batch_for(model):
        pytest.skip("it has no loss of its own")
    try:
        expected = trained(copy.deepcopy(model), "eager")
    except (ValueError, RuntimeError, IndexError) as error:
        pytest.skip(f"it cannot be trained so: {error}")
    assert not replays()

    with caplog.at_level(logging.INFO, "rp_engine"):
        found = trained(model, "graphs")

    for one, other in zip(found, expected, strict=True):
        assert [name for name in other if not is_same(name, one[name], other[name])] == []
    assert replays() or told_reasons(caplog)


def is_same(name: str, found: torch.Tensor, expected: torch.Tensor) -> bool:
    """The bits are the same. What layers add to the gradient of tied weights may be added in another order."""
    if "embed" in name:
        return bool((found - expected).abs().max() <= 1e-6 * expected.abs().max())
    return torch.equal(found, expected)
