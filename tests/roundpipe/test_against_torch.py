"""The engine's losses, outputs and gradients are plain PyTorch's, however a call is cut."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import rp_batch
import torch
from plain import (
    PLAN_NAMES,
    assert_near,
    batch,
    gradients,
    mlp,
    plans,
    square_error,
    train_call,
    twin,
)
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from rp_sched import Plan
from torch import nn

pytestmark = pytest.mark.usefixtures("small_departures")

NEAR = 2e-5


def _config(**settings: Any) -> RoundPipeRunConfig:
    return RoundPipeRunConfig(**settings)


# Every plan, every number of microbatches


@pytest.mark.parametrize(
    ("plan_name", "microbatches"),
    [(name, 1 + (i + shift) % 9) for i, name in enumerate(PLAN_NAMES) for shift in (0, 3, 6)],
)
def test_forward_backward_gives_the_losses_and_gradients_of_plain_pytorch(
    runtime: Runtime, plan_name: str, microbatches: int
) -> None:
    layers = mlp()
    truth = twin(layers)
    plan = plans(5, microbatches)[plan_name]
    model = RoundPipe(layers, runtime=runtime)
    x, y = batch(11)
    x.requires_grad_()
    x_true = x.detach().clone().requires_grad_()

    loss, outputs = model.forward_backward(
        input_args=(x,),
        label=y,
        loss_fn=square_error,
        return_outputs=True,
        run_config=_config(num_microbatch=microbatches, execute_plan=plan),
    )
    model.synchronize()

    assert_near(loss, train_call(truth, x_true, y, microbatches=microbatches), NEAR)
    assert_near(outputs, truth(x_true), NEAR)
    assert_near(gradients(layers), gradients(truth), NEAR)
    assert_near(x.grad, x_true.grad, NEAR)


@pytest.mark.pairwise
@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize(("microbatches", "plan_name"), list(enumerate(PLAN_NAMES, 1)))
def test_forward_then_backward_gives_the_outputs_and_gradients_of_plain_pytorch(
    runtime: Runtime, plan_name: str, microbatches: int, grain: Any
) -> None:
    layers = mlp()
    truth = twin(layers)
    plan = plans(5, microbatches)[plan_name]
    if plan is not None:
        plan = Plan(plan.forward, plan.fused, plan.backward)
    model = RoundPipe(layers, runtime=runtime, model_run_config=_config(recompute_grain=grain))
    x, y = batch(11)
    x.requires_grad_()
    x_true = x.detach().clone().requires_grad_()

    outputs = model(x, roundpipe_run_config=_config(num_microbatch=microbatches, execute_plan=plan))
    square_error(outputs, y).backward()
    model.synchronize()

    outputs_true = truth(x_true)
    square_error(outputs_true, y).backward()
    assert_near(outputs, outputs_true, NEAR)
    assert_near(gradients(layers), gradients(truth), NEAR)
    assert_near(x.grad, x_true.grad, NEAR)


@pytest.mark.parametrize("plan_name", PLAN_NAMES)
def test_layer_grain_changes_no_number(runtime: Runtime, plan_name: str) -> None:
    layers = mlp()
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime)
    x, y = batch(5)
    loss = model.forward_backward(
        input_args=(x,),
        label=y,
        loss_fn=square_error,
        run_config=_config(num_microbatch=2, execute_plan=plans(5, 2)[plan_name], recompute_grain="layer"),
    )
    model.synchronize()
    assert_near(loss, train_call(truth, x, y, microbatches=2), NEAR)
    assert_near(gradients(layers), gradients(truth), NEAR)


@pytest.mark.parametrize(
    "plan",
    [
        Plan((range(5),), None, (range(5),)),
        Plan((range(2), range(2, 5)), None, (range(4, 5), range(1, 4), range(1))),
        Plan((range(5),), None, tuple(range(i, i + 1) for i in (4, 3, 2, 1, 0))),
    ],
)
def test_a_plan_for_separate_calls_needs_no_fused_stage(runtime: Runtime, plan: Plan) -> None:
    layers = mlp()
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime)
    x, y = batch(6)
    square_error(model(x, roundpipe_run_config=_config(num_microbatch=4, execute_plan=plan)), y).backward()
    model.synchronize()
    square_error(truth(x), y).backward()
    assert_near(gradients(layers), gradients(truth), NEAR)


def test_a_batch_smaller_than_the_number_of_microbatches_is_cut_less_often(runtime: Runtime) -> None:
    layers = mlp()
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime)
    x, y = batch(2)
    with pytest.warns(rp_batch.FewerParts):
        loss = model.forward_backward(
            input_args=(x,), label=y, loss_fn=square_error, run_config=_config(num_microbatch=5)
        )
    model.synchronize()
    assert_near(loss, train_call(truth, x, y, microbatches=2), NEAR)
    assert_near(gradients(layers), gradients(truth), NEAR)


def test_a_model_of_one_layer_trains(runtime: Runtime) -> None:
    layer = nn.Linear(4, 3)
    truth = twin(layer)
    model = RoundPipe(layer, runtime=runtime)
    x, y = batch(5)
    loss = model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.synchronize()
    assert_near(loss, train_call(truth, x, y, microbatches=1), NEAR)
    assert_near(gradients(layer), gradients(truth), NEAR)


def test_gradients_add_up_over_calls_of_both_kinds(runtime: Runtime) -> None:
    layers = mlp()
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime)
    for call in range(4):
        x, y = batch(5 + call, seed=call)
        config = _config(num_microbatch=1 + call, execute_plan=list(plans(5, 1 + call).values())[call])
        if call % 2:
            model.forward_backward(input_args=(x,), label=y, loss_fn=square_error, run_config=config)
        else:
            square_error(model(x, roundpipe_run_config=config), y).backward()
        train_call(truth, x, y, microbatches=1)
    model.synchronize()
    assert_near(gradients(layers), gradients(truth), NEAR)


@pytest.mark.parametrize("how", ["grad", "inputs"])
def test_gradients_of_inputs_alone_add_nothing_to_those_of_weights(runtime: Runtime, how: str) -> None:
    layers = mlp()
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    x, y = batch(6)
    found: list[torch.Tensor | None] = []
    for module in (model, truth):
        own = x.clone().requires_grad_()
        square_error(module(x), y).backward()
        if how == "grad":
            found.extend(torch.autograd.grad(square_error(module(own), y), own))
        else:
            square_error(module(own), y).backward(inputs=[own])
            found.append(own.grad)
        square_error(module(x), y).backward()
    model.synchronize()
    assert_near(found[:1], found[1:], 1e-5)
    assert_near(gradients(layers), gradients(truth), 1e-5)


def test_two_forwards_may_wait_for_one_backward(runtime: Runtime) -> None:
    layers = mlp()
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime)
    (x, y), (z, _) = batch(5), batch(3, seed=5)
    (square_error(model(x), y) + model(z).square().sum()).backward()
    model.synchronize()
    (square_error(truth(x), y) + truth(z).square().sum()).backward()
    assert_near(gradients(layers), gradients(truth), NEAR)


def test_the_output_of_one_model_trains_both_when_it_feeds_another(runtime: Runtime) -> None:
    bottom, top = mlp(seed=1), nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    bottom_true, top_true = twin(bottom), twin(top)
    first, second = RoundPipe(bottom, runtime=runtime), RoundPipe(top, runtime=runtime)
    x, y = batch(6)
    loss = second.forward_backward(input_args=(first(x),), label=y, loss_fn=square_error)
    first.synchronize()
    second.synchronize()
    loss_true = square_error(top_true(bottom_true(x)), y)
    loss_true.backward()
    assert_near(loss, loss_true, NEAR)
    assert_near(gradients(bottom), gradients(bottom_true), NEAR)
    assert_near(gradients(top), gradients(top_true), NEAR)


# Outputs


def test_outputs_are_returned_on_the_device_that_is_asked_for(runtime: Runtime, devices: str) -> None:
    there = torch.device("cuda:0" if devices == "cuda" else "cpu")
    layers = mlp()
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime, model_run_config=_config(output_device=there))
    x, y = batch(6)
    outputs = model(x)
    assert outputs.device == there
    square_error(outputs, y.to(there)).backward()
    _, fused = model.forward_backward(input_args=(x,), label=y, loss_fn=square_error, return_outputs=True)
    assert fused.device == there
    model.synchronize()
    for _ in range(2):
        square_error(truth(x), y).backward()
    assert_near(gradients(layers), gradients(truth), NEAR)


def test_without_gradients_outputs_need_none_and_are_the_same(runtime: Runtime) -> None:
    layers = mlp()
    model = RoundPipe(layers, runtime=runtime)
    x, _ = batch(6)
    wanted = twin(layers)(x)
    with torch.no_grad():
        quiet = model(x)
    with torch.inference_mode():
        quieter = model(x)
    asked = model(x, roundpipe_run_config=_config(requires_grad=False))
    for outputs in (quiet, quieter, asked):
        assert not outputs.requires_grad
        assert_near(outputs, wanted, NEAR)


def test_a_model_whose_first_call_was_under_inference_mode_trains(runtime: Runtime) -> None:
    layers = mlp()
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime)
    x, y = batch(6)
    with torch.inference_mode():
        model(x)
    loss = model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.synchronize()
    assert_near(loss, train_call(truth, x, y, microbatches=1), NEAR)
    assert_near(gradients(layers), gradients(truth), NEAR)


def test_a_loss_function_may_return_several_losses(runtime: Runtime) -> None:
    layers = mlp()
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime)
    x, y = batch(7)

    def losses(outputs: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        return [square_error(outputs, labels), outputs.abs().sum()]

    found = model.forward_backward(input_args=(x,), label=y, loss_fn=losses, run_config=_config(num_microbatch=3))
    model.synchronize()
    wanted = losses(truth(x), y)
    sum(wanted).backward()
    assert isinstance(found, list)
    assert_near(found, wanted, NEAR)
    assert_near(gradients(layers), gradients(truth), NEAR)


def test_by_default_the_output_is_the_loss(runtime: Runtime) -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.square().sum()

    layers = nn.Sequential(nn.Linear(4, 3), Sum())
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime)
    x, _ = batch(5)
    loss = model.forward_backward(input_args=(x,), run_config=_config(num_microbatch=2))
    model.synchronize()
    wanted = truth(x)
    wanted.backward()
    assert loss.shape == ()
    assert not loss.requires_grad
    assert_near(loss, wanted, NEAR)
    assert_near(gradients(layers), gradients(truth), NEAR)


def test_a_loss_function_may_change_its_outputs_in_place(runtime: Runtime) -> None:
    def in_place(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return outputs.sub_(labels).square().sum()

    layers = mlp()
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime)
    x, y = batch(6)
    loss, outputs = model.forward_backward(input_args=(x,), label=y, loss_fn=in_place, return_outputs=True)
    model.synchronize()
    assert_near(loss, train_call(truth, x, y, microbatches=1), NEAR)
    assert_near(outputs, truth(x), NEAR)
    assert_near(gradients(layers), gradients(truth), NEAR)


def test_an_output_that_nothing_depends_on_needs_no_gradient(runtime: Runtime) -> None:
    layers = nn.Sequential(_Split(), _Both())
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime)
    x, _ = batch(6)
    model(x)["left"].square().sum().backward()
    model.synchronize()
    truth(x)["left"].square().sum().backward()
    assert_near(gradients(layers), gradients(truth), NEAR)


class _Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


class _Both(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"left": pair[0].tanh(), "right": pair[1].tanh()}


# What goes from layer to layer


class Carried(NamedTuple):
    """Activations beside all that may travel with them."""

    h: torch.Tensor
    mask: torch.Tensor
    index: torch.Tensor
    nothing: None
    number: float
    word: str


class First(nn.Module):
    """Takes keyword arguments, starts the row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, index: torch.Tensor, *, mask: torch.Tensor, scale: float = 1.0, extra: Any = None
    ) -> Carried:
        return Carried(self.linear(x) * scale + self.table(index), mask, index, extra, scale, "word")


