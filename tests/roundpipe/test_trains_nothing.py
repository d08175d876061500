"""Loops that would train nothing, or not what was meant: an error or one warning, with the line to write."""

from __future__ import annotations

import copy
import math
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import roundpipe
import torch
from plain import batch, mlp, square_error
from roundpipe import (
    RoundPipe,
    RoundPipeRunConfig,
    Runtime,
    TrainingWarning,
    TrainsNothing,
    wrap_model_to_roundpipe,
)
from rp_engine.optimizer.optimizer_watch import OptimizerWatch, watch_optimizers
from torch import nn

pytestmark = pytest.mark.usefixtures("small_departures")

OPTIMIZERS = {"torch": torch.optim.AdamW, "ours": roundpipe.optim.AdamW}
RIGHT = r"model\.step\(lambda: \(optimizer\.step\(\), optimizer\.zero_grad\(\)\)\)"


def call(model: RoundPipe) -> None:
    x, y = batch(6)
    model.forward_backward((x,), None, y, square_error)


@pytest.fixture(params=list(OPTIMIZERS))
def make(request: pytest.FixtureRequest) -> Callable[..., torch.optim.Optimizer]:
    return OPTIMIZERS[request.param]


def test_an_optimizer_made_before_wrapping_is_refused(two: Runtime, make: Callable[..., torch.optim.Optimizer]):
    layers = mlp()
    optimizer = make(layers.parameters(), lr=0.1)
    model = RoundPipe(layers, name="mine", runtime=two)
    call(model)
    with pytest.raises(TrainsNothing, match=r"parameters of model 'mine' itself.*model\.optim_parameters\(\)"):
        optimizer.step()
    with pytest.raises(TrainsNothing, match=RIGHT):
        model.step(lambda: optimizer.step(), is_async=False)


def test_an_optimizer_over_the_models_parameters_is_refused(
    two: Runtime, make: Callable[..., torch.optim.Optimizer]
):
    model = RoundPipe(mlp(), runtime=two)
    with pytest.warns(UserWarning, match=r"give an optimizer model\.optim_parameters\(\)"):
        optimizer = make(model.parameters(), lr=0.1)
    call(model)
    with pytest.raises(TrainsNothing, match=r"made over the parameters"):
        optimizer.step()


def test_a_step_outside_of_a_step_function_is_refused(two: Runtime, make: Callable[..., torch.optim.Optimizer]):
    model = RoundPipe(mlp(), runtime=two)
    optimizer = make(model.optim_parameters(), lr=0.1)
    call(model)
    with pytest.raises(TrainsNothing, match=rf"outside of a step function.*{RIGHT}"):
        optimizer.step()
    # Nothing is lost: the gradients are there for a step.
    before = [master.detach().clone() for master in model.optim_parameters()]
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    assert not any(map(torch.equal, before, model.optim_parameters()))


def test_an_optimizer_over_two_models_steps_each_in_its_own_step(
    two: Runtime, make: Callable[..., torch.optim.Optimizer]
):
    own, other = (RoundPipe(mlp(), name=name, runtime=two) for name in ("own", "other"))
    optimizer = make([*own.optim_parameters(), *other.optim_parameters()], lr=0.1)
    before = [[master.detach().clone() for master in model.optim_parameters()] for model in (own, other)]

    def step(model: RoundPipe) -> None:
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)

    call(own)
    call(other)
    with pytest.warns(TrainingWarning, match="gradients of model 'own' were read in a step function of .*'other'"):
        step(other)
    assert all(map(torch.equal, before[0], own.optim_parameters()))
    assert not any(map(torch.equal, before[1], other.optim_parameters()))
    step(own)
    assert not any(map(torch.equal, before[0], own.optim_parameters()))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("master", ["whole", "split"])
