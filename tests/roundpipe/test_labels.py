"""Labels and inputs that are no dicts of tensors: split as tensors are, or refused at the call."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import rp_batch
import torch
from plain import assert_near, batch, gradients, mlp, square_error, twin
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from torch import nn
from transformers import BatchEncoding


class AttrDict(dict[str, Any]):
    """A dict with its items as attributes."""

    __getattr__ = dict.__getitem__


class Rows:
    """An own class."""

    def __init__(self, y: Any) -> None:
        self.y = y


LABELS: dict[str, Callable[[torch.Tensor], Any]] = {
    "array": lambda y: y.numpy(),
    "array in a dict": lambda y: {"y": y.numpy()},
    "UserDict": lambda y: UserDict(y=y),
    "BatchEncoding": lambda y: BatchEncoding({"y": y}),
    "AttrDict": lambda y: AttrDict(y=y),
    "array in an AttrDict": lambda y: AttrDict(y=y.numpy()),
    "SimpleNamespace": lambda y: SimpleNamespace(y=y),
}


def y_of(label: Any) -> torch.Tensor:
    """The tensor in any of these."""
    if isinstance(label, SimpleNamespace):
        return label.y
    return torch.as_tensor(label["y"] if hasattr(label, "keys") else label)


def model_of(layers: nn.Module, runtime: Runtime, count: int) -> RoundPipe:
    """A model with this number of microbatches."""
    return RoundPipe(layers, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=count))


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [1, 2, 6])
@pytest.mark.parametrize("kind", LABELS)
def test_a_label_of_any_kind_is_split_like_the_input(two: Runtime, kind: str, count: int) -> None:
    layers = mlp()
    truth = twin(layers)
    model = model_of(layers, two, count)
    x, y = batch(6)

    loss = model.forward_backward(
        (x,), label=LABELS[kind](y), loss_fn=lambda out, label: square_error(out, y_of(label).to(out.device))
    )
    model.synchronize()

    wanted = square_error(truth(x), y)
    wanted.backward()
    assert_near(loss, wanted.detach())
    assert_near(gradients(layers), gradients(truth))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", LABELS)
def test_an_input_of_any_kind_is_split(two: Runtime, kind: str) -> None:
    class Open(nn.Module):
        def forward(self, held: Any) -> torch.Tensor:
            assert type(held) is type(given)
            return y_of(held)

    layers = mlp()
    truth = twin(layers)
    x = batch(6)[0]
    given = LABELS[kind](x)
    model = model_of(nn.Sequential(Open(), *layers), two, 3)

    assert_near(model(given), truth(x))


@pytest.mark.parametrize("value", [[1], (1,)], ids=["list", "tuple"])
@pytest.mark.parametrize("hide", [Rows, lambda y: {"deep": Rows([y])}])
def test_a_label_that_cannot_be_split_is_refused_at_the_call_with_its_path(
    two: Runtime, hide: Callable[[Any], Any], value: Any
) -> None:
    model = model_of(mlp(), two, 2)
    x, y = batch(6)
    label = hide(type(value)([y]))

    with pytest.raises(
        rp_batch.SplitError, match=r"^label.*a Rows with a Tensor of shape \(6, 3\) at \.y.*split_label"
    ):
        model.forward_backward((x,), label=label, loss_fn=square_error)


def test_a_spec_gives_every_microbatch_the_whole_object(two: Runtime) -> None:
    x, y = batch(6)
    model = model_of(mlp(), two, 2)
    config = RoundPipeRunConfig(split_label=rp_batch.Replicate())
    seen: list[Any] = []
    label = Rows(y)

    def loss_fn(out: torch.Tensor, held: Rows) -> torch.Tensor:
        seen.append(held)
        return out.square().sum()

    model.forward_backward((x,), label=label, loss_fn=loss_fn, run_config=config)

    assert len(seen) == 2
    assert all(held is label for held in seen)


def test_an_array_may_be_written_after_the_call_that_took_it(two: Runtime) -> None:
    class Open(nn.Module):
        def forward(self, array: Any, linear: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(array).to(linear) * linear

    layers = nn.Sequential(Open(), nn.Linear(4, 3))
    truth: Any = twin(layers)
    model = model_of(layers, two, 2)
    x, y = batch(6)
    x.requires_grad_()
    array = numpy.ones((6, 4), numpy.float32)

    out = model(array, x)
    array[:] = numpy.nan
    square_error(out, y).backward()
    model.synchronize()

    square_error(truth[1](truth[0](numpy.ones((6, 4), numpy.float32), x)), y).backward()
    assert_near(gradients(layers), gradients(truth))
