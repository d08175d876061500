"""What goes wrong on one machine, or cannot be done on several; each returns the errors that it raised here."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

import rp_batch
import torch
from machine_trainings import Apart, adamw, batch, row, square_error, weights, wrapped
from roundpipe import GradScaler, RoundPipe, RoundPipeRunConfig, Runtime, wrap_model_to_roundpipe
from roundpipe.optim import clip_grad_norm_
from torch import nn

Found = list[str]


def _error(do: Callable[[], object]) -> str:
    """The class of the error and its words; none is a mistake of the test."""
    try:
        do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _rank(runtime: Runtime) -> int:
    return 0 if runtime.group is None else runtime.group.rank


def _call(model: RoundPipe, number: int = 0, microbatches: int = 5) -> torch.Tensor:
    x, y = batch(number)
    config = RoundPipeRunConfig(num_microbatch=microbatches)
    return model.forward_backward((x,), label=y, loss_fn=square_error, run_config=config)


class Fails(nn.Module):
    """Fails in forward or in backward, where it is told to; `at`: its microbatch starts with this number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.at, self.backward = 7.0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input, scaled."""
        is_here = bool(x[0, 0] == self.at)
        if is_here and not self.backward:
            raise ZeroDivisionError("in a layer")
        out = x * self.weight
        if is_here:
            out.register_hook(_raise)
        return out


# Set when the call whose backward fails has returned.
_RETURNED = Event()


def _raise(grad: torch.Tensor) -> None:  # noqa: ARG001 - a hook
    assert _RETURNED.wait(30)
    raise ZeroDivisionError("in backward")


def _with_failing_layer(runtime: Runtime, *, backward: bool) -> tuple[RoundPipe, nn.Sequential]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), Fails(), nn.Linear(4, 4), nn.Linear(4, 3))
    layers[1].backward = backward
    # Declared: a trial of the split would find that parts of a batch fail that does not fail in one piece.
    config = RoundPipeRunConfig(num_microbatch=5, split_input=((rp_batch.Split(),), {}))
    return RoundPipe(layers, runtime=runtime, name="m", model_run_config=config), layers


def _failing_batch(model: RoundPipe, layers: nn.Sequential) -> None:
    x, y = batch(0)
    with torch.no_grad():
        # The last microbatch, which the last machine has.
        layers[1].at = float((x[-1] @ layers[0].weight.T + layers[0].bias)[0])
    config = RoundPipeRunConfig(num_microbatch=9)
    model.forward_backward((x,), label=y, loss_fn=square_error, run_config=config)


def layer(runtime: Runtime) -> Found:
    """A layer fails on the last machine; after `zero_grad` all train on."""
    model, layers = _with_failing_layer(runtime, backward=False)
    optimizer = adamw(model.optim_parameters())

    first = _error(lambda: _failing_batch(model, layers))
    layers[1].at = 7.0
    again = _error(lambda: _call(model))
    model.zero_grad()
    _call(model)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    return [first, again, str(float(sum(value.double().sum() for value in weights(layers).values())))]


def backward(runtime: Runtime) -> Found:
    """Backward fails on the last machine after the call has returned: no machine publishes the step."""
    model, layers = _with_failing_layer(runtime, backward=True)
    optimizer = adamw(model.optim_parameters())
    before = weights(layers)

    def attempt() -> None:
        _failing_batch(model, layers)
        _RETURNED.set()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        model.synchronize()
        raise AssertionError("the step was taken")

    first = _error(attempt)
    layers[1].at = 7.0
    again = _error(lambda: _call(model))
    model.reset()
    same = all(torch.equal(before[name], value) for name, value in weights(layers).items())
    _call(model)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    return [first, again, str(same)]


def step_function(runtime: Runtime) -> Found:
    """A step function fails on machine 1 alone, before, between and after what the machines do together."""
    found: Found = []
    for place in range(3):
        layers = row()
        # With second blocks, results of the optimizer are on their way when it fails.
        model = wrapped(runtime, layers, double_buffer=place > 0)
        optimizer = adamw(model.optim_parameters())
        before = weights(layers)

        def step(model: RoundPipe = model, optimizer: Any = optimizer, place: int = place) -> None:
            for number in range(3):
                if number == place and _rank(runtime) == 1:
                    raise ZeroDivisionError(f"in the step function, {place}")
                if number == 0:
                    clip_grad_norm_(model.optim_parameters(), 1.0)
                if number == 1:
                    optimizer.step()

        _call(model)
        found.append(_error(lambda model=model, step=step: model.step(step, is_async=False)))
        found.append(_error(lambda model=model: _call(model)))
        model.reset()
        assert all(torch.equal(before[name], value) for name, value in weights(layers).items())
        _call(model)
        model.step(lambda optimizer=optimizer: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    return found


def other_microbatches(runtime: Runtime) -> Found:
    """Machine 1 has another number of microbatches."""
    model = wrapped(runtime, row())
    return [_error(lambda: _call(model, microbatches=5 + _rank(runtime)))]


def other_batch(runtime: Runtime) -> Found:
    """Machine 1 has another batch."""
    model = wrapped(runtime, row())
    return [_error(lambda: _call(model, number=_rank(runtime)))]


def other_seed(runtime: Runtime) -> Found:
    """Machine 1 draws other random numbers."""
    model = wrapped(runtime, row())
    torch.manual_seed(_rank(runtime))
    return [_error(lambda: _call(model))]


def other_weights(runtime: Runtime) -> Found:
    """Machine 1 has other weights."""
    layers = row()
    with torch.no_grad():
        layers[0].weight[0, 0] += 1e-7 * _rank(runtime)
    return [_error(lambda: wrapped(runtime, layers))]


def other_model(runtime: Runtime) -> Found:
    """Machine 1 trains fewer parameters."""
    layers = row()
    layers[0].weight.requires_grad_(_rank(runtime) == 0)
    return [_error(lambda: wrapped(runtime, layers))]


def other_mode(runtime: Runtime) -> Found:
    """Machine 1 has evaluated, and not gone back to training."""
    layers = row()
    model = wrapped(runtime, layers)
    layers.train(_rank(runtime) == 0)
    return [_error(lambda: _call(model))]


def other_autocast(runtime: Runtime) -> Found:
    """Machine 1 computes in bf16."""
    model = wrapped(runtime, row())
    with torch.autocast("cpu", torch.bfloat16, enabled=_rank(runtime) == 1):
        return [_error(lambda: _call(model))]


class Scaled(nn.Module):
    """Has an argument that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        """The layer's output, scaled."""
        return self.inner(x) * scale


