"""Hooks of layers run on the copies of devices, and run again where a layer is recomputed or examined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain import assert_near, gradients, plans, square_error, twin
from roundpipe import ImpureLayer, RoundPipe, RoundPipeRunConfig, Runtime, doing_recompute
from torch import nn

pytestmark = pytest.mark.usefixtures("small_departures")

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
COUNT = 4


def row() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))


REGISTER: dict[str, Callable[[nn.Module, Callable[..., None]], object]] = {
    "pre": lambda module, hook: module.register_forward_pre_hook(hook),
    "forward": lambda module, hook: module.register_forward_hook(hook),
    "with arguments": lambda module, hook: module.register_forward_hook(hook, with_kwargs=True),
    "always": lambda module, hook: module.register_forward_hook(hook, always_call=True),
}


def noted(layers: nn.Sequential, kind: str) -> Counter[bool]:
    """How often hooks of a layer and of one inside a layer ran, by whether a layer was being recomputed."""
    seen = Counter[bool]()

    def hook(*_: object) -> None:
        seen[doing_recompute()] += 1

    for module in (layers[0], layers[1][1]):
        REGISTER[kind](module, hook)
    return seen


@pytest.mark.pairwise
@pytest.mark.usefixtures("samples_first")
@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("plan", plans(3, COUNT))
@pytest.mark.parametrize("is_apart", [False, True])
def test_a_hook_that_asks_whether_a_layer_is_recomputed_acts_once_for_each_microbatch(
    runtime: Runtime, kind: str, plan: str, is_apart: bool
) -> None:
    layers = row()
    seen = noted(layers, kind)
    config = RoundPipeRunConfig(num_microbatch=COUNT, execute_plan=plans(3, COUNT)[plan])
    model = RoundPipe(layers, runtime=runtime, model_run_config=config)

    for _ in range(3):
        if is_apart:
            model(X).sum().backward()
        else:
            model.forward_backward((X,), loss_fn=lambda outputs, _: outputs.sum())
        model.synchronize()

    assert seen[False] == 3 * 2 * COUNT


@pytest.mark.usefixtures("samples_first")
def test_a_layer_runs_once_more_in_its_first_call_and_never_later_without_gradients() -> None:
    layers = row()
    seen = noted(layers, "forward")

    with Runtime("cpu:1") as one:
        model = RoundPipe(layers, runtime=one, model_run_config=RoundPipeRunConfig(num_microbatch=COUNT))
        model.forward_backward((X,), loss_fn=lambda outputs, _: outputs.sum())
        model.zero_grad()
        first = seen.copy()
        with torch.no_grad():
            model(X)

    assert 0 < first[True] <= 2 * (COUNT + 1)
    assert seen[False] == 2 * first[False]
    assert seen[True] == first[True]


@pytest.mark.parametrize("is_before", [False, True])
def test_backward_hooks_act_once_for_each_microbatch(two: Runtime, is_before: bool) -> None:
    layers = row()
    seen: list[bool] = []
    noting: Callable[..., None] = lambda *_: seen.append(doing_recompute())  # noqa: E731
    register = layers[0].register_full_backward_pre_hook if is_before else layers[0].register_full_backward_hook
    register(noting)
    model = RoundPipe(layers, runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=COUNT))

    for _ in range(2):
        model.forward_backward((X,), loss_fn=lambda outputs, _: outputs.sum())
        model(X).sum().backward()
    model.synchronize()

    assert seen == [False] * 4 * COUNT


def test_hooks_that_change_inputs_and_outputs_give_the_gradients_of_plain_pytorch(runtime: Runtime) -> None:
    truth = row()
    truth[0].register_forward_hook(lambda _, args, output: output * 2 + args[0])
    truth[1].register_forward_pre_hook(lambda _, args: (args[0].sin(),))
    truth[2].register_full_backward_hook(lambda _, grads, __: (grads[0] * 0.5,))
    layers = twin(truth)
    model = RoundPipe(layers, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=COUNT))

    for _ in range(2):
        square_error(truth(X), X).backward()
        model.forward_backward((X,), label=X, loss_fn=square_error)
    model.synchronize()

    assert_near(gradients(layers), gradients(truth), 1e-4)


def test_a_hook_gets_the_copy_on_a_device_and_what_it_leaves_there_is_refused(two: Runtime) -> None:
    layers = row()
    copies: list[nn.Module] = []

    def leaves(module: nn.Module, _: Any, output: torch.Tensor) -> None:
        copies.append(module)
        module.last = output.detach()  # pyright: ignore[reportAttributeAccessIssue]

    layers[0].register_forward_hook(leaves)
    model = RoundPipe(layers, runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=COUNT))

    with pytest.raises(ImpureLayer, match="changed its attribute last in forward"):
        model.forward_backward((X,), loss_fn=lambda outputs, _: outputs.sum())

    assert type(copies[0]) is nn.Linear
    assert all(copy is not layers[0] for copy in copies)
