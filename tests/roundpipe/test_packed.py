"""Packed outputs: left in microbatches on the host without waiting, and given on to another model."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import rp_batch
import torch
from plain import PLAN_NAMES, assert_near, batch, gradients, mlp, plans, square_error, twin
from roundpipe import RoundPipe, RoundPipePackedData, RoundPipeRunConfig, Runtime
from rp_batch import FewerParts
from torch import nn

PACKED = RoundPipeRunConfig(num_microbatch=3, merge_output=False)


def top() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


class Chain:
    """Two models on one runtime, and the same two in plain PyTorch."""

    def __init__(self, runtime: Runtime, above: nn.Module | None = None, **settings: Any) -> None:
        self.bottom, self.top = mlp(seed=1), above or top()
        self.bottom_true, self.top_true = twin(self.bottom), twin(self.top)
        self.first = RoundPipe(self.bottom, runtime=runtime, model_run_config=PACKED)
        config = RoundPipeRunConfig(**{"num_microbatch": 3, **settings})
        self.second = RoundPipe(self.top, runtime=runtime, model_run_config=config)

    def assert_gradients(self, tolerance: float = 1e-5) -> None:
        self.first.synchronize()
        self.second.synchronize()
        assert_near(gradients(self.bottom), gradients(self.bottom_true), tolerance, "bottom")
        assert_near(gradients(self.top), gradients(self.top_true), tolerance, "top")


# A list of microbatches


def test_outputs_stay_in_microbatches_that_can_be_counted_indexed_and_walked_through(runtime: Runtime) -> None:
    layers = mlp()
    model = RoundPipe(layers, runtime=runtime, model_run_config=PACKED)
    x, _ = batch(7)
    packed = model(x)
    assert isinstance(packed, RoundPipePackedData)
    assert isinstance(packed, rp_batch.Parts)
    packed.synchronize()
    assert len(packed) == len(packed.transfer_event) == 3
    assert packed.sizes == (3, 2, 2)
    wanted = layers(x).split([3, 2, 2])
    assert_near(list(packed), wanted)
    assert_near(packed[1], wanted[1])
    assert_near(rp_batch.merge(packed), layers(x))
    assert all(part.device.type == "cpu" and part.requires_grad for part in packed)


def test_a_packed_output_is_not_waited_for(two: Runtime) -> None:
    model = RoundPipe(mlp(), runtime=two, model_run_config=PACKED)
    x, _ = batch(6)
    with torch.no_grad():
        packed = model(x)
        events = [here for here, _ in packed.transfer_event]
        # A virtual device moves nothing before somebody waits for it.
        assert not any(event.query() for event in events)
        assert all(part.isnan().all() for part in packed)
        packed.synchronize()
        assert all(event.query() for event in events)
        assert not any(part.isnan().any() for part in packed)


def test_fused_calls_return_packed_outputs_too(runtime: Runtime) -> None:
    layers = mlp()
    model = RoundPipe(layers, runtime=runtime, model_run_config=PACKED)
    x, y = batch(7)
    _, packed = model.forward_backward(input_args=(x,), label=y, loss_fn=square_error, return_outputs=True)
    packed.synchronize()
    assert packed.sizes == (3, 2, 2)
    assert_near(torch.cat(list(packed)), layers(x))
    assert not any(part.requires_grad for part in packed)


def test_a_backward_through_a_packed_output_is_that_of_plain_pytorch(runtime: Runtime) -> None:
    layers = mlp()
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime, model_run_config=PACKED)
    x, y = batch(7)
    packed = model(x)
    packed.synchronize()
    square_error(torch.cat(list(packed)), y).backward()
    model.synchronize()
    square_error(truth(x), y).backward()
    assert_near(gradients(layers), gradients(truth))


class Several(nn.Module):
    """Outputs a tree: what is trained, an integer, None, and the batch's size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"y": self.linear(x), "rank": x.detach().argmax(1), "none": None, "size": len(x)}