class Middle(nn.Module):
    """Uses all, passes all on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, c: Carried) -> Carried:
        assert c.word == "word"
        assert c.nothing is None
        assert c.mask.dtype == torch.bool
        assert c.index.dtype == torch.int64
        h = torch.where(c.mask, self.linear(c.h).tanh(), c.h) * c.number
        return c._replace(h=h + c.index[:, None])


class ToDict(nn.Module):
    """A dict, an ordered dict within it, and a list."""

    def forward(self, c: Carried) -> dict[str, Any]:
        return {"h": c.h, "more": OrderedDict(mask=c.mask, list=[c.h[:, :2], None, c.h])}


class Last(nn.Module):
    """Back to one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, tree: dict[str, Any]) -> torch.Tensor:
        more = tree["more"]
        assert isinstance(more, OrderedDict)
        first, none, whole = more["list"]
        assert none is None
        return self.linear(tree["h"] + whole) + first.sum(1, keepdim=True) * more["mask"]


@pytest.mark.pairwise
@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("plan_name", PLAN_NAMES)
def test_trees_of_anything_travel_between_layers(runtime: Runtime, plan_name: str, grain: Any) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(First(), Middle(), Middle(), ToDict(), Last())
    truth = twin(layers)
    x, y = batch(7)
    index = torch.arange(7) % 5
    keywords = {"mask": x[:, :1] > 0, "scale": 0.5}
    model = RoundPipe(layers, runtime=runtime)
    loss = model.forward_backward(
        input_args=(x, index),
        input_kwargs=keywords,
        label=y,
        loss_fn=square_error,
        run_config=_config(num_microbatch=3, execute_plan=plans(5, 3)[plan_name], recompute_grain=grain),
    )
    separate = model(x, index, **keywords)
    square_error(separate, y).backward()
    model.synchronize()

    outputs = x, index
    for place, layer in enumerate(truth):
        outputs = layer(*outputs, **keywords) if place == 0 else layer(outputs)
    loss_true = square_error(outputs, y)
    (2 * loss_true).backward()
    assert_near(loss, loss_true, NEAR)
    assert_near(separate, outputs, NEAR)
    assert_near(gradients(layers), gradients(truth), NEAR)


