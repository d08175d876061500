"""Small trainings that tests run on one machine and on several; each returns what must be the same."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import rp_batch
import torch
from roundpipe import (
    AutoRoundPipe,
    GradScaler,
    RoundPipe,
    RoundPipeRunConfig,
    Runtime,
    token_mean,
    wrap_model_to_roundpipe,
)
from roundpipe.optim import SGD, Adafactor, AdamW, Muon, clip_grad_norm_
from torch import nn

STEPS = 3
Found = dict[str, Any]
Optimizer = Callable[[Any], torch.optim.Optimizer]


def square_error(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss whose sum over microbatches is the loss of the batch."""
    return (outputs - labels).square().sum()


def batch(number: int, size: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (size, 4) and labels (size, 3)."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(size, 4, generator=generator), torch.randn(size, 3, generator=generator)


def row(*, dropout: float = 0.0) -> nn.Sequential:
    """A row whose layers have two and one trained parameters of several sizes."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 16),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(16, 12, bias=False),
        nn.LayerNorm(12),
        nn.Linear(12, 3),
    )


def wrapped(
    runtime: Runtime, layers: nn.Module, microbatches: int = 5, split_input: Any = None, **options: Any
) -> RoundPipe:
    """A model of these layers."""
    config = RoundPipeRunConfig(num_microbatch=microbatches, split_input=split_input)
    return RoundPipe(layers, runtime=runtime, name="m", model_run_config=config, **options)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Steps that are large enough to differ if anything does."""
    return AdamW(parameters, lr=0.03)


def train(
    runtime: Runtime,
    layers: nn.Module,
    make: Optimizer = adamw,
    *,
    is_async: bool = False,
    calls: int = 1,
    clip: float | None = None,
    drops: bool = True,
    loss_fn: Any = square_error,
    **options: Any,
) -> Found:
    """A few steps; `calls` a step, whose gradients accumulate beyond a step unless it `drops` them."""
    model = wrapped(runtime, layers, **options)
    optimizer = make(model.optim_parameters())
    losses: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []

    def step() -> None:
        if clip is not None:
            norms.append(clip_grad_norm_(model.optim_parameters(), clip))
        optimizer.step()
        if drops:
            optimizer.zero_grad()

    for number in range(STEPS * calls):
        x, y = (value.to(next(layers.parameters()).dtype) for value in batch(number))
        losses.append(model.forward_backward((x,), label=y, loss_fn=loss_fn))
        if number % calls == calls - 1:
            model.step(step, is_async=is_async)
    model.synchronize()
    return {"losses": losses, "norms": norms, "weights": weights(layers)}


def weights(layers: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the state dict."""
    return {name: value.detach().clone() for name, value in layers.state_dict().items()}


# The trainings


def synchronous(runtime: Runtime) -> Found:
    """Synchronous steps, dropout."""
    return train(runtime, row(dropout=0.2), double_buffer=False)


def synchronous_with_second_blocks(runtime: Runtime) -> Found:
    """Synchronous steps, clipped."""
    return train(runtime, row(), double_buffer=True, clip=0.5)


def asynchronous(runtime: Runtime) -> Found:
    """Results come a step late."""
    return train(runtime, row(dropout=0.2), is_async=True, double_buffer=False, clip=0.5)


def asynchronous_with_second_blocks(runtime: Runtime) -> Found:
    """Results come a step late, into second blocks."""
    return train(runtime, row(dropout=0.2), is_async=True, double_buffer=True)


def accumulated(runtime: Runtime) -> Found:
    """Two calls a step."""
    return train(runtime, row(), calls=2, clip=0.5, is_async=True)


def never_dropped(runtime: Runtime) -> Found:
    """Gradients that step functions leave accumulate, and are not summed over machines again."""
    return train(runtime, row(), SGD_, drops=False)


def SGD_(parameters: Any) -> torch.optim.Optimizer:  # noqa: N802 - as the class
    """Its steps show the sizes of gradients, too."""
    return SGD(parameters, lr=0.01, momentum=0.9)


def frozen(runtime: Runtime) -> Found:
    """The first layers are frozen, and one parameter in the middle."""
    layers = row()
    layers[0].requires_grad_(False)
    layers[4].bias.requires_grad_(False)
    return train(runtime, layers, clip=1.0)


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of both."""
        return self.base(x) + self.up(self.down(x))


def adapters(runtime: Runtime) -> Found:
    """Low-rank adapters alone are trained."""
    layers = row()
    for place in (0, 3, 5):
        layers[place] = Adapted(layers[place])
    layers[4].requires_grad_(False)
    return train(runtime, layers, is_async=True)


def tied(runtime: Runtime) -> Found:
    """Two layers share a weight."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    layers[3].weight = layers[1].weight
    return train(runtime, layers, clip=0.5)


class Sometimes(nn.Module):
    """Uses one of its parameters only for microbatches whose first number is large."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rarely = nn.Linear(4, 4), nn.Linear(4, 4)
        self.never = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds the rare part."""
        return self.always(x) + (self.rarely(x) if float(x[0, 0]) > 0.4 else 0)


def sometimes_unused(runtime: Runtime) -> Found:
    """Some machines have no gradient of a parameter, and none has of another one."""
    torch.manual_seed(0)
    # Declared: what it computes depends on the microbatch, which a trial of the split would find.
    declared = ((rp_batch.Split(),), {})
    return train(runtime, nn.Sequential(Sometimes(), nn.Linear(4, 3)), clip=0.5, split_input=declared)


def sixteen_bits(runtime: Runtime) -> Found:
    """bf16 weights and gradients with fp32 masters."""
    return train(runtime, row().bfloat16(), is_async=True, double_buffer=True, optim_dtype=torch.float32)


def of_torch(runtime: Runtime) -> Found:
    """Torch's own optimizer, which reads ``.grad``, with two groups."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        every = list(parameters)
        return torch.optim.AdamW([{"params": every[:2]}, {"params": every[2:], "weight_decay": 0.0}], lr=0.03)

    return train(runtime, row(), make)


def by_rows_and_columns(runtime: Runtime) -> Found:
    """An optimizer whose moments are of whole rows and columns of a parameter."""
    return train(runtime, row(), lambda parameters: Adafactor(parameters, lr=0.03))


def by_whole_matrices(runtime: Runtime) -> Found:
    """Muon, which makes each matrix orthogonal: whoever owns one has all of it."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        every = list(parameters)
        others = {"params": [one for one in every if one.ndim < 2], "use_muon": False}
        matrices = {"params": [one for one in every if one.ndim == 2]}
        # In fp32 the last bits of gradients, which are summed in another order, stay last bits.
        return Muon([matrices, others], lr=0.03, adjust_lr_fn="match_rms_adamw", ns_dtype=torch.float32)

    return train(runtime, row(), make, is_async=True, clip=0.5)


def in_few_bits(runtime: Runtime) -> Found:
    """Moments in bytes and in bf16."""
    found: Found = {}
    for kind in ("8bit", "bf16"):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 80), nn.Tanh(), nn.Linear(80, 80), nn.Linear(80, 3))
        make = partial(AdamW, lr=0.03, state=kind)
        found[kind] = train(runtime, layers, make, is_async=True, double_buffer=True)
    return found


def left_in_place(runtime: Runtime) -> Found:
    """Weights stay in storages of their own."""
    return train(runtime, row(), pin_model="off", is_async=True)


def scaled(runtime: Runtime) -> Found:
    """A scaler, and a step that is skipped for an infinity in one microbatch."""
    layers = row()
    model = wrapped(runtime, layers)
    optimizer = adamw(model.optim_parameters())
    scaler = GradScaler(init_scale=64.0, growth_interval=2, runtime=runtime)
    scales: list[float] = []

    def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return scaler.scale(square_error(outputs, labels))

    for number in range(5):
        x, y = batch(number)
        if number == 2:
            y[-1] = math.inf
        model.forward_backward((x,), label=y, loss_fn=loss_fn)
        model.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()))
        scaler.update()
        scales.append(scaler.get_scale())
    model.synchronize()
    return {"scales": torch.tensor(scales), "weights": weights(layers)}


def by_tokens(runtime: Runtime) -> Found:
    """A mean over the labels of the whole batch, most of which are in the first microbatches."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11))

    def summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    model = wrapped(runtime, layers)
    optimizer = adamw(model.optim_parameters())
    losses: list[torch.Tensor] = []
    for number in range(STEPS):
        tokens = torch.randint(11, (8, 6), generator=torch.Generator().manual_seed(number))
        labels = tokens.clone()
        labels[3:, 1:] = -100
        losses.append(model.forward_backward((tokens,), label=labels, loss_fn=token_mean(summed, shift=False)))
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    return {"losses": losses, "weights": weights(layers)}


def weights_written_between(runtime: Runtime) -> Found:
    """Weights are loaded while the result of an asynchronous step is on its way."""
    layers = row()
    model = wrapped(runtime, layers, double_buffer=True)
    optimizer = adamw(model.optim_parameters())
    losses: list[torch.Tensor] = []
    for number in range(4):
        x, y = batch(number)
        losses.append(model.forward_backward((x,), label=y, loss_fn=square_error))
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        if number == 1:
            # Its result is on its way, but calls do not read it yet.
            runtime.optimizer.wait()
            with torch.no_grad():
                layers[0].weight.mul_(0.5)
    model.synchronize()
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})
    losses.append(model.forward_backward((x,), label=y, loss_fn=square_error))
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    return {"losses": losses, "weights": weights(layers)}