def test_hooks_on_masters_which_would_not_run_are_refused(two: Runtime, kind: str, master: Any):
    model = RoundPipe(mlp().bfloat16(), optim_dtype=torch.float32, master=master, runtime=two)
    first, *_ = model.optim_parameters()
    with pytest.raises(ValueError, match=r"would never run: .*in the step function.*step_in_backward=True"):
        getattr(first, kind)(lambda gradient: gradient)


def test_masters_that_have_gradients_of_their_own_may_be_stepped(two: Runtime):
    model = RoundPipe(mlp(), runtime=two)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=1.0)
    master = next(model.optim_parameters())
    before = master.detach().clone()
    master.grad = torch.ones_like(master)
    optimizer.step()
    assert torch.equal(master, before - 1)


def test_models_of_others_are_left_alone():
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    optimizer.step()
    with Runtime("cpu:1") as runtime:
        RoundPipe(nn.Linear(2, 2), runtime=runtime)
        optimizer.step()


@pytest.mark.parametrize("clip", [torch.nn.utils.clip_grad_norm_, roundpipe.optim.clip_grad_norm_])
def test_clipping_outside_of_a_step_function_says_so_once(two: Runtime, clip: Callable[..., torch.Tensor]):
    model = RoundPipe(mlp(), runtime=two)
    masters = list(model.optim_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clip(masters, 1.0)
    call(model)
    with pytest.warns(
        TrainingWarning, match=r"clip, log and drop them in the step function.*clip_grad_norm_"
    ) as told:
        assert [clip(masters, 1.0), clip(masters, 1.0)] == [0, 0]
    assert len(told) == 1
    norms: list[torch.Tensor] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.step(lambda: norms.append(clip(masters, 1.0)), is_async=False)
    assert norms[0] > 0


def test_dropping_gradients_after_a_step_was_launched_says_nothing(two: Runtime):
    model = RoundPipe(mlp(), runtime=two)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            optimizer.zero_grad()
            call(model)
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        call(model)
        model.zero_grad()
        optimizer.zero_grad()
        model.synchronize()


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [torch.optim.SGD, roundpipe.optim.SGD, roundpipe.optim.AdamW])
@pytest.mark.parametrize("outside", [False, True])
def test_gradients_that_no_step_drops_are_told_once(
    two: Runtime, make: Callable[..., torch.optim.Optimizer], outside: bool
):
    model = RoundPipe(mlp(), name="mine", runtime=two)
    optimizer = make(model.optim_parameters(), lr=0.1)
    words = r"'mine' were used by one step and.*optimizer\.zero_grad\(\)"
    with pytest.warns(TrainingWarning, match=words) as told:
        _train_without_dropping(model, optimizer, outside=outside)
    assert len(told) == 1


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("make", [torch.optim.SGD, roundpipe.optim.SGD])
def test_what_a_loop_drops_beside_a_step_is_not_that_steps(
    two: Runtime, make: Callable[..., torch.optim.Optimizer], set_to_none: bool
):
    layers = mlp()
    model = RoundPipe(layers, runtime=two)
    optimizer = make(model.optim_parameters(), lr=0.1)
    started, may_go = threading.Event(), threading.Event()

    def step() -> None:
        started.set()
        assert may_go.wait(30)
        optimizer.step()
        optimizer.zero_grad()

    before = [weight.detach().clone() for weight in layers.parameters()]
    call(model)
    model.step(step)
    assert started.wait(30)
    optimizer.zero_grad(set_to_none=set_to_none)
    may_go.set()
    model.synchronize()
    assert not any(map(torch.equal, before, layers.parameters()))


def test_clipping_beside_a_step_leaves_that_steps_gradients(two: Runtime):
    model = RoundPipe(mlp(), runtime=two)
    masters = list(model.optim_parameters())
    started, may_go = threading.Event(), threading.Event()
    norms: list[torch.Tensor] = []

    def step() -> None:
        started.set()
        assert may_go.wait(30)
        norms.append(torch.nn.utils.clip_grad_norm_(masters, math.inf))

    call(model)
    model.step(step)
    assert started.wait(30)
    with pytest.warns(TrainingWarning, match="clip, log and drop them in the step function"):
        assert torch.nn.utils.clip_grad_norm_(masters, 1e-9) == 0
    assert roundpipe.optim.clip_grad_norm_(masters, 1e-9) == 0
    may_go.set()
    model.synchronize()
    assert norms[0] > 1e-3


