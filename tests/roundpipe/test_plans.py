"""Plans that users write or ask for run as they say, and are refused in words where they cannot."""

from __future__ import annotations

from typing import Any

import pytest
import rp_sched
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import assert_near, batch, gradients, mlp, square_error, train_call, twin
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, Runtime
from rp_sched import Plan, RoundRobin
from torch import nn


def recorded(model: RoundPipe, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kind and layers of each task that the model launches from now on."""
    seen: list[str] = []
    original = model.runtime.lanes[0].__class__.submit

    def submit(lane: Any, job: Any) -> Any:
        task = job._stage._task
        seen.append(f"{task.kind}{task.layers.start}:{task.layers.stop}")
        return original(lane, job)

    monkeypatch.setattr(type(model.runtime.lanes[0]), "submit", submit)
    return seen


FUSED = ModelExecutePlan([range(0, 2)], [range(2, 5), range(1, 2), range(0, 1)])
WHOLE = ModelExecutePlan([range(0, 1), range(1, 5)], [range(3, 5), range(0, 3)])


@pytest.mark.usefixtures("samples_first")
def test_a_plan_for_fused_calls_cuts_every_call_as_it_says(two: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RoundPipeRunConfig(execute_plan=FUSED, num_microbatch=2)
    model = RoundPipe(mlp(), runtime=two, model_run_config=config)
    seen = recorded(model, monkeypatch)
    x, y = batch(6)
    model.forward_backward((x,), None, y, square_error)
    assert seen == ["F0:2", "FB2:5", "B1:2", "B0:1"]
    seen.clear()
    square_error(model(x), y).backward()
    assert seen == ["F0:2", "F2:5", "B2:5", "B1:2", "B0:1"]
    seen.clear()
    with torch.no_grad():
        model(x)
    assert seen == ["F0:2", "F2:5"]


@pytest.mark.usefixtures("samples_first")
def test_a_plan_for_separate_calls_also_serves_calls_without_gradients(
    two: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = RoundPipe(mlp(), runtime=two, model_run_config=RoundPipeRunConfig(execute_plan=WHOLE))
    seen = recorded(model, monkeypatch)
    x, y = batch(6)
    square_error(model(x), y).backward()
    assert seen == ["F0:1", "F1:5", "B3:5", "B0:3"]
    seen.clear()
    with torch.no_grad():
        model(x)
    assert seen == ["F0:1", "F1:5"]


def test_the_schedulers_own_plan_serves_calls_without_gradients(two: Runtime) -> None:
    plan = Plan((range(5),), None, (range(2, 5), range(2)), backward_groups=(range(1), range(1, 2)))
    config = RoundPipeRunConfig(execute_plan=plan, num_microbatch=2)
    layers = mlp()
    model = RoundPipe(layers, runtime=two, model_run_config=config)
    x, _ = batch(6)
    with torch.no_grad():
        assert_near(model(x), layers(x))


@pytest.mark.parametrize("plan", [FUSED, WHOLE], ids=["fused", "whole"])
def test_numbers_do_not_depend_on_the_plan(runtime: Runtime, plan: ModelExecutePlan) -> None:
    layers = mlp()
    truth = twin(layers)
    config = RoundPipeRunConfig(execute_plan=plan, num_microbatch=3)
    model = RoundPipe(layers, runtime=runtime, model_run_config=config)
    x, y = batch(7)
    square_error(model(x), y).backward()
    square_error(truth(x), y).backward()
    if plan is FUSED:
        model.forward_backward((x,), None, y, square_error)
        train_call(truth, x, y, microbatches=3)
    model.synchronize()
    assert_near(gradients(layers), gradients(truth))


@pytest.mark.usefixtures("samples_first")
def test_a_plan_may_be_filled_in_step_by_step_and_given_for_one_call(
    two: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = RoundPipe(mlp(), runtime=two, model_run_config=RoundPipeRunConfig(execute_plan=FUSED))
    seen = recorded(model, monkeypatch)
    plan = ModelExecutePlan()
    assert repr(plan) == "ModelExecutePlan(fwd_plan=[], bwd_plan=[])"
    config = RoundPipeRunConfig(execute_plan=plan)
    plan.bwd_plan.append(range(5))
    x, y = batch(6)
    model.forward_backward((x,), None, y, square_error, run_config=config)
    assert seen == ["FB0:5"]


@pytest.mark.parametrize(
    ("plan", "run_type", "words"),
    [
        (ModelExecutePlan(), "infer", "0:3"),
        (ModelExecutePlan(), "fused", "first stage of bwd_plan"),
        (ModelExecutePlan([range(2)]), "infer", "add 2:3"),
        (ModelExecutePlan([range(4)]), "infer", "remove 3:4"),
        (ModelExecutePlan([range(0, 1), range(2, 3)]), "infer", "no stage runs layer 1"),
        (ModelExecutePlan([range(0, 2), range(1, 3)]), "infer", "layer 1 appears twice"),
        (ModelExecutePlan([range(3)]), "train", "backward must cover"),
        (ModelExecutePlan([range(3)], [range(0, 1), range(1, 3)]), "train", "from the last stage to the first"),
        (ModelExecutePlan([range(3)], [range(3)]), "fused", "remove"),
        (ModelExecutePlan([range(1)], [range(1, 2), range(1)]), "fused", "last layer"),
        (ModelExecutePlan([range(3)]), "eval", "'eval'"),
    ],
)
def test_a_plan_that_does_not_cover_the_model_is_refused_in_words(
    plan: ModelExecutePlan, run_type: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        plan.check_valid(3, run_type)


def test_calls_refuse_a_plan_that_does_not_cover_the_model_and_go_on(two: Runtime) -> None:
    model = RoundPipe(mlp(), runtime=two)
    x, y = batch(6)
    bad = RoundPipeRunConfig(execute_plan=ModelExecutePlan([range(0, 2)], [range(2, 4), range(0, 2)]))
    for call in (
        lambda: model(x, roundpipe_run_config=bad),
        lambda: model.forward_backward((x,), None, y, square_error, run_config=bad),
    ):
        with pytest.raises(rp_sched.InvalidPlan, match="5 layers"):
            call()
    model.forward_backward((x,), None, y, square_error)


def test_a_plan_of_anything_but_ranges_is_refused() -> None:
    with pytest.raises(TypeError, match="ranges"):
        ModelExecutePlan([(0, 3)]).check_valid(3, "infer")  # type: ignore[list-item]


# Plans that are made


def row(layers: int, width: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 7), st.sampled_from([4, 16, 64])), min_size=1, max_size=3),
    st.sampled_from(["infer", "train", "fused"]),
    st.one_of(st.none(), st.integers(1, 9)),
    st.sampled_from([1.0, 1.1, 3.0]),
)
def test_plans_made_for_any_models_are_valid_and_keep_the_wishes(
    sizes: list[tuple[int, int]], run_type: Any, min_stages: int | None, upper_threshold: float
) -> None:
    with Runtime("cpu:2") as runtime:
        models = [RoundPipe(row(*size), runtime=runtime) for size in sizes]
        made = ModelExecutePlan.auto(run_type, *models, min_stages=min_stages, upper_threshold=upper_threshold)
        plans = made if isinstance(made, tuple) else (made,)
        assert isinstance(made, tuple) == (len(models) > 1)
        for plan, (layers, _) in zip(plans, sizes, strict=True):
            plan.check_valid(layers, run_type)
        stages = sum(len(plan.fwd_plan) + (run_type == "fused") * len(plan.bwd_plan) for plan in plans)
        assert stages >= min(min_stages or 2, sum(layers for layers, _ in sizes))


def test_a_higher_threshold_gives_fewer_stages_and_a_lower_memory_limit_more(two: Runtime) -> None:
    model = RoundPipe(row(8, 16), runtime=two)

    def stages(**wishes: Any) -> int:
        return len(ModelExecutePlan.auto("infer", model, **wishes).fwd_plan)

    assert stages(upper_threshold=1.0) == 8
    assert stages(upper_threshold=4.0) == 2
    assert stages(upper_threshold=8.0, min_stages=1) == 1
    layer_gb = (16 * 16 + 16) * 4 / 1e9
    assert stages(upper_threshold=8.0, min_stages=1, model_memory_limit=4.2 * layer_gb) == 4


def test_models_that_are_planned_together_share_one_measure(two: Runtime) -> None:
    small, large = RoundPipe(row(8, 4), runtime=two), RoundPipe(row(4, 64), runtime=two)
    together = ModelExecutePlan.auto("infer", small, large)
    assert isinstance(together, tuple)
    assert [len(plan.fwd_plan) for plan in together] == [1, 4]
    assert len(ModelExecutePlan.auto("infer", small).fwd_plan) == 8


def test_a_made_plan_trains(runtime: Runtime) -> None:
    layers = mlp()
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime)
    plan = ModelExecutePlan.auto("fused", model)
    x, y = batch(6)
    config = RoundPipeRunConfig(execute_plan=plan, num_microbatch=2)
    model.forward_backward((x,), None, y, square_error, run_config=config)
    model.synchronize()
    train_call(truth, x, y, microbatches=2)
    assert_near(gradients(layers), gradients(truth))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"run_type": "eval"}, ValueError, "'eval'"),
        ({"models": ()}, ValueError, "at least one model"),
        ({"models": (nn.Linear(1, 1),)}, TypeError, "RoundPipe"),
        ({"min_stages": 0}, ValueError, "min_stages"),
        ({"upper_threshold": 0.5}, ValueError, "upper_threshold"),
        ({"model_memory_limit": -1.0}, ValueError, "model_memory_limit"),
        ({"model_memory_limit": 1e-9}, rp_sched.Infeasible, "layer"),
    ],
)
def test_wishes_that_cannot_be_are_refused(
    two: Runtime, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    models = arguments.pop("models", None)
    models = (RoundPipe(mlp(), runtime=two),) if models is None else models
    with pytest.raises(error, match=words):
        ModelExecutePlan.auto(arguments.pop("run_type", "fused"), *models, **arguments)


def test_models_on_different_devices_are_not_planned_together(two: Runtime) -> None:
    with Runtime("cpu:1") as other:
        models = RoundPipe(mlp(), runtime=two), RoundPipe(mlp(), runtime=other)
        with pytest.raises(ValueError, match="share a runtime"):
            ModelExecutePlan.auto("fused", *models)


def test_made_plans_follow_the_measured_times(two: Runtime) -> None:
    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2000):
                x = torch.tanh(x)
            return x

    # By its size the slow layer would be next to nothing.
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), Slow(), *(nn.Linear(4, 4) for _ in range(3)))
    model = RoundPipe(layers, runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    guessed = model.layer_costs("infer")
    assert guessed[3].forward_ms < guessed[0].forward_ms
    assert len(ModelExecutePlan.auto("infer", model, min_stages=1).fwd_plan) >= 6
    x, _ = batch(64)
    for _ in range(8):
        with torch.no_grad():
            model(x)
    measured = model.layer_costs("infer")
    assert measured[3].forward_ms > measured[0].forward_ms
    assert model.layer_costs("fused") == guessed
    wanted = rp_sched.plan(measured, devices=2, microbatches=2, mode="infer", strategy=RoundRobin(min_stages=1))
    assert tuple(ModelExecutePlan.auto("infer", model, min_stages=1).fwd_plan) == wanted.forward