def other_numbers(runtime: Runtime) -> Found:
    """Machine 1 is given another number beside the same tensors."""
    torch.manual_seed(0)
    model = wrapped(runtime, nn.Sequential(Scaled()))
    x, y = batch(0)
    return [_error(lambda: model.forward_backward((x, 1.0 + _rank(runtime)), label=y, loss_fn=square_error))]


def other_frozen(runtime: Runtime) -> Found:
    """Machine 1 writes to a frozen weight after wrapping."""
    layers = row()
    layers[0].requires_grad_(False)
    model = wrapped(runtime, layers)
    if _rank(runtime) == 1:
        with torch.no_grad():
            layers[0].weight.mul_(2)
    return [_error(lambda: _call(model))]


def other_values(runtime: Runtime) -> Found:
    """Each machine writes values of its own to a trained weight, or loads them."""
    found: Found = []
    for is_loaded in (False, True):
        layers = row()
        model = wrapped(runtime, layers)
        if is_loaded:
            model.load_state_dict({name: value * (2 + _rank(runtime)) for name, value in weights(layers).items()})
        else:
            with torch.no_grad():
                layers[0].weight.mul_(2 + _rank(runtime))
        found.append(_error(lambda model=model: _call(model)))
    return found


def other_order(runtime: Runtime) -> Found:
    """Machine 1 steps two models of one name the other way round."""
    models = [wrapped(runtime, row()) for _ in range(2)]
    for model in models:
        _call(model)
    first = models[_rank(runtime)]
    return [_error(lambda: first.step(lambda: None, is_async=False))]


