"""Code that reads ``.grad`` of a wrapped module's own parameters, where it is None, is told what to do instead."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import roundpipe
import torch
from plain import batch, mlp, square_error
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, TrainingWarning
from roundpipe import wrap_model_to_roundpipe as wrap
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

TWO = RoundPipeRunConfig(num_microbatch=2)
READ = r"own parameter was read.*model\.step\(lambda: \(clip_grad_norm_\(model\.optim_parameters\(\), 1\.0\)"
DROPPED = r"zero_grad\(\) of a module that is wrapped.*drops no gradients.*zero_grad\(\) of the wrapped model"
KINDS = ("row", "apart")


class Scaled(nn.Module):
    """A model that is taken apart, with a parameter of its own outside of all parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.inner(x)


def made(kind: str, runtime: Runtime) -> tuple[nn.Module, Any]:
    net = mlp() if kind == "row" else Scaled()
    if kind == "row":
        return net, RoundPipe(net, runtime=runtime, model_run_config=TWO)
    return net, wrap(net, runtime=runtime, lower_threshold=1, model_run_config=TWO)


def call(model: Any) -> None:
    x, y = batch(6)
    square_error(model(x), y).backward()


def clips(net: nn.Module) -> object:
    return clip_grad_norm_(net.parameters(), 1e-3)


def norms(net: nn.Module) -> object:
    return get_total_norm([each.grad for each in net.parameters() if each.grad is not None])


READS: dict[str, Callable[[nn.Module], object]] = {"clip": clips, "norm": norms}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", READS)
def test_reading_gradients_of_the_wrapped_module_is_told_where_they_are_not(two: Runtime, how: str, kind: str):
    net, model = made(kind, two)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        READS[how](net)
        call(model)
        net.float().share_memory()

    with pytest.warns(TrainingWarning, match=READ) as told:
        _ = READS[how](net), READS[how](net)

    assert [one.filename for one in told] == [__file__]


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_step_function_it_is_told_unless_the_gradients_were_dropped(two: Runtime, kind: str):
    net, model = made(kind, two)
    optimizer = roundpipe.optim.SGD(model.optim_parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(model)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad(), net.zero_grad()), is_async=False)
        clips(net)
    call(model)

    with pytest.warns(TrainingWarning, match=READ):
        model.step(lambda: (clips(net), optimizer.step(), optimizer.zero_grad()), is_async=False)
    call(model)
    with pytest.warns(TrainingWarning, match=DROPPED):
        model.step(lambda: (optimizer.step(), net.zero_grad()), is_async=False)


def test_gradients_that_are_shown_are_clipped_and_dropped_without_a_word(two: Runtime):
    net, model = made("row", two)
    net.append(nn.Linear(3, 3)).requires_grad_(True)
    truth = copy.deepcopy(net)
    optimizer = roundpipe.optim.SGD(model.optim_parameters(), lr=0.1)
    plain = torch.optim.SGD(truth.parameters(), lr=0.1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for is_dropped in (False, True):
            call(model)
            call(truth)
            model.synchronize()
            assert torch.isclose(clip_grad_norm_(net.parameters(), 1.0), clip_grad_norm_(truth.parameters(), 1.0))
            if is_dropped:
                net.zero_grad()
                truth.zero_grad()
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_dropped)
            plain.step()
            plain.zero_grad()
        model.synchronize()

    for found, wanted in zip(net.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_grad_of_the_wrapped_module_says_that_it_drops_nothing(two: Runtime, kind: str):
    net, model = made(kind, two)
    optimizer = roundpipe.optim.SGD(model.optim_parameters(), lr=0.1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for is_async in (True, False):
            net.zero_grad()
            call(model)
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
        call(model)
        model.zero_grad()
        net.zero_grad()
    call(model)
    with pytest.warns(TrainingWarning, match=DROPPED):
        net.zero_grad()


def test_gradients_that_are_consumed_are_told_so(two: Runtime):
    net = mlp()
    model = RoundPipe(net, runtime=two, step_in_backward=True, model_run_config=TWO)
    optimizer = roundpipe.optim.SGD(model.optim_parameters(), lr=0.1)
    x, y = batch(6)
    model.forward_backward((x,), label=y, loss_fn=square_error, optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.zero_grad()

    with pytest.warns(TrainingWarning, match="consumed as they arrive"):
        clips(net)


def test_a_model_that_is_gone_says_nothing_and_its_parameters_are_torchs():
    with Runtime("cpu:1") as one:
        net, model = made("row", one)
        call(model)
        del model
    gc.collect()
    weight = net[0].weight

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert weight.grad is None
        assert type(nn.Parameter(weight)) is type(weight) is nn.Parameter
        weight.grad = torch.ones_like(weight)
        del weight.grad
        assert weight.grad is None
        assert torch.compile(lambda: weight.grad is None, backend="eager", fullgraph=True)()