class Joined(nn.Module):
    """Takes such a tree, and perhaps something beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, tree: dict[str, Any], beside: torch.Tensor | None = None, *, add: float = 0.0) -> Any:
        assert tree["none"] is None
        assert tree["size"] == len(tree["y"])
        assert tree["rank"].dtype == torch.int64
        out = self.linear(tree["y"]) + tree["rank"][:, None] + add
        return out if beside is None else out * beside


# From model to model


@pytest.mark.parametrize("plan_name", PLAN_NAMES)
def test_a_packed_output_feeds_another_model_in_one_call(runtime: Runtime, plan_name: str) -> None:
    chain = Chain(runtime, execute_plan=plans(3, 3)[plan_name])
    for seed in range(2):
        x, y = batch(7, seed)
        packed = chain.first(x)
        loss = chain.second.forward_backward(input_args=(packed,), label=y, loss_fn=square_error)
        loss_true = square_error(chain.top_true(chain.bottom_true(x)), y)
        loss_true.backward()
        assert_near(loss, loss_true)
    chain.assert_gradients()


@pytest.mark.pairwise
@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("plan_name", PLAN_NAMES)
def test_gradients_flow_from_the_second_model_to_the_first(runtime: Runtime, plan_name: str, grain: Any) -> None:
    chain = Chain(runtime, execute_plan=plans(3, 3)[plan_name], recompute_grain=grain)
    x, y = batch(7)
    x_true = x.clone().requires_grad_()
    x.requires_grad_()
    square_error(chain.second(chain.first(x)), y).backward()
    square_error(chain.top_true(chain.bottom_true(x_true)), y).backward()
    chain.assert_gradients()
    assert_near(x.grad, x_true.grad)


def test_three_models_hand_packed_data_on_without_waiting(two: Runtime) -> None:
    layers = [mlp(seed=1), top(), nn.Sequential(nn.Linear(3, 3))]
    truth = [twin(part) for part in layers]
    models = [RoundPipe(part, runtime=two, model_run_config=PACKED) for part in layers]
    x, y = batch(7)
    packed = x
    for model in models:
        packed = model(packed)
        assert not any(here.query() for here, _ in packed.transfer_event)
    packed.synchronize()
    square_error(torch.cat(list(packed)), y).backward()
    wanted = truth[2](truth[1](truth[0](x)))
    square_error(wanted, y).backward()
    for model, part, true in zip(models, layers, truth, strict=True):
        model.synchronize()
        assert_near(gradients(part), gradients(true))


@pytest.mark.parametrize("fused", [False, True])
def test_trees_and_plain_arguments_go_with_packed_data(runtime: Runtime, fused: bool) -> None:
    bottom, above = Several(), Joined()
    bottom_true, above_true = twin(bottom), twin(above)
    first = RoundPipe(bottom, runtime=runtime, model_run_config=PACKED)
    second = RoundPipe(above, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=3))
    x, y = batch(7)
    beside = torch.randn(7, 1, requires_grad=True)
    beside_true = beside.detach().clone().requires_grad_()
    tree = first(x)
    if fused:
        args = {"input_args": (tree, beside), "input_kwargs": {"add": 0.5}}
        loss = second.forward_backward(**args, label=y, loss_fn=square_error)
    else:
        loss = square_error(second(tree, beside, add=0.5), y)
        loss.backward()
    loss_true = square_error(above_true(bottom_true(x), beside_true, add=0.5), y)
    loss_true.backward()
    first.synchronize()
    second.synchronize()
    assert_near(loss, loss_true)
    assert_near(gradients(bottom), gradients(bottom_true))
    assert_near(gradients(above), gradients(above_true))
    assert_near(beside.grad, beside_true.grad)


class Both(nn.Module):
    """Takes two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.linear(a) * b


def test_packed_data_of_two_models_meet_in_a_third(runtime: Runtime) -> None:
    parts = [mlp(seed=1), mlp(seed=2), Both()]
    truth = [twin(part) for part in parts]
    models = [RoundPipe(part, runtime=runtime, model_run_config=PACKED) for part in parts]
    x, y = batch(7)
    packed = models[2](models[0](x), models[1](2 * x))
    packed.synchronize()
    square_error(torch.cat(list(packed)), y).backward()
    square_error(truth[2](truth[0](x), truth[1](2 * x)), y).backward()
    for model, part, true in zip(models, parts, truth, strict=True):
        model.synchronize()
        assert_near(gradients(part), gradients(true))


def test_packed_data_may_be_labels(runtime: Runtime) -> None:
    teacher, student = mlp(seed=1), mlp(seed=2)
    student_true = twin(student)
    x, _ = batch(7)
    first = RoundPipe(teacher, runtime=runtime, model_run_config=PACKED)
    second = RoundPipe(student, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=3))
    with torch.no_grad():
        labels = first(x)
        wanted = teacher(x)
    loss = second.forward_backward(input_args=(x,), label=labels, loss_fn=square_error)
    second.synchronize()
    loss_true = square_error(student_true(x), wanted)
    loss_true.backward()
    assert_near(loss, loss_true)
    assert_near(gradients(student), gradients(student_true))


def test_packed_data_may_be_used_twice(runtime: Runtime) -> None:
    chain = Chain(runtime)
    x, y = batch(7)
    packed = chain.first(x)
    loss = square_error(chain.second(packed), y) + square_error(chain.second(packed), 2 * y)
    loss.backward()
    middle = chain.bottom_true(x)
    (square_error(chain.top_true(middle), y) + square_error(chain.top_true(middle), 2 * y)).backward()
    chain.assert_gradients()


def test_packed_data_of_another_runtime_are_waited_for(two: Runtime) -> None:
    layers, above = mlp(), top()
    x, _ = batch(7)
    with Runtime("cpu:1") as other:
        packed = RoundPipe(layers, runtime=other, model_run_config=PACKED)(x)
        found = RoundPipe(above, runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=3))(packed)
    assert_near(found, above(layers(x)))


# How many microbatches