def other_settings(runtime: Runtime) -> Found:
    """Machine 1 steps with another learning rate, then other parameters; nobody publishes that."""
    found: Found = []
    for is_rate in (True, False):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
        model = wrapped(runtime, layers)
        every = list(model.optim_parameters())
        first = 2 * _rank(runtime)
        optimizer = adamw(every if is_rate else every[first : first + 2])
        if is_rate and _rank(runtime) == 1:
            optimizer.param_groups[0]["lr"] *= 2
        before = weights(layers)
        _call(model)
        found.append(_error(lambda model=model, one=optimizer: model.step(one.step, is_async=False)))
        model.reset()
        assert all(torch.equal(before[name], value) for name, value in weights(layers).items())
        # What was told of the failed step is forgotten.
        _call(model)
        optimizer = adamw(model.optim_parameters())
        model.step(optimizer.step, is_async=False)
    return found


def optimizer_states(runtime: Runtime) -> Found:
    """An optimizer's state dict has the states of a machine's own parameters only."""
    found: Found = []
    for make in (adamw, torch.optim.SGD):
        model = wrapped(runtime, row())
        optimizer = make(model.optim_parameters())
        _call(model)
        model.step(optimizer.step, is_async=False)
        found.append(_error(optimizer.state_dict))
    return found


def other_step(runtime: Runtime) -> Found:
    """Machine 1 takes a synchronous step."""
    model = wrapped(runtime, row())
    _call(model)
    return [_error(lambda: model.step(lambda: None, is_async=_rank(runtime) == 0))]


def other_calls(runtime: Runtime) -> Found:
    """Machine 0 synchronizes while a result is not published, and the others train on."""
    model = wrapped(runtime, row())
    optimizer = adamw(model.optim_parameters())
    _call(model)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    return [_error(model.synchronize if _rank(runtime) == 0 else lambda: _call(model))]


def other_norms(runtime: Runtime) -> Found:
    """Machine 1 does not clip."""
    model = wrapped(runtime, row())
    optimizer = adamw(model.optim_parameters())

    def step() -> None:
        if _rank(runtime) != 1:
            clip_grad_norm_(model.optim_parameters(), 1.0)
        optimizer.step()

    _call(model)
    return [_error(lambda: model.step(step, is_async=False))]


def masters_changed_late(runtime: Runtime) -> Found:
    """A master is changed after its step, when the others have its result."""
    model = wrapped(runtime, row(), double_buffer=True)
    optimizer = adamw(model.optim_parameters())
    _call(model)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    runtime.optimizer.wait()
    with torch.no_grad():
        for master in model.optim_parameters():
            master.mul_(2)
    return [_error(model.synchronize)]


def masters_changed_late_on_one(runtime: Runtime) -> Found:
    """Machine 1 alone changes masters after their step, and then begins another step."""
    model = wrapped(runtime, row(), double_buffer=True)
    optimizer = adamw(model.optim_parameters())
    _call(model)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    runtime.optimizer.wait()
    with torch.no_grad():
        for master in model.optim_parameters() if _rank(runtime) else ():
            master.mul_(2)
    _call(model)
    return [
        _error(
            lambda: model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False),
        )
    ]


def other_kinds_of_state(runtime: Runtime) -> Found:
    """Machine 1 has masters of another dtype, or second blocks, for the same weights."""
    return [
        _error(lambda: wrapped(runtime, row().bfloat16(), optim_dtype=(None, torch.float32)[_rank(runtime)])),
        _error(lambda: wrapped(runtime, row(), double_buffer=_rank(runtime) == 1)),
    ]


def other_scale(runtime: Runtime) -> Found:
    """Machine 1 scales its losses otherwise; nobody publishes that."""
    layers = row()
    model = wrapped(runtime, layers)
    optimizer = adamw(model.optim_parameters())
    scaler = GradScaler(init_scale=64.0 * (1 + _rank(runtime)), runtime=runtime)
    x, y = batch(0)
    before = weights(layers)
    model.forward_backward((x,), label=y, loss_fn=lambda *both: scaler.scale(square_error(*both)))
    found = _error(lambda: model.step(lambda: scaler.step(optimizer), is_async=False))
    model.reset()
    assert all(torch.equal(before[name], value) for name, value in weights(layers).items())
    return [found]


