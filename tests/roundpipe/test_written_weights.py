"""Weights that the user's own code writes between calls, around steps whose results are not in them yet."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import (
    Dammed,
    Scaled,
    assert_near,
    batch,
    gradients,
    mlp,
    plans,
    square_error,
    train_call,
    twin,
)
from roundpipe import RoundPipe, RoundPipeError, RoundPipeRunConfig, Runtime, TrainingWarning, save_checkpoint
from roundpipe import optim as optimizers
from roundpipe import wrap_model_to_roundpipe as wrap
from rp_engine.engine import whole_model
from torch import nn

LOST = r"weights of model .* \(1 of them, the first in layer 2\) were written while .* call model.synchronize\(\)"


def call(model: RoundPipe) -> torch.Tensor:
    x, y = batch(6)
    loss = model.forward_backward((x.to(model.model[0].weight.dtype),), label=y, loss_fn=as_fp32)  # type: ignore[index]
    assert isinstance(loss, torch.Tensor)
    return loss


def as_fp32(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return square_error(outputs.float(), label)


def quarter(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.fill_(0.25)


def quarter_past_counters(weight: torch.Tensor) -> None:
    weight.data.fill_(0.25)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("options", "write"),
    [
        ({"double_buffer": True}, quarter),
        ({"double_buffer": False}, quarter),
        ({"master": "split"}, quarter),
        ({"double_buffer": True}, quarter_past_counters),
        ({"master": "split"}, quarter_past_counters),
    ],
    ids=["two blocks", "one block", "halves", "two blocks, past counters", "halves, past counters"],
)
def test_what_is_written_before_the_step_under_way_is_published_stays(
    two: Runtime, options: dict[str, Any], write: Callable[[torch.Tensor], None]
) -> None:
    layers = mlp().bfloat16()
    model = RoundPipe(layers, torch.float32, runtime=two, **options)
    optimizer = optimizers.SGD(model.optim_parameters(), lr=0.1)
    may_end = threading.Event()

    def slow() -> None:
        optimizer.step()
        optimizer.zero_grad()
        assert may_end.wait(60)

    call(model)
    model.step(slow)
    call(model)
    # Publishes the first one's result before it begins, once that has ended.
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    before = layers[0].weight.detach().clone()
    write(layers[2].weight)
    may_end.set()
    two.optimizer.wait()
    with pytest.warns(TrainingWarning, match=LOST):
        call(model)
    model.synchronize()

    assert torch.equal(layers[2].weight, torch.full_like(layers[2].weight, 0.25))
    assert not torch.equal(layers[0].weight, before)
    masters = dict(zip(layers.parameters(), model.optim_parameters(), strict=True))
    assert torch.equal(masters[layers[2].weight].detach().float(), torch.full(layers[2].weight.shape, 0.25))


def clipped(layers: Any, *, most: float) -> None:
    with torch.no_grad():
        layers[2].weight.clamp_(-most, most)


@pytest.mark.parametrize("is_async", [False, True])
def test_weights_that_are_clipped_after_each_step_train_as_in_plain_pytorch(two: Runtime, is_async: bool) -> None:
    layers = mlp()
    plain = copy.deepcopy(layers)
    model = RoundPipe(layers, runtime=two)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    of_plain = torch.optim.SGD(plain.parameters(), lr=0.1)
    x, y = batch(6)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrainingWarning)
        for _ in range(4):
            loss = call(model)
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
            model.synchronize()
            clipped(layers, most=0.1)
            expected = square_error(plain(x), y)
            expected.backward()
            of_plain.step()
            of_plain.zero_grad()
            clipped(plain, most=0.1)
            torch.testing.assert_close(loss, expected.detach())


def test_clipping_what_an_asynchronous_step_has_not_reached_is_told(two: Runtime) -> None:
    layers = mlp()
    model = RoundPipe(layers, runtime=two)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    for _ in range(2):
        call(model)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    clipped(layers, most=0.1)
    with pytest.warns(TrainingWarning, match=LOST):
        call(model)


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_step_function_that_writes_weights_is_told_that_they_are_replaced(
    two: Runtime, is_counted: bool
) -> None:
    layers = mlp()
    other = copy.deepcopy(layers)
    found: list[torch.Tensor] = []
    for row, most in ((layers, 0.0), (other, None)):
        model = RoundPipe(row, runtime=two, name="m")
        optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)

        def update(optimizer: Any = optimizer, row: Any = row, most: float | None = most) -> None:
            optimizer.step()
            optimizer.zero_grad()
            if most is not None and is_counted:
                clipped(row, most=most)
            elif most is not None:
                row[2].weight.data.clamp_(-most, most)

        call(model)
        told = (
            warnings.catch_warnings()
            if most is None
            else pytest.warns(TrainingWarning, match="'m' wrote its weights")
        )
        with told:
            model.step(update, is_async=False)
        found.append(call(model))
    assert torch.equal(*found)


def test_loading_weights_between_asynchronous_steps_is_no_mistake(two: Runtime) -> None:
    layers = mlp()
    model = RoundPipe(layers, runtime=two)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    start = copy.deepcopy(layers.state_dict())
    first = call(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrainingWarning)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        model.load_state_dict(start)
        assert torch.equal(call(model), first)


def past_counters(layers: Any) -> None:
    layers[2].weight.data.clamp_(-0.1, 0.1)


def one_number(layers: Any) -> None:
    layers[0].bias.data[0] = 1.5


def stepped(model: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)


def test_a_backward_through_weights_that_were_written_past_counters_before_its_forward(two: Runtime) -> None:
    found: list[torch.Tensor] = []
    for write in (past_counters, partial(clipped, most=0.1)):
        layers = mlp()
        model = RoundPipe(layers, runtime=two)
        optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
        x, y = batch(6)
        for _ in range(3):
            square_error(model(x), y).backward()
            stepped(model, optimizer)
            write(layers)
        found.append(call(model))
    assert torch.equal(*found)


def test_writes_past_counters_are_seen_while_a_checkpoint_is_read(
    two: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    may_end, read = threading.Event(), whole_model.run_model_read
    layers = mlp()
    model = RoundPipe(layers, runtime=two, double_buffer=False)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    call(model)
    stepped(model, optimizer)
    monkeypatch.setattr(whole_model, "run_model_read", lambda *how: (read(*how), may_end.wait(1)))
    saving = save_checkpoint(tmp_path / "saved", model, optimizer, wait=False)
    past_counters(layers)
    # It waits for the reader. Steps come after that, and would take the place of what was written.
    with pytest.warns(TrainingWarning, match="past torch's version counters"):
        call(model)
    may_end.set()
    saving.wait()


def test_loading_some_weights_keeps_what_was_written_to_others_past_counters(two: Runtime) -> None:
    layers = mlp()
    model = RoundPipe(layers, runtime=two)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    call(model)
    stepped(model, optimizer)
    past_counters(layers)
    kept = layers[2].weight.detach().clone()
    with pytest.warns(TrainingWarning, match="past torch's version counters"):
        model.load_state_dict({"0.bias": layers[0].bias.detach().clone()}, strict=False)
    optimizer.param_groups[0]["lr"] = 0.0
    call(model)
    stepped(model, optimizer)
    assert torch.equal(layers[2].weight, kept)


def test_weights_are_no_others_under_another_default_device(two: Runtime) -> None:
    layers = mlp()
    with torch.device("meta"):
        model = RoundPipe(layers, runtime=two)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrainingWarning)
        call(model)


@pytest.mark.few(1)
@pytest.mark.parametrize("write", [past_counters, one_number])
@pytest.mark.parametrize(
    "options",
    [{}, {"double_buffer": False}, {"pin_model": "off"}, {"pin_model": "register"}],
    ids=["two blocks", "one block", "scattered", "registered"],
)
def test_writes_past_version_counters_count_and_are_told_once(
    two: Runtime, options: dict[str, Any], write: Callable[[Any], None]
) -> None:
    layers = mlp()
    plain = copy.deepcopy(layers)
    model = RoundPipe(layers, runtime=two, **options)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    of_plain = torch.optim.SGD(plain.parameters(), lr=0.1)
    x, y = batch(6)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            loss = call(model)
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            write(layers)
            expected = square_error(plain(x), y)
            expected.backward()
            of_plain.step()
            of_plain.zero_grad()
            write(plain)
            torch.testing.assert_close(loss, expected.detach())
    words = [str(one.message) for one in told if issubclass(one.category, TrainingWarning)]
    assert len(words) == 1
    assert "past torch's version counters" in words[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("frozen", [None, False, True], ids=["", "unfrozen", "frozen"])
@pytest.mark.parametrize("waits", [False, True])
def test_writes_past_counters_count_outside_of_parts_and_where_layers_are_frozen(
    two: Runtime, frozen: bool | None, waits: bool
) -> None:
    net = Scaled()
    net.inner[0].requires_grad_(frozen is not False)
    plain, x, y = copy.deepcopy(net), *batch(6)
    model = wrap(net, runtime=two, lower_threshold=1)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    of_plain = torch.optim.SGD([each for each in plain.parameters() if each.requires_grad], lr=0.1)

    def step() -> None:
        square_error(model(x), y).backward()
        square_error(plain(x), y).backward()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        of_plain.step()
        plain.zero_grad()

    def write() -> None:
        for each in (net, plain):
            each.scale.data.mul_(0.5)
            each.inner[2].weight.data.mul_(0.5)
            if frozen is not None:
                each.inner[0].requires_grad_(not frozen)
        if waits:
            model.synchronize()

    write()
    with pytest.warns(TrainingWarning, match="past torch's version counters"):
        step()
    for _ in range(2):
        write()
        step()

    for found, wanted in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


class Dam(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Dammed.apply(x)


def dammed(runtime: Runtime, name: str) -> tuple[nn.Sequential, RoundPipe]:
    """A row whose first weight is frozen, and whose backward gets no further than its third layer until opened."""
    Dammed.opened.clear()
    layers = mlp()
    layers[0].weight.requires_grad_(False)
    layers[3] = Dam()
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plans(5, 1)[name])
    return layers, RoundPipe(layers, runtime=runtime, model_run_config=config)


@pytest.mark.parametrize(
    ("place", "write"),
    [("0.weight", quarter), ("0.bias", quarter), ("2.weight", quarter), ("2.weight", quarter_past_counters)],
)
def test_weights_that_are_written_while_a_backward_still_reads_them_are_an_error(
    two: Runtime, place: str, write: Callable[[torch.Tensor], None]
) -> None:
    layers, model = dammed(two, "one layer a stage")
    inputs, label = batch(6)

    model.forward_backward((inputs,), label=label, loss_fn=square_error)
    write(layers.get_parameter(place))
    Dammed.opened.set()

    with pytest.raises(
        RoundPipeError, match=rf"weights of layer {place[0]} were written while the backward .* read"
    ):
        model.synchronize()
    model.zero_grad()
    model.forward_backward((inputs,), label=label, loss_fn=square_error)
    model.synchronize()
    truth = twin(layers)
    for each in truth.parameters():
        each.grad = None
    train_call(truth, inputs, label, microbatches=1)
    assert_near(gradients(layers), gradients(truth))


def test_weights_that_no_backward_reads_any_more_may_be_written(two: Runtime) -> None:
    layers, model = dammed(two, "all fused")
    truth = twin(layers)
    inputs, label = batch(6)

    model.forward_backward((inputs,), label=label, loss_fn=square_error)
    quarter(layers[0].bias)
    Dammed.opened.set()
    model.synchronize()

    train_call(truth, inputs, label, microbatches=1)
    assert_near(gradients(layers), gradients(truth))