def test_integer_and_bool_outputs_and_none_come_back(runtime: Runtime) -> None:
    layers = nn.Sequential(First(), Middle(), Middle())
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime)
    x, _ = batch(6)
    index, mask = torch.arange(6) % 5, x[:, :1] > 0
    found = model(x, index, mask=mask)
    wanted = truth[2](truth[1](truth[0](x, index, mask=mask)))
    assert_near(found.h, wanted.h, NEAR)
    assert found.h.requires_grad
    assert torch.equal(found.mask, mask)
    assert torch.equal(found.index, index)
    assert (found.nothing, found.number, found.word) == (None, 1.0, "word")


class InPlace(nn.Module):
    """Writes its input, as ``nn.ReLU(inplace=True)`` does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(0.5).add_(1.0)


class ViewInPlace(nn.Module):
    """Writes its input through a view of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.view(-1)[::2].mul_(3.0)
        return x


@pytest.mark.pairwise
@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("plan_name", PLAN_NAMES)
@pytest.mark.parametrize("first", ["linear", "in place"])
def test_layers_may_write_their_input_in_place(runtime: Runtime, plan_name: str, grain: Any, first: str) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(4, 4) if first == "linear" else InPlace(),
        InPlace(),
        nn.Linear(4, 4),
        ViewInPlace(),
        nn.ReLU(inplace=True),
        nn.Linear(4, 3),
        InPlace(),
    )
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime)
    x, y = batch(6)
    config = _config(num_microbatch=3, execute_plan=plans(7, 3)[plan_name], recompute_grain=grain)
    given_x = x.clone()
    loss = model.forward_backward(input_args=(given_x,), label=y, loss_fn=square_error, run_config=config)
    model.synchronize()
    assert_near(loss, train_call(truth, x.clone(), y, microbatches=3), NEAR)
    assert_near(gradients(layers), gradients(truth), NEAR)
    assert torch.equal(given_x, x)