def unfrozen_later(runtime: Runtime) -> Found:
    """More parameters are trained from the second step on; those before keep their owners."""
    layers = row()
    layers[0].requires_grad_(False)
    model = wrapped(runtime, layers)
    optimizer = adamw(model.optim_parameters())
    for number in range(STEPS):
        x, y = batch(number)
        model.forward_backward((x,), label=y, loss_fn=square_error)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        if not number:
            layers[0].requires_grad_()
            named = dict(model.optim_named_parameters())
            optimizer.add_param_group({"params": [named["0.weight"], named["0.bias"]]})
    return {"weights": weights(layers)}


def changed_after_the_optimizer(runtime: Runtime) -> Found:
    """What a step function changes after the optimizer's step, when results are on their way already."""
    return _stepped(runtime, lambda optimizer: (optimizer.step(), _shrink(optimizer)))


def _shrink(optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for parameter in optimizer.param_groups[0]["params"][1::2]:
            parameter.mul_(0.9)


def stepped_twice(runtime: Runtime) -> Found:
    """An optimizer steps twice with the same gradients."""
    return _stepped(runtime, lambda optimizer: (optimizer.step(), optimizer.step()))


def _stepped(runtime: Runtime, steps: Callable[[torch.optim.Optimizer], object]) -> Found:
    layers = row()
    model = wrapped(runtime, layers, double_buffer=True)
    optimizer = adamw(model.optim_parameters())
    losses: list[torch.Tensor] = []
    for number in range(STEPS):
        x, y = batch(number)
        losses.append(model.forward_backward((x,), label=y, loss_fn=square_error))
        model.step(lambda: (steps(optimizer), optimizer.zero_grad()))
    model.synchronize()
    return {"losses": losses, "weights": weights(layers)}


def saved_by_one(runtime: Runtime) -> Found:
    """Only the first machine reads the state dict, once nothing is left to publish."""
    layers = row()
    model = wrapped(runtime, layers)
    optimizer = adamw(model.optim_parameters())
    saved: Found = {}
    for number in range(STEPS):
        x, y = batch(number)
        model.forward_backward((x,), label=y, loss_fn=square_error)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        if number == 1:
            model.synchronize()
            # The others' is their own parameters'.
            is_first = runtime.group is None or runtime.group.rank == 0
            source = model.state_dict() if is_first else dict(layers.named_parameters())
            saved = {name: value.detach().clone() for name, value in source.items()}
    model.synchronize()
    return {"saved": saved, "weights": weights(layers)}


class Apart(nn.Module):
    """No row: its own forward adds, multiplies by a weight of its own and by one of a part, and drops out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2))
        self.second = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The outputs, and what the first part made of it."""
        h = self.first(x)
        out = h + nn.functional.dropout(self.second(h * self.scale), 0.2, self.training)
        return {"out": self.last(out + out @ self.second.weight), "h": h}


def taken_apart(runtime: Runtime) -> Found:
    """A model whose parts run on the devices, synchronously and asynchronously, with accumulation and clipping."""
    found: Found = {}
    for is_async, skipped in ((False, ()), (True, ("last",)), (True, ("second",))):
        torch.manual_seed(0)
        net = Apart()
        model = wrap_model_to_roundpipe(
            net,
            runtime=runtime,
            name="apart",
            skip_modules=[getattr(net, name) for name in skipped],
            lower_threshold=0,
            model_run_config=RoundPipeRunConfig(num_microbatch=5),
        )
        assert isinstance(model, AutoRoundPipe)
        assert model.parts
        optimizer = adamw(model.optim_parameters())
        losses: list[torch.Tensor] = []
        norms: list[torch.Tensor] = []

        def step(model: Any = model, optimizer: Any = optimizer, norms: Any = norms) -> None:
            norms.append(clip_grad_norm_(model.optim_parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()

        for number in range(2 * STEPS):
            x, y = batch(number)
            outputs = model(x)
            loss = square_error(outputs["out"], y) + outputs["h"].abs().mean()
            loss.backward()
            losses.append(loss.detach())
            if number % 2:
                model.step(step, is_async=is_async)
        model.synchronize()
        found[f"{is_async} {skipped}"] = {"losses": losses, "norms": norms, "weights": weights(net)}
    return found


class TimeFirst(nn.Module):
    """No row: takes samples first, and hands them to its encoder time first."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0)
        self.first = nn.Linear(4, 8)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Steps of samples (samples, steps, 4) to (samples, steps, 3)."""
        return self.last(self.encoder(self.first(x).transpose(0, 1)).transpose(0, 1))


def time_first(runtime: Runtime) -> Found:
    """A part that is split along its second dimension, as values show; fewer steps than samples, as many, more."""
    found: Found = {}
    for steps in (4, 6, 9):
        torch.manual_seed(0)
        net = TimeFirst()
        config = RoundPipeRunConfig(num_microbatch=4)
        model = wrap_model_to_roundpipe(
            net, False, runtime=runtime, name="time", lower_threshold=1, model_run_config=config
        )
        # Not Adam: the gradients of the keys' biases are rounding alone, which it would make as large as others.
        optimizer = SGD(model.optim_parameters(), lr=0.1)
        losses: list[torch.Tensor] = []
        # The fourth call tries anew.
        for number in range(5):
            generator = torch.Generator().manual_seed(number)
            x, y = (torch.randn(6, steps, width, generator=generator) for width in (4, 3))
            loss = square_error(model(x), y) / 100
            loss.backward()
            losses.append(loss.detach())
            model.step(lambda optimizer=optimizer: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        model.synchronize()
        plain = TimeFirst()
        plain.load_state_dict(weights(net))
        outputs = model(x)
        torch.testing.assert_close(outputs, plain(x))
        outputs.sum().backward()
        found[f"{steps} steps"] = {"losses": losses, "weights": weights(net), "outputs": outputs.detach()}
    return found


def forward_then_backward(runtime: Runtime) -> Found:
    """Two models in a row, and a loss outside of them."""
    layers = [row(dropout=0.2)[:3], row(dropout=0.2)[3:]]
    models = [wrapped(runtime, each) for each in layers]
    optimizers = [adamw(model.optim_parameters()) for model in models]
    losses: list[torch.Tensor] = []
    grads: list[torch.Tensor] = []
    for number in range(STEPS):
        x, y = batch(number)
        x.requires_grad_()
        loss = square_error(models[1](models[0](x)), y)
        loss.backward()
        losses.append(loss.detach())
        assert x.grad is not None
        grads.append(x.grad)
        for model, optimizer in zip(models, optimizers, strict=True):
            model.step(lambda one=optimizer: (one.step(), one.zero_grad()), is_async=False)
    return {"losses": losses, "grads": grads, "weights": [weights(each) for each in layers]}


def penalized(runtime: Runtime) -> Found:
    """A penalty on the weights outside of the engine, which all machines compute."""
    layers = row()
    model = wrapped(runtime, layers)
    optimizer = adamw(model.optim_parameters())
    for number in range(STEPS):
        x, y = batch(number)
        model.forward_backward((x,), label=y, loss_fn=square_error)
        layers[0].weight.square().sum().backward()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    return {"weights": weights(layers)}


def losses_alone(runtime: Runtime) -> Found:
    """Losses without backward, in both modes, beside those of training calls from the same generator."""
    layers = row(dropout=0.2)
    model = wrapped(runtime, layers)
    optimizer = adamw(model.optim_parameters())
    found: Found = {}
    for mode in ("train", "eval"):
        model.train(mode == "train")
        x, y = batch(0)
        torch.manual_seed(1)
        alone = model.loss((x.requires_grad_(),), label=y, loss_fn=several_errors)
        drawn = torch.get_rng_state()
        torch.manual_seed(1)
        wanted = model.forward_backward((x.detach(),), label=y, loss_fn=several_errors)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        found[mode] = {"alone": alone, "wanted": wanted, "drawn": drawn}
    return {**found, "weights": weights(layers)}


def several_errors(outputs: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """Two losses of a microbatch."""
    return [square_error(outputs, labels), (outputs - labels).abs().sum()]


TRAININGS: dict[str, Callable[[Runtime], Found]] = {
    training.__name__: training
    for training in (
        synchronous,
        synchronous_with_second_blocks,
        asynchronous,
        asynchronous_with_second_blocks,
        accumulated,
        never_dropped,
        frozen,
        adapters,
        tied,
        sometimes_unused,
        sixteen_bits,
        of_torch,
        by_rows_and_columns,
        by_whole_matrices,
        in_few_bits,
        left_in_place,
        scaled,
        by_tokens,
        losses_alone,
        weights_written_between,
        unfrozen_later,
        changed_after_the_optimizer,
        stepped_twice,
        saved_by_one,
        taken_apart,
        time_first,
        forward_then_backward,
        penalized,
    )
}


def run_all(runtime: Runtime) -> Found:
    """What each training finds, by its name."""
    return {name: training(runtime) for name, training in TRAININGS.items()}


def run_all_as_first_planned(runtime: Runtime) -> Found:
    """The same under plans that measured times do not change: they decide the order of sums."""
    with (
        mock.patch("rp_sched.replanning.replanner.TRIAL", sys.maxsize),
        mock.patch("rp_engine.planning.adaptive._SAMPLES", sys.maxsize),
    ):
        return run_all(runtime)