def other_clipping(runtime: Runtime) -> Found:
    """Machine 1 clips to another norm."""
    model = wrapped(runtime, row())
    _call(model)
    return [
        _error(
            lambda: model.step(
                lambda: clip_grad_norm_(model.optim_parameters(), 1.0 + _rank(runtime)), is_async=False
            )
        )
    ]


def dropped_on_one(runtime: Runtime) -> Found:
    """Machine 1 alone drops gradients, before a step or between calls; after all have, they train on."""
    model = wrapped(runtime, row())
    found: Found = []
    for attempt in (lambda: model.step(lambda: None, is_async=False), lambda: _call(model)):
        _call(model)
        if _rank(runtime) == 1:
            model.zero_grad()
        found.append(_error(attempt))
        model.zero_grad()
    _call(model)
    return found


def frozen_on_one(runtime: Runtime) -> Found:
    """Machine 1 alone freezes a layer while a step's result is not published, which each would publish first."""
    layers = row()
    model = wrapped(runtime, layers, double_buffer=False)
    optimizer = adamw(model.optim_parameters())
    _call(model)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    layers[0].requires_grad_(_rank(runtime) == 0)
    found = [_error(lambda: _call(model))]
    layers[0].requires_grad_()
    return found


def bad_arguments(runtime: Runtime) -> Found:
    """Machine 1's labels do not fit, which its own thread notices; then all train on."""
    model = wrapped(runtime, row())
    x, y = batch(0)
    labels = y[: 9 - 4 * _rank(runtime)]
    found = [_error(lambda: model.forward_backward((x,), label=labels, loss_fn=square_error))]
    model.zero_grad()
    _call(model)
    return found


def decided_otherwise(runtime: Runtime) -> Found:
    """Machine 1 has no room for second blocks: then none has any."""
    layers = row()
    model = wrapped(runtime, layers)
    optimizer = adamw(model.optim_parameters())
    model.engine.host.state.double_buffer = _rank(runtime) == 0

    def fail() -> None:
        optimizer.step()
        if _rank(runtime) == 1:
            raise ZeroDivisionError("in the step function")

    for is_async in (True, False):
        _call(model)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
    _call(model)
    found = [
        _error(lambda: model.step(fail, is_async=False)),
        f"{model.memory_report(optimizer).second_blocks_bytes} bytes",
    ]
    model.reset()
    _call(model)
    return found


def taken_apart(runtime: Runtime) -> Found:
    """The model's own forward fails on machine 1, between its parts or behind them; then the batch differs."""
    torch.manual_seed(0)
    net = Apart()
    config = RoundPipeRunConfig(num_microbatch=5)
    model = wrap_model_to_roundpipe(net, runtime=runtime, name="m", lower_threshold=0, model_run_config=config)
    optimizer = adamw(model.optim_parameters())
    found: Found = []

    def attempt(number: int) -> None:
        x, y = batch(number)
        square_error(model(x)["out"], y).backward()

    for part in (net.second, net.last):
        # A hook on the host, in the midst of the model's own forward.
        handle = part.register_forward_pre_hook(_raise_here)
        if _rank(runtime) == 0:
            handle.remove()
        found.append(_error(lambda: attempt(0)))
        handle.remove()
        model.zero_grad()
    found.append(_error(lambda: attempt(_rank(runtime))))
    model.zero_grad()
    attempt(0)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    return [*found, f"{sum(value.double().sum() for value in weights(net).values())}"]


class Mixes(nn.Module):
    """Subtracts the mean of the batch, if it is told to."""

    def __init__(self, *, mixes: bool = True) -> None:
        super().__init__()
        self.linear, self.mixes = nn.Linear(4, 3), mixes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input (samples, 4), scaled and shifted (samples, 3)."""
        y = self.linear(x)
        return y - y.mean(0) if self.mixes else y


class Holds(nn.Module):
    """No row: runs a part between a sum and a sum."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(4, 4), part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the part makes of the input and a projection of it."""
        return self.part(x + self.first(x)) + 1.0