@pytest.mark.parametrize("asked", [4, None])
def test_fewer_packed_microbatches_shrink_the_batch_with_a_warning(two: Runtime, asked: int | None) -> None:
    chain = Chain(two, num_microbatch=asked)
    x, y = batch(6)
    packed = chain.first(x, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=2))
    counted: list[int] = []

    def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        counted.append(len(outputs))
        return square_error(outputs, labels)

    with pytest.warns(FewerParts, match=f"{asked or 3} microbatches were asked for, but the packed data have 2"):
        loss = chain.second.forward_backward(input_args=(packed,), label=y, loss_fn=loss_fn)
    assert counted == [3, 3]
    assert_near(loss, square_error(chain.top_true(chain.bottom_true(x)), y))


def test_more_packed_microbatches_are_followed_in_silence(two: Runtime) -> None:
    chain = Chain(two, num_microbatch=2, merge_output=False)
    x, _ = batch(7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packed = chain.second(chain.first(x))
    packed.synchronize()
    assert packed.sizes == (3, 2, 2)


# Refused


def test_packed_data_that_disagree_are_refused(two: Runtime) -> None:
    one, other = (RoundPipe(mlp(), runtime=two, model_run_config=PACKED) for _ in range(2))
    both = RoundPipe(Both(), runtime=two)
    x, _ = batch(7)
    with torch.no_grad():
        three = one(x)
        with pytest.raises(ValueError, match="holds 2"):
            both(three, other(x, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=2)))
        with pytest.raises(ValueError, match=r"\(3, 2, 2\)"):
            both(three, other(batch(8)[0]))
        with pytest.raises(ValueError, match="batch size"):
            both(three, torch.zeros(6, 3))
        assert_near(both(three, torch.ones(7, 3)), both.model(mlp()(x), torch.ones(7, 3)))


def test_packed_data_that_a_spec_gives_whole_to_each_microbatch_are_refused(two: Runtime) -> None:
    chain = Chain(two, split_input=((rp_batch.Replicate(),), {}))
    with pytest.raises(ValueError, match="part by part"):
        chain.second(chain.first(batch(7)[0]))


def test_packed_outputs_on_another_device_are_refused(two: Runtime) -> None:
    model = RoundPipe(mlp(), runtime=two, model_run_config=PACKED)
    with pytest.raises(ValueError, match="output_device"):
        model(batch(7)[0], roundpipe_run_config=RoundPipeRunConfig(output_device="meta"))


def test_packed_data_with_too_few_events_are_refused() -> None:
    with pytest.raises(ValueError, match="one entry for each of the 2"):
        RoundPipePackedData([1, 2], [(None, None)])


def test_packed_data_changed_before_a_backward_that_needs_them_are_refused(two: Runtime) -> None:
    chain = Chain(two)
    packed = chain.first(batch(7)[0])
    loss = chain.second(packed).sum()
    with torch.no_grad():
        packed[1].zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_what_the_user_puts_in_a_packed_place_is_copied_like_any_input(runtime: Runtime) -> None:
    chain = Chain(runtime)
    x, _ = batch(6)
    packed = chain.first(x)
    packed.synchronize()
    packed[0] = torch.ones(3, 2).t()
    found = chain.second(packed)
    packed[0].zero_()
    middle = chain.bottom_true(x)
    wanted = torch.cat([torch.ones(2, 3), middle[2:]])
    assert_near(found, chain.top_true(wanted))
    found.sum().backward()
    chain.top_true(wanted).sum().backward()
    chain.assert_gradients()


# Errors


class Failing(nn.Module):
    """Fails in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        if out.requires_grad:
            out.register_hook(_fail)
        return out


def _fail(_: torch.Tensor) -> None:
    raise LookupError("in backward")


def test_an_error_between_two_models_arrives_as_itself_and_both_train_on(two: Runtime) -> None:
    chain = Chain(two, above=nn.Sequential(Failing(), nn.Linear(3, 3)))
    x, y = batch(7)
    with pytest.raises(LookupError):
        square_error(chain.second(chain.first(x)), y).backward()
    chain.second.reset()
    chain.first.reset()
    packed = chain.first(x)
    packed.synchronize()
    torch.cat(list(packed)).sum().backward()
    chain.bottom_true(x).sum().backward()
    chain.first.synchronize()
    assert_near(gradients(chain.bottom), gradients(chain.bottom_true))


@pytest.mark.parametrize("with_grad", [True, False])
def test_a_model_may_be_dropped_while_its_packed_outputs_are_computed(runtime: Runtime, with_grad: bool) -> None:
    layers = mlp()
    x, _ = batch(7)
    wanted = layers(x)
    model = RoundPipe(layers, runtime=runtime, model_run_config=PACKED)
    with torch.set_grad_enabled(with_grad):
        packed = model(x)
    del model, layers
    gc.collect()
    packed.synchronize()
    assert_near(rp_batch.merge(packed), wanted)


@pytest.mark.parametrize("with_grad", [True, False])
def test_packed_outputs_may_be_dropped_with_their_model(runtime: Runtime, with_grad: bool) -> None:
    model = RoundPipe(mlp(), runtime=runtime, model_run_config=PACKED)
    with torch.set_grad_enabled(with_grad):
        packed = model(batch(7)[0])
    del model, packed
    gc.collect()
    # Raises the error of memory that was freed too early.
    RoundPipe(mlp(), runtime=runtime)(batch(7)[0])
