"""`num_microbatch="auto"`: chosen once with the plan, kept, logged, and the same as that number given."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from rp_engine.planning.pricing import Pricing
from rp_sched import LayerCost, Limits, counts_of, fastest_count
from torch import Tensor, nn

AUTO = RoundPipeRunConfig(num_microbatch="auto")
Make = Callable[..., RoundPipe]


@pytest.fixture
def make() -> Iterator[Make]:
    # Calls that leave outputs in microbatches may still read a model's weights when they return.
    made: list[RoundPipe] = []
    with Runtime("cpu:2") as runtime:

        def model(config: RoundPipeRunConfig | None = AUTO, layers: int = 4) -> RoundPipe:
            torch.manual_seed(0)
            row = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
            made.append(RoundPipe(row, model_run_config=config, runtime=runtime))
            return made[-1]

        yield model


def step(model: RoundPipe, batch: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    return model.forward_backward((torch.randn(batch, 8, generator=generator),), loss_fn=summed, label=None)


def summed(outputs: Tensor, label: None) -> Tensor:
    del label
    return outputs.square().sum()


def counted(model: RoundPipe, batch: int) -> int:
    """In how many microbatches a batch goes through the model."""
    with torch.no_grad():
        found = model(torch.ones(batch, 8), roundpipe_run_config=RoundPipeRunConfig(merge_output=False))
    found.synchronize()
    return len(found)


def test_the_least_number_that_is_about_the_fastest_is_chosen() -> None:
    def problem(count: int) -> tuple[list[LayerCost], Limits]:
        # Launching makes many microbatches slow; memory makes few of them recompute.
        cost = LayerCost(64 / count, kept_bytes=6400 // count, forward_launch_ms=1, backward_launch_ms=1)
        return [cost] * 3, Limits(device_memory_bytes=9000)

    found = fastest_count(counts_of(64), problem, devices=1, mode="fused")
    assert found is not None
    assert found[0] == 4


def test_no_number_is_chosen_if_nothing_fits() -> None:
    problem = ([LayerCost(1.0, weight_bytes=10)], Limits(device_memory_bytes=8))
    assert fastest_count([1, 2], lambda _: problem, devices=1, mode="fused") is None


def test_it_is_chosen_once_kept_and_logged(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rp_engine.planning.planner")
    model = make()
    counts = [counted(model, batch) for batch in (12, 24, 12)]
    assert len(set(counts)) == 1
    (record,) = caplog.records
    assert f"{counts[0]} microbatches in each call of mode train, chosen for a batch of 12" in record.getMessage()


def test_a_later_batch_that_is_smaller_gets_fewer_without_a_warning(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A device so small that two samples are a microbatch.
    monkeypatch.setattr(Pricing, "_device_bytes", lambda _: 2000)
    model = make()
    assert counted(model, 12) == 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert counted(model, 3) == 3
    assert counted(model, 9) == 6


def test_less_memory_takes_more_microbatches(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted(make(), 64) == 1
    monkeypatch.setattr(Pricing, "_device_bytes", lambda _: 8000)
    assert 1 < counted(make(), 64) < 64


def test_numbers_are_those_of_the_number_given(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pricing, "_device_bytes", lambda _: 2000)
    model = make()
    loss = step(model)
    model.synchronize()
    chosen = model.engine.planner.chosen["fused"]
    given = make(RoundPipeRunConfig(num_microbatch=chosen))
    assert chosen > 1
    assert step(given).equal(loss)
    given.synchronize()
    grads = [[parameter.grad for parameter in one.model.parameters()] for one in (model, given)]
    assert all(mine.equal(theirs) for mine, theirs in zip(*grads, strict=True))


def test_on_cpu_devices_the_default_is_one_more_than_devices(make: Make) -> None:
    assert counted(make(None), 12) == 3


def test_with_a_plan_it_is_one_more_than_devices(make: Make) -> None:
    from roundpipe import ModelExecutePlan

    plan = ModelExecutePlan([range(0, 4)])
    assert counted(make(RoundPipeRunConfig(num_microbatch="auto", execute_plan=plan)), 12) == 3


def test_a_call_may_ask_for_it_and_a_given_number_stays_exact(make: Make) -> None:
    model = make(RoundPipeRunConfig(num_microbatch=5))
    assert counted(model, 12) == 5
    with torch.no_grad():
        model(torch.ones(12, 8), roundpipe_run_config=AUTO)
    assert model.engine.planner.chosen.keys() == {"train"}
    assert counted(model, 12) == 5


def test_outputs_in_microbatches_keep_theirs(make: Make) -> None:
    first = make(RoundPipeRunConfig(num_microbatch=4, merge_output=False))
    second = make()
    with torch.no_grad():
        found = second(first(torch.ones(12, 8)), roundpipe_run_config=RoundPipeRunConfig(merge_output=False))
    assert len(found) == 4
    assert second.num_microbatch is None
    assert second.engine.planner.chosen == {}


def test_words_other_than_auto_are_refused() -> None:
    with pytest.raises(TypeError, match="num_microbatch must be an int, 'auto' or None, but is 'some' instead"):
        RoundPipeRunConfig(num_microbatch="some")  # type: ignore[arg-type]