class Views(nn.Module):
    """Returns views of its input and of its output, transposed, expanded, and its input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.linear(x)
        return x, h[:, 1:], h.unsqueeze(1).expand(-1, 3, -1).transpose(1, 2), h, h


class OfViews(nn.Module):
    """Uses all of them."""

    def forward(self, views: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x, part, wide, h, again = views
        return (x + wide.sum(2) + h * again)[:, 1:] + part


@pytest.mark.pairwise
@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("plan_name", PLAN_NAMES)
def test_views_and_the_input_itself_may_be_handed_on(runtime: Runtime, plan_name: str, grain: Any) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), Views(), OfViews(), nn.Linear(3, 3))
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime)
    x, y = batch(5)
    config = _config(num_microbatch=2, execute_plan=plans(4, 2)[plan_name], recompute_grain=grain)
    loss = model.forward_backward(input_args=(x,), label=y, loss_fn=square_error, run_config=config)
    model.synchronize()
    assert_near(loss, train_call(truth, x, y, microbatches=2), NEAR)
    assert_near(gradients(layers), gradients(truth), NEAR)


def test_what_the_caller_does_to_inputs_and_outputs_afterwards_changes_nothing(runtime: Runtime) -> None:
    class Through(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            h, kept = x if isinstance(x, tuple) else (x, x)
            return self.linear(h) * kept, kept

    def first_of(outputs: Any, labels: Any) -> torch.Tensor:
        del labels
        return outputs[0].square().sum()

    layers = nn.Sequential(*(Through() for _ in range(6)))
    truth = twin(layers)
    plan = plans(6, 1)["one layer a stage"]
    model = RoundPipe(layers, runtime=runtime, model_run_config=_config(num_microbatch=1, execute_plan=plan))
    x, _ = batch(64)
    x_true = x.clone()
    _, (_, kept) = model.forward_backward(input_args=(x,), loss_fn=first_of, return_outputs=True)
    x.zero_()
    kept.zero_()
    model.synchronize()
    first_of(truth(x_true), None).backward()
    assert_near(gradients(layers), gradients(truth), NEAR)


def test_the_callers_autocast_is_honoured(runtime: Runtime, devices: str) -> None:
    kind = devices.split(":")[0]
    layers = mlp()
    model = RoundPipe(layers, runtime=runtime)
    x, _ = batch(4)
    with torch.autocast(kind, torch.bfloat16):
        outputs = model(x)
    assert outputs.dtype == torch.bfloat16
    assert model(x).dtype == torch.float32
    outputs.float().square().sum().backward()
    model.synchronize()
    truth = twin(layers)
    truth.zero_grad()
    truth(x).square().sum().backward()
    assert_near(gradients(layers), gradients(truth), 3e-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_agree_within_their_precision(runtime: Runtime, dtype: torch.dtype) -> None:
    layers = mlp().to(dtype)
    truth = twin(layers).double()
    model = RoundPipe(layers, runtime=runtime)
    x, y = (tensor.to(dtype) for tensor in batch(6))
    loss = model.forward_backward(
        input_args=(x,), label=y, loss_fn=square_error, run_config=_config(num_microbatch=3)
    )
    model.synchronize()
    tolerance = {torch.float64: 1e-12, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    assert_near(loss, train_call(truth, x.double(), y.double(), microbatches=3), tolerance)
    assert_near(gradients(layers), gradients(truth), tolerance)


def test_gradients_of_16_bit_weights_are_summed_in_fp32(runtime: Runtime) -> None:
    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x

    layers = nn.Sequential(Weight(), nn.Identity())
    model = RoundPipe(layers, runtime=runtime)
    # One big gradient, then many that bf16 could not add to it one by one.
    x = torch.tensor([256.0] + [0.5] * 16, dtype=torch.bfloat16)[:, None].expand(17, 3)
    for _ in range(2):
        model.forward_backward(
            input_args=(x,), loss_fn=lambda out, _: out.sum(), run_config=_config(num_microbatch=17)
        )
    model.synchronize()
    assert_near(layers[0].weight.grad, torch.full((3,), 528.0), 1e-6)