class Positions(nn.Module):
    """Makes something of a number, which is no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 3)

    def forward(self, count: int) -> torch.Tensor:
        """Rows for so many samples."""
        return self.table(torch.arange(count))


class Adds(nn.Module):
    """No row: adds what a part makes of the size of the batch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(4, 3), Positions()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A projection of the input, and the rows of its samples."""
        return self.first(x) + self.part(len(x))


def in_one_piece(runtime: Runtime) -> Found:
    """A part and a row that cannot be split, twice; one that can be on machine 0 alone; one without a batch.

    Then each machine evaluates a part in one piece, and a part that is left on the host is trained.
    """

    def training(net: nn.Module, **options: Any) -> Callable[[], None]:
        config = RoundPipeRunConfig(num_microbatch=3)
        sizes = {"lower_threshold": 1, "upper_threshold": 1 << 30}
        model = wrap_model_to_roundpipe(
            net, False, runtime=runtime, name="m", model_run_config=config, **{**sizes, **options}
        )
        optimizer = adamw(model.optim_parameters())
        x, y = batch(0)

        def step() -> None:
            try:
                square_error(model(x), y).backward()
                model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
                model.synchronize()
            finally:
                model.zero_grad()

        return step

    torch.manual_seed(0)
    found: Found = []
    for net in (Holds(Mixes()), nn.Sequential(nn.Linear(4, 4), Mixes())):
        step = training(net)
        found += [_error(step), _error(step)]
    found.append(_error(training(Holds(Mixes(mixes=_rank(runtime) == 1)))))
    found.append(_error(training(Adds())))
    held = Holds(Mixes())
    training(held, skip_modules=[held.part])()
    return [*found, f"{sum(value.double().sum() for value in weights(held).values())}"]


def _raise_here(*_: object) -> None:
    raise ZeroDivisionError("in the model's own forward")


def forward_and_backward(runtime: Runtime) -> Found:
    """A layer of machine 1 fails in forward, then in backward; its labels differ; outputs stay in microbatches."""
    model, layers = _with_failing_layer(runtime, backward=False)
    x, y = batch(0)
    _RETURNED.set()
    found: Found = []
    for backward in (False, True):
        layers[1].backward = backward
        with torch.no_grad():
            # The last microbatch, which the last machine has.
            layers[1].at = float((x[-1] @ layers[0].weight.T + layers[0].bias)[0])
        config = RoundPipeRunConfig(num_microbatch=9)
        found.append(
            _error(lambda config=config: square_error(model(x, roundpipe_run_config=config), y).backward())
        )
        layers[1].at = 7.0
        model.reset()
    found.append(_error(lambda: square_error(model(x), y * (1 + _rank(runtime))).backward()))
    model.reset()
    packed = RoundPipeRunConfig(num_microbatch=5, merge_output=False)
    found.append(_error(lambda: model(x, roundpipe_run_config=packed)))
    square_error(model(x), y).backward()
    return found


# What works on one machine alone


def gradients_read(runtime: Runtime) -> Found:
    """A step function reads gradients, which are divided between the machines."""
    found: Found = []
    for read in (
        lambda model: next(model.optim_parameters()).grad,
        lambda model: nn.utils.clip_grad_norm_(model.optim_parameters(), 1.0),
    ):
        model = wrapped(runtime, row())
        _call(model)
        found.append(_error(lambda model=model, read=read: model.step(lambda: read(model), is_async=False)))
    return found


def outputs(runtime: Runtime) -> Found:
    """Outputs of the whole batch."""
    model = wrapped(runtime, row())
    x, y = batch(0)
    return [_error(lambda: model.forward_backward((x,), label=y, loss_fn=square_error, return_outputs=True))]


def inputs_with_gradients(runtime: Runtime) -> Found:
    """Gradients of inputs."""
    model = wrapped(runtime, row())
    x, y = batch(0)
    return [_error(lambda: model.forward_backward((x.requires_grad_(),), label=y, loss_fn=square_error))]


def written_buffers(runtime: Runtime) -> Found:
    """Batch norm's averages go from one microbatch to the next."""
    found: Found = []
    for call in (lambda model: _call(model, microbatches=4), lambda model: model(batch(0)[0])):
        layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        model = wrapped(runtime, layers, microbatches=4)
        found.append(_error(lambda call=call, model=model: call(model)))
    return found