def _train_without_dropping(model: RoundPipe, optimizer: torch.optim.Optimizer, *, outside: bool) -> None:
    for _ in range(4):
        call(model)
        model.step(optimizer.step)
        if outside:
            optimizer.zero_grad()
    model.synchronize()


def _dropped_behind(model: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    model.step(optimizer.step)
    model.zero_grad()


def _dropped_before(model: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()
    call(model)
    model.step(optimizer.step)


# How to drop gradients between steps.
DROPPING: dict[str, Callable[[RoundPipe, torch.optim.Optimizer], object]] = {
    "in the step function": lambda model, one: model.step(lambda: (one.step(), one.zero_grad())),
    "set to zero": lambda model, one: model.step(lambda: (one.step(), one.zero_grad(set_to_none=False))),
    "by the model, behind": _dropped_behind,
    "by the model, before": _dropped_before,
    "where no step is taken": lambda model, _: model.step(lambda: None),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("way", DROPPING)
@pytest.mark.parametrize("make", [torch.optim.SGD, roundpipe.optim.SGD])
def test_gradients_that_are_dropped_or_not_used_are_not_told_of(
    two: Runtime, way: str, make: Callable[..., torch.optim.Optimizer]
):
    model = RoundPipe(mlp(), runtime=two)
    optimizer = make(model.optim_parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            call(model)
            call(model)
            DROPPING[way](model, optimizer)
        model.synchronize()
    model.zero_grad()


class _Held(torch.autograd.Function):
    """Backward waits for an event."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, may_go: threading.Event) -> torch.Tensor:
        ctx.may_go = may_go
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert ctx.may_go.wait(60)
        return grads[0], None


class Held(nn.Linear):
    def __init__(self, may_go: threading.Event) -> None:
        super().__init__(4, 3)
        self.may_go = may_go

    def __deepcopy__(self, memo: dict[int, Any]) -> Held:
        copied = Held(self.may_go)
        copied.weight, copied.bias = (copy.deepcopy(one, memo) for one in (self.weight, self.bias))
        return copied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Held.apply(super().forward(x), self.may_go)


def scheduled(model: RoundPipe) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


TOLD = r"left to chance.*\(optimizer\.step\(\), scheduler\.step\(\), optimizer\.zero_grad\(\)\)"


def test_a_scheduler_that_steps_while_a_step_is_under_way_is_told_once():
    may_go, begun = threading.Event(), threading.Event()
    config = RoundPipeRunConfig(num_microbatch=1)
    with Runtime("cpu:1") as runtime:
        model = RoundPipe(nn.Sequential(Held(may_go)), runtime=runtime, model_run_config=config)
        optimizer, scheduler = scheduled(model)
        # Called after those of the engine.
        optimizer.register_step_pre_hook(lambda *_: begun.set())

        def train() -> None:
            for _ in range(3):
                call(model)
                model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
                # The first step waits for gradients.
                assert begun.wait(60)
                scheduler.step()
                may_go.set()
            model.synchronize()

        with pytest.warns(TrainingWarning, match=TOLD) as told:
            train()
    assert [one.category for one in told].count(TrainingWarning) == 1


def test_settings_that_change_between_a_step_and_one_launched_beside_it_are_told():
    watch_optimizers()
    watched = OptimizerWatch(lambda _: None)
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    first = watched.launch(optimizer.step, is_async=True, is_idle=True)
    second = watched.launch(optimizer.step, is_async=True, is_idle=False)
    first()
    optimizer.param_groups[0]["lr"] = 0.2
    with pytest.warns(TrainingWarning, match=TOLD):
        second()


def test_a_scheduler_that_steps_between_asynchronous_steps_is_told(two: Runtime):
    model = RoundPipe(mlp(), runtime=two)
    optimizer, scheduler = scheduled(model)
    call(model)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    model._whole._step_outcome.result()
    scheduler.step()
    call(model)
    with pytest.warns(TrainingWarning, match=TOLD):
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))


@pytest.mark.parametrize("way", ["in the step function", "synchronous", "after synchronize"])
def test_a_scheduler_whose_steps_are_in_order_is_not_told_of(two: Runtime, way: str):
    model = RoundPipe(mlp(), runtime=two)
    optimizer, scheduler = scheduled(model)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()
        if way == "in the step function":
            scheduler.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            call(model)
            model.step(step, is_async=way != "synchronous")
            if way == "after synchronize":
                model.synchronize()
            if way != "in the step function":
                scheduler.step()
        model.synchronize()
    assert scheduler.get_last_lr() == [0.1 / 16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_in_16_bits_are_told_of_unless_asked_for(two: Runtime, dtype: torch.dtype):
    model = RoundPipe(mlp().to(dtype), name="mine", runtime=two)
    words = (
        rf"'mine' are {dtype}, like its weights, so small updates.*optim_dtype=torch\.float32.*optim_dtype={dtype}"
    )
    with pytest.warns(TrainingWarning, match=words):
        list(model.optim_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(model.optim_parameters())
        for asked in (dtype, torch.float32):
            list(RoundPipe(mlp().to(dtype), asked, runtime=two).optim_parameters())
        list(RoundPipe(mlp(), runtime=two).optim_parameters())
        adapted = mlp().to(dtype).requires_grad_(False)
        adapted.append(nn.Linear(3, 3))
        list(RoundPipe(adapted, runtime=two).optim_parameters())


def test_wrapping_takes_the_arguments_that_it_names(two: Runtime):
    with pytest.raises(TypeError, match="optimizer_dtype"):
        wrap_model_to_roundpipe(mlp(), optimizer_dtype=torch.float32, runtime=two)  # type: ignore[call-arg]
    model = wrap_model_to_roundpipe(mlp().bfloat16(), optim_dtype=torch.float32, pin_model="register", runtime=two)
    assert {master.dtype for master in model.optim_parameters()} == {torch.float32}


def test_parameters_that_are_unfrozen_after_their_optimizer_was_made_are_told_of_once(two: Runtime):
    layers = mlp()
    layers[0].requires_grad_(False)
    model = RoundPipe(layers, name="mine", runtime=two)
    optimizer = roundpipe.optim.SGD(model.optim_parameters(), lr=0.1)

    def step() -> None:
        call(model)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
        layers[0].requires_grad_(True)
        call(model)
        with pytest.raises(TrainingWarning, match=r"model 'mine' \(2, the first in layer 0\) were unfrozen"):
            step()
        model.zero_grad()
    before = layers[0].weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = {id(each) for group in optimizer.param_groups for each in group["params"]}
        optimizer.add_param_group({"params": [p for p in model.optim_parameters() if id(p) not in kept]})
        step()
    model.synchronize()
    assert not torch.equal(layers[0].weight, before)


def test_an_optimizer_that_is_made_after_parameters_were_unfrozen_says_nothing(two: Runtime):
    layers = mlp()
    layers[0].requires_grad_(False)
    model = RoundPipe(layers, runtime=two)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            optimizer = roundpipe.optim.SGD(model.optim_parameters(), lr=0.1)
            call(model)
            model.step(lambda stepped=optimizer: (stepped.step(), stepped.zero_grad()), is_async=False)
            layers[0].requires_grad_(True)


@pytest.mark.parametrize("several", [False, True])
def test_a_loss_without_a_graph_is_refused_in_words(two: Runtime, several: bool):
    model = RoundPipe(mlp(), runtime=two)
    x, y = batch(6)

    def loss_fn(output: torch.Tensor, label: torch.Tensor) -> Any:
        loss = square_error(output, label)
        return [loss, loss.detach()] if several else loss.detach()

    with pytest.raises(
        RuntimeError, match="loss 1 of loss_fn has no graph" if several else "the loss of loss_fn has"
    ):
        model.forward_backward((x,), None, y, loss_fn)


MEANS = {
    "module": nn.MSELoss(),
    "function": nn.functional.mse_loss,
    "partial": partial(nn.functional.huber_loss, delta=2.0),
    "by batch": nn.KLDivLoss(reduction="batchmean"),
}


def made(reduction: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda outputs, label: nn.functional.mse_loss(outputs, label, reduction=reduction)


SEEN_MEANS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "function": lambda outputs, label: nn.functional.cross_entropy(outputs, label.argmax(1), ignore_index=0),
    "module": lambda outputs, label: nn.L1Loss()(outputs, label),
    "method": lambda outputs, label: (outputs - label).square().mean(),
    "torch.mean": lambda outputs, label: torch.mean((outputs - label).abs()),
    "one of two": lambda outputs, label: [square_error(outputs, label), nn.functional.l1_loss(outputs, label)],
    "closure": made("mean"),
    "reduced once more": lambda outputs, label: nn.functional.mse_loss(outputs, label).mean(),
    "two terms": lambda outputs, label: nn.functional.mse_loss(outputs, label) + 0.1 * outputs.square().mean(),
    "terms of a list": lambda outputs, label: sum([(outputs - label).abs().mean(), outputs.square().mean()]),
    "one less": lambda outputs, label: 1 - (outputs * label).mean(),
    "added in place": lambda outputs, label: added_up(nn.functional.mse_loss(outputs, label)),
    "by keywords": lambda outputs, label: torch.div(input=torch.mean(input=(outputs - label).abs()), other=4),
    "half of one": lambda outputs, label: 0.5 * nn.functional.mse_loss(outputs, label),
    "a quarter": lambda outputs, label: nn.functional.mse_loss(outputs, label).div(4),
    "its negative": lambda outputs, label: -(outputs * label).mean(),
    "its root": lambda outputs, label: nn.functional.mse_loss(outputs, label).sqrt(),
    "a variance": lambda outputs, label: 2 * (outputs - label).var(),
    "by length": lambda outputs, label: square_error(outputs, label) / len(outputs),
    "by shape": lambda outputs, label: square_error(outputs, label).div(label.shape[0]),
    "by elements": lambda outputs, label: square_error(outputs, label) / torch.cat((outputs, label)).numel(),
    "by a mask": lambda outputs, label: (outputs * (label > 0)).sum() / (label > 0).sum().clamp(min=1),
    "by weights": lambda outputs, label: -(outputs * label.exp()).sum() / (label.exp().sum() + 1e-6),
}


def added_up(loss: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(())
    total += loss
    return total


def divided_in_place(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    loss = nn.functional.mse_loss(outputs, label)
    loss /= 3
    return loss


def with_a_metric(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        outputs.mean()
    return square_error(outputs, label)


WHOLE = torch.ones(6)


def by_elements_of_batch(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return square_error(outputs, label) * (len(outputs) / len(outputs)) / (6 * outputs.shape[1])


SUMS = {
    "module": nn.MSELoss(reduction="sum"),
    "partial": partial(nn.functional.mse_loss, reduction="sum"),
    "own": square_error,
    "closure": made("sum"),
    "divided by the number of microbatches": lambda outputs, label: nn.functional.mse_loss(outputs, label) / 3,
    "divided in place": divided_in_place,
    "beside a mean in inference mode": with_a_metric,
    "sum that is reduced once more": lambda outputs, label: square_error(outputs, label).mean(),
    "divided by the size of the batch": lambda outputs, label: square_error(outputs, label) / 6,
    "divided by the elements of the batch": lambda outputs, label: by_elements_of_batch(outputs, label),
    "divided by a count of the batch": lambda outputs, label: square_error(outputs, label) / WHOLE.sum(),
    "a mean that is weighted": lambda outputs, label: (outputs - label).square().mean() * (len(label) / 6),
    "a mean that is weighted by a count": lambda outputs, label: (
        nn.functional.mse_loss(outputs, label) * (torch.ones_like(label).sum().item() / 100)
    ),
    "a weighted mean by the number of microbatches": lambda outputs, label: (
        0.5 * nn.functional.mse_loss(outputs, label) / 3
    ),
    "a mean that is weighted by keywords": lambda outputs, label: torch.mul(
        other=torch.numel(input=label) / 100, input=nn.functional.mse_loss(outputs, label)
    ),
    "a mean that is left out": lambda outputs, label: square_error(outputs, label) + 0 * outputs.mean(),
    "scaled by a size": lambda outputs, label: square_error(outputs / outputs.shape[1], label),
    "with a temperature": lambda outputs, label: square_error(outputs, label) / torch.tensor(2.0).exp(),
    "means over features": lambda outputs, label: (outputs - label).square().mean(1).sum(),
}


@pytest.mark.parametrize("kind", MEANS)
def test_a_mean_over_each_of_several_microbatches_is_told(two: Runtime, kind: str):
    model = RoundPipe(mlp(), runtime=two)
    x, y = batch(6)
    with pytest.warns(TrainingWarning, match="3 times as large as its mean's.*token_mean") as told:
        model.forward_backward((x,), None, y, MEANS[kind], run_config=RoundPipeRunConfig(num_microbatch=3))
    assert [one.filename for one in told] == [__file__]


@pytest.mark.few(1)
@pytest.mark.parametrize("call", ["forward_backward", "loss"])
@pytest.mark.parametrize("kind", SEEN_MEANS)
def test_a_loss_function_that_is_seen_to_return_a_mean_is_told(two: Runtime, kind: str, call: str):
    model = RoundPipe(mlp(), runtime=two)
    x, y = batch(6)
    run_config = RoundPipeRunConfig(num_microbatch=3)
    with pytest.warns(TrainingWarning, match="3 times as large as its mean's.*token_mean") as told:
        getattr(model, call)((x,), None, y, SEEN_MEANS[kind], run_config=run_config)
    assert [one.filename for one in told] == [__file__]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("loss_fn", "microbatches"), [*((loss_fn, 3) for loss_fn in SUMS.values()), (MEANS["module"], 1)]
)
def test_a_sum_and_a_mean_over_the_whole_batch_say_nothing(two: Runtime, loss_fn: Any, microbatches: int):
    model = RoundPipe(mlp(), runtime=two)
    x, y = batch(6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = RoundPipeRunConfig(num_microbatch=microbatches)
        model.forward_backward((x,), None, y, loss_fn, run_config=config)


@pytest.mark.parametrize("kind", MEANS)
def test_a_mean_is_refused_where_the_batch_s_labels_divide(kind: str):
    with pytest.raises(ValueError, match=r"sum_loss must be a sum.*reduction='sum'"):
        roundpipe.token_mean(MEANS[kind], shift=False)


class Tempered(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return square_error(outputs * self.temperature, label)


def made_inside(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    start = torch.zeros((), requires_grad=True)
    return start + square_error(outputs, label)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_loss_function_with_a_weight_of_its_own_is_told_when_that_may_be_read(two: Runtime, microbatches: int):
    model, loss_fn = RoundPipe(mlp(), runtime=two), Tempered()
    x, y = batch(6)
    config = RoundPipeRunConfig(num_microbatch=microbatches)

    with pytest.warns(TrainingWarning, match="loss_fn computes with a tensor that requires grad.*is_async=False"):
        model.forward_backward((x,), None, y, loss_fn, run_config=config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.loss((x,), None, y, loss_fn, run_config=config)
        model.forward_backward((x,), None, y, loss_fn.requires_grad_(False), run_config=config)
        model.forward_backward((x,), None, y, made_inside, run_config=config)