def other_losses(runtime: Runtime) -> Found:
    """Machine 1's loss function returns two losses, of the same batch; then all train on."""
    model = wrapped(runtime, row())
    x, y = batch(0)

    def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        return [square_error(outputs, labels)] * (1 + _rank(runtime))

    found = [_error(lambda: model.forward_backward((x,), label=y, loss_fn=loss_fn))]
    model.zero_grad()
    _call(model)
    return found


def loss_fails(runtime: Runtime) -> Found:
    """Machine 1 fails in a loss without backward, which it notices before or while it runs; then all train on."""
    found: Found = []
    x, y = batch(0)
    labels = y[: 9 - 4 * _rank(runtime)]
    each = RoundPipeRunConfig(num_microbatch=9)
    for mode in ("eval", "train"):
        model, layers = _with_failing_layer(runtime, backward=False)
        model.train(mode == "train")
        found.append(_error(lambda model=model: model.loss((x,), None, labels, square_error)))
        with torch.no_grad():
            layers[1].at = float((x[-1] @ layers[0].weight.T + layers[0].bias)[0])
        found.append(_error(lambda model=model: model.loss((x,), None, y, square_error, run_config=each)))
        layers[1].at = 7.0
        before = torch.get_rng_state()
        alone = model.loss((x,), None, y, square_error)
        # The machines compare it with each other in the call, and what they have drawn.
        assert torch.equal(before, torch.get_rng_state()) == (mode == "eval")
        assert torch.equal(alone, _call(model))
    return found


def loss_otherwise(runtime: Runtime) -> Found:
    """What machines must do alike, or cannot do, in a loss without backward."""
    model, x, y = wrapped(runtime, row()), *batch(0)
    other, labels = batch(_rank(runtime))
    found = [
        _error(lambda: model.loss((other,), None, labels, square_error)),
        _error(lambda: model.loss((x,), None, y, square_error, return_outputs=True)),
        _error(lambda: model.loss((x[:1],), None, y[:1], square_error)),
    ]
    fresh = wrapped(runtime, row()).train(_rank(runtime) == 0)
    found.append(_error(lambda: fresh.loss((x,), None, y, square_error)))
    # Only the machine in training mode has drawn.
    torch.manual_seed(0)
    norms = wrapped(runtime, nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), microbatches=4)
    found.append(_error(lambda: norms.loss((x,), None, y, square_error)))
    found.append(_error(lambda: norms.eval().loss((x,), None, y, square_error)))
    return found


def too_few_microbatches(runtime: Runtime) -> Found:
    """Fewer microbatches than machines."""
    model = wrapped(runtime, row())
    return [_error(lambda: _call(model, microbatches=1))]


MISTAKES: dict[str, Callable[[Runtime], Found]] = {
    mistake.__name__: mistake
    for mistake in (
        layer,
        backward,
        step_function,
        other_microbatches,
        other_batch,
        other_seed,
        other_weights,
        other_model,
        other_mode,
        other_autocast,
        other_numbers,
        other_frozen,
        other_values,
        other_order,
        other_settings,
        optimizer_states,
        other_step,
        other_calls,
        other_norms,
        other_kinds_of_state,
        other_scale,
        other_clipping,
        dropped_on_one,
        frozen_on_one,
        bad_arguments,
        decided_otherwise,
        taken_apart,
        forward_and_backward,
        masters_changed_late,
        masters_changed_late_on_one,
        gradients_read,
        outputs,
        inputs_with_gradients,
        written_buffers,
        other_losses,
        too_few_microbatches,
        loss_fails,
        loss_otherwise,
        in_one_piece,
    )
}


def make_all(runtime: Runtime) -> dict[str, Found]:
    """The errors of each mistake, one after another in the same processes: every one leaves the group whole."""
    found: dict[str, Found] = {}
    for name, mistake in MISTAKES.items():
        torch.manual_seed(0)
        found[name] = mistake(runtime)
    return found
