"""Which weights a call reads and which gradients a step does, against a written-out loop with the same delay."""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import roundpipe
import torch
from plain import assert_near, batch, gradients, mlp, plans, square_error, train_call, twin, weights
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, Stale, doing_optimizer
from torch import nn

pytestmark = pytest.mark.usefixtures("small_departures")

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Kind = Literal["async", "sync", "skip", "keep", "none"]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "roundpipe": lambda parameters: roundpipe.optim.AdamW(parameters, lr=1e-2),
    "torch": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


@dataclass(frozen=True)
class Turn:
    """Some calls, then a step of a kind, then perhaps ``synchronize()``."""

    calls: int
    kind: Kind
    synchronize: bool = False
    evaluate: bool = False


def schedule(name: str, steps: int = 20) -> list[Turn]:
    """Turns by name; drawn ones are the same at each run."""
    draw = random.Random(name)
    match name:
        case "asynchronous":
            return [Turn(1, "async") for _ in range(steps)]
        case "synchronous":
            return [Turn(1, "sync") for _ in range(steps)]
        case "mixed":
            return [Turn(1, draw.choice(["async", "sync"])) for _ in range(steps)]
        case "synchronized":
            return [Turn(1, "async", synchronize=draw.random() < 0.4) for _ in range(steps)]
        case "accumulated":
            return [Turn(draw.randint(1, 3), "async") for _ in range(steps)]
        case "skipped":
            return [Turn(1, draw.choice(["async", "async", "skip"])) for _ in range(steps)]
        case _:
            kinds: list[Kind] = ["async", "async", "sync", "skip", "keep", "none"]
            return [
                Turn(draw.randint(0, 2), draw.choice(kinds), draw.random() < 0.2, draw.random() < 0.3)
                for _ in range(steps)
            ]


SCHEDULES = ["asynchronous", "synchronous", "mixed", "synchronized", "accumulated", "skipped", "anything"]


@dataclass
class Delayed:
    """Plain PyTorch, and the delay written out: `weights` is what calls read, `masters` what steps write."""

    weights: nn.Module
    optimizer_of: MakeOptimizer
    microbatches: int
    dtype: torch.dtype = torch.float32
    waiting: bool = False
    masters: list[nn.Parameter] = field(default_factory=list)
    sums: list[torch.Tensor | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.masters = [nn.Parameter(p.detach().to(self.dtype, copy=True)) for p in self.weights.parameters()]
        self.sums = [None for _ in self.masters]
        self.optimizer = self.optimizer_of(self.masters)

    def publish(self) -> None:
        with torch.no_grad():
            for weight, master in zip(self.weights.parameters(), self.masters, strict=True):
                weight.copy_(master)
        self.waiting = False

    def call(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = train_call(self.weights, x, y, microbatches=self.microbatches)
        for i, weight in enumerate(self.weights.parameters()):
            if weight.grad is not None:
                grad = weight.grad.to(self.dtype)
                self.sums[i] = grad if self.sums[i] is None else self.sums[i] + grad
            weight.grad = None
        return loss

    def step(self, kind: Kind) -> None:
        if kind == "none":
            return
        if self.waiting:
            self.publish()
        for master, grad in zip(self.masters, self.sums, strict=True):
            master.grad = grad
        if kind != "skip":
            self.optimizer.step()
        self.sums = [None if kind != "keep" else grad for grad in self.sums]
        self.waiting = True
        if kind == "sync":
            self.publish()

    def synchronize(self) -> None:
        if self.waiting:
            self.publish()


def drive(
    model: RoundPipe, optimizer: torch.optim.Optimizer, truth: Delayed | None, turns: list[Turn], tolerance: float
) -> list[torch.Tensor]:
    """All turns on both, comparing the losses; the losses."""

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    bodies = {"async": update, "sync": update, "skip": optimizer.zero_grad, "keep": optimizer.step}
    losses: list[torch.Tensor] = []
    dtype = next(model.model.parameters()).dtype
    for number, turn in enumerate(turns):
        for call in range(turn.calls):
            x, y = (tensor.to(dtype) for tensor in batch(6, seed=10 * number + call))
            losses.append(model.forward_backward(input_args=(x,), label=y, loss_fn=square_error))
            if truth is not None:
                assert_near(losses[-1], truth.call(x, y), tolerance, f"loss {call} of turn {number}, {turn}")
        if turn.evaluate and truth is not None:
            with torch.no_grad():
                assert_near(model(x := batch(5)[0].to(dtype)), truth.weights(x), tolerance, f"evaluation {number}")
        if turn.kind != "none":
            model.step(bodies[turn.kind], is_async=turn.kind != "sync")
        if turn.synchronize:
            model.synchronize()
        if truth is not None:
            truth.step(turn.kind)
            if turn.synchronize:
                truth.synchronize()
    model.synchronize()
    if truth is not None:
        truth.synchronize()
    return losses


# What the order means


@pytest.mark.pairwise
@pytest.mark.parametrize("optimizer_name", ["roundpipe", "torch"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_twenty_steps_agree_with_plain_pytorch_one_step_late(
    runtime: Runtime, name: str, optimizer_name: str
) -> None:
    layers = mlp()
    plan = list(plans(5, 3).values())[SCHEDULES.index(name)]
    truth = Delayed(twin(layers), OPTIMIZERS[optimizer_name], microbatches=3)
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plan)
    model = RoundPipe(layers, runtime=runtime, model_run_config=config)
    optimizer = OPTIMIZERS[optimizer_name](model.optim_parameters())
    drive(model, optimizer, truth, schedule(name), 1e-4)
    assert_near(weights(layers), weights(truth.weights), 1e-4)
    assert_near(list(model.optim_parameters()), truth.masters, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("plan_name", ["one layer a stage", "tail divided", "all fused"])
def test_bf16_weights_with_fp32_masters_follow_plain_pytorch(runtime: Runtime, plan_name: str) -> None:
    layers = mlp().to(torch.bfloat16)
    truth = Delayed(twin(layers), OPTIMIZERS["sgd"], microbatches=3, dtype=torch.float32)
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plans(5, 3)[plan_name])
    model = RoundPipe(layers, runtime=runtime, model_run_config=config, optim_dtype=torch.float32)
    optimizer = OPTIMIZERS["sgd"](model.optim_parameters())
    assert all(master.dtype == torch.float32 for master in model.optim_parameters())
    drive(model, optimizer, truth, schedule("anything"), 5e-2)
    assert_near(list(model.optim_parameters()), truth.masters, 3e-2)
    for weight, master in zip(layers.parameters(), model.optim_parameters(), strict=True):
        assert torch.equal(weight, master.to(torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plan_name", ["one layer a stage", "microbatches divided", "cut differently"])
def test_one_plan_gives_the_same_bits_on_any_number_of_devices(plan_name: str, dtype: torch.dtype) -> None:
    def run(devices: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        layers = mlp().to(dtype)
        config = RoundPipeRunConfig(num_microbatch=4, execute_plan=plans(5, 4)[plan_name])
        with Runtime(devices) as runtime:
            model = RoundPipe(layers, runtime=runtime, model_run_config=config, optim_dtype=torch.float32)
            optimizer = OPTIMIZERS["roundpipe"](model.optim_parameters())
            losses = drive(model, optimizer, None, schedule("anything"), 0)
            return losses, list(model.optim_parameters())

    wanted, wanted_masters = run("cpu:1")
    for devices in ("cpu:2", "cpu:4"):
        losses, masters = run(devices)
        assert all(map(torch.equal, losses, wanted))
        assert all(map(torch.equal, masters, wanted_masters))


def test_an_asynchronous_step_holds_no_call_back(runtime: Runtime) -> None:
    layers = mlp()
    model = RoundPipe(layers, runtime=runtime)
    x, y = batch(6)
    before = twin(layers)(x)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    go_on = threading.Event()

    def slow() -> None:
        assert go_on.wait(30)
        optimizer.step()
        optimizer.zero_grad()

    model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.step(slow)
    with torch.no_grad():
        found = model(x)
    go_on.set()
    assert_near(found, before, 1e-5)
    model.synchronize()
    with torch.no_grad():
        assert not torch.allclose(model(x), before)


def test_step_functions_take_arguments_and_run_in_order_on_one_thread(two: Runtime) -> None:
    model = RoundPipe(mlp(), runtime=two)
    seen: list[Any] = []

    def note(*args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs, threading.get_ident(), doing_optimizer()))

    model.step(note, True, 1, key=2)
    model.step(note, True, 3)
    model.step(note, False)
    assert [entry[:2] for entry in seen] == [((1,), {"key": 2}), ((3,), {}), ((), {})]
    assert len({entry[2] for entry in seen}) == 1
    assert seen[0][2] != threading.get_ident()
    assert all(entry[3] for entry in seen)


# Gradients between backward and step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_read_after_synchronize_are_still_used(runtime: Runtime, dtype: torch.dtype) -> None:
    layers = mlp().to(dtype)
    truth = Delayed(twin(layers), OPTIMIZERS["sgd"], microbatches=2)
    model = RoundPipe(
        layers,
        runtime=runtime,
        optim_dtype=torch.float32,
        model_run_config=RoundPipeRunConfig(num_microbatch=2),
    )
    optimizer = OPTIMIZERS["sgd"](model.optim_parameters())
    x, y = (tensor.to(dtype) for tensor in batch(6))
    near = 1e-5 if dtype == torch.float32 else 3e-2
    for _ in range(3):
        for _ in range(2):
            model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
            truth.call(x, y)
            model.synchronize()
            truth.synchronize()
            assert_near([p.grad for p in layers.parameters()], truth.sums, near)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        truth.step("async")
    model.synchronize()
    truth.synchronize()
    assert all(p.grad is None for p in layers.parameters())
    assert_near(list(model.optim_parameters()), truth.masters, near)


def test_what_is_done_to_shown_gradients_counts(runtime: Runtime) -> None:
    layers = mlp()
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime)
    x, y = batch(6)
    model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.synchronize()
    train_call(truth, x, y, microbatches=1)
    for net in (layers, truth):
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        net[0].weight.grad = None
        net[2].bias.grad = torch.ones(6)
    seen: list[torch.Tensor | None] = []
    model.step(lambda: seen.extend(p.grad if p.grad is None else p.grad.clone() for p in model.parameters()))
    model.synchronize()
    assert_near(seen, gradients(truth).values(), 1e-5)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_what_calls_added(runtime: Runtime, set_to_none: bool) -> None:
    layers = mlp()
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime)
    x, y = batch(6)
    model.forward_backward(input_args=(2 * x,), label=y, loss_fn=square_error)
    model.zero_grad(set_to_none)
    model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.synchronize()
    train_call(truth, x, y, microbatches=1)
    assert_near(gradients(layers), gradients(truth), 1e-5)
    model.zero_grad(set_to_none)
    assert all(p.grad is None for p in layers.parameters())


def test_gradients_that_a_step_leaves_are_added_to(runtime: Runtime) -> None:
    layers = mlp().to(torch.bfloat16)
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime, optim_dtype=torch.float32)
    x, y = (tensor.bfloat16() for tensor in batch(6))
    for _ in range(2):
        model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
        model.step(lambda: [p.grad.mul_(2) for p in model.parameters()])
    model.synchronize()
    train_call(truth, x, y, microbatches=1)
    wanted = [6 * p.grad.float() for p in truth.parameters()]
    assert_near([p.grad for p in layers.parameters()], wanted, 3e-2)


def test_clipping_in_a_step_function_works_on_the_optimizers_parameters(runtime: Runtime) -> None:
    layers = mlp()
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    x, y = batch(6)

    def clipped() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.step(clipped, is_async=False)
    train_call(truth, x, y, microbatches=1)
    torch.nn.utils.clip_grad_norm_(truth.parameters(), 0.1)
    torch.optim.SGD(truth.parameters(), lr=0.1).step()
    model.synchronize()
    assert_near(weights(layers), weights(truth), 1e-5)


# Parameters


def test_parameters_are_the_optimizers_inside_a_step_and_warn_outside(two: Runtime) -> None:
    layers = mlp().to(torch.bfloat16)
    model = RoundPipe(layers, runtime=two, optim_dtype=torch.float32)
    inside: list[nn.Parameter] = []
    named: dict[str, nn.Parameter] = {}
    model.step(lambda: (inside.extend(model.parameters()), named.update(model.named_parameters())), is_async=False)
    assert all(a is b for a, b in zip(inside, model.optim_parameters(), strict=True))
    assert list(named) == [name for name, _ in layers.named_parameters()]
    with pytest.warns(UserWarning, match="optim_parameters"):
        outside = list(model.parameters())
    assert all(a is b for a, b in zip(outside, layers.parameters(), strict=True))


def test_an_optimizer_over_the_raw_parameters_works_after_synchronize(runtime: Runtime) -> None:
    layers = mlp()
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime)
    raw = OPTIMIZERS["torch"](layers.parameters())
    plain = OPTIMIZERS["torch"](truth.parameters())
    for seed in range(5):
        x, y = batch(6, seed)
        loss = model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
        model.synchronize()
        raw.step()
        raw.zero_grad()
        assert_near(loss, train_call(truth, x, y, microbatches=1), 1e-4)
        plain.step()
        plain.zero_grad()
    model.synchronize()
    assert_near(weights(layers), weights(truth), 1e-4)


@pytest.mark.pairwise
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("through", ["model", "assign", "layers"])
def test_loaded_weights_reach_the_masters(runtime: Runtime, when: str, through: str) -> None:
    layers, other = mlp(seed=1), mlp(seed=2)
    model = RoundPipe(layers, runtime=runtime)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1) if when == "after" else None
    if optimizer is not None:
        x, y = batch(6)
        model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    if through != "layers":
        state = {f"model.{name}": value for name, value in twin(other).state_dict().items()}
        model.load_state_dict(state, assign=through == "assign")
    else:
        model.synchronize()
        layers.load_state_dict(other.state_dict())
    optimizer = optimizer or torch.optim.SGD(model.optim_parameters(), lr=0.1)
    truth = Delayed(twin(other), lambda p: torch.optim.SGD(p, lr=0.1), microbatches=1)
    for seed in range(3):
        x, y = batch(6, seed)
        loss = model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
        assert_near(loss, truth.call(x, y), 1e-5)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        truth.step("async")
    model.synchronize()
    truth.synchronize()
    assert_near(weights(layers), weights(truth.weights), 1e-5)


class Tied(nn.Module):
    """Uses a weight that another layer has, too."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def tied_layers() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Linear(4, 6)
    return nn.Sequential(first, nn.Tanh(), Tied(first.weight), nn.Linear(4, 3))


def test_assigned_weights_stay_tied_and_are_trained_by_the_optimizer_that_was_there(runtime: Runtime) -> None:
    layers, truth = tied_layers(), tied_layers()
    model = RoundPipe(layers, runtime=runtime)
    ours = torch.optim.SGD(model.optim_parameters(), lr=1e-3)
    state = {name: torch.randn(value.shape) for name, value in truth.state_dict().items()}
    state["2.weight"] = state["0.weight"]
    truth.load_state_dict(state)
    plain = torch.optim.SGD(truth.parameters(), lr=1e-3)
    model.load_state_dict({f"model.{name}": value.clone() for name, value in state.items()}, assign=True)
    assert layers[0].weight is layers[2].weight
    for seed in range(3):
        x, y = batch(6, seed)
        loss = model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
        model.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
        assert_near(loss, train_call(truth, x, y, microbatches=1), 1e-5)
        plain.step()
        plain.zero_grad()
    model.synchronize()
    assert_near(weights(layers), weights(truth), 1e-5)


@pytest.mark.parametrize("pin", ["alloc", "register", "off"])
def test_weights_train_alike_wherever_they_lie(runtime: Runtime, pin: str, tmp_path: Path) -> None:
    layers, truth = mlp(), mlp()
    model = RoundPipe(layers, runtime=runtime, pin_model=pin)
    torch.save({f"model.{name}": value for name, value in truth.state_dict().items()}, tmp_path / "state")
    mapped = torch.load(tmp_path / "state", mmap=True)
    model.load_state_dict(mapped, assign=True)
    ours = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    plain = torch.optim.SGD(truth.parameters(), lr=0.1)
    for seed in range(3):
        x, y = batch(6, seed)
        loss = model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
        model.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
        assert_near(loss, train_call(truth, x, y, microbatches=1), 1e-4)
        plain.step()
        plain.zero_grad()
    model.synchronize()
    assert_near(weights(layers), weights(truth), 1e-4)
    stayed = layers[0].weight.untyped_storage().data_ptr() == mapped["model.0.weight"].untyped_storage().data_ptr()
    assert stayed == (pin != "alloc")


def test_loading_some_weights_leaves_the_others_as_the_last_step_made_them(two: Runtime) -> None:
    layers = mlp().to(torch.bfloat16)
    model = RoundPipe(layers, runtime=two, optim_dtype=torch.float32)
    x, y = (tensor.bfloat16() for tensor in batch(6))
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=1e-3)
    model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    wanted = {}
    model.step(lambda: wanted.update((n, p.detach().clone()) for n, p in model.named_parameters()))
    model.load_state_dict({"model.0.weight": torch.ones(6, 4)}, strict=False)
    model.synchronize()
    wanted["0.weight"] = torch.ones(6, 4)
    found = dict(model.optim_named_parameters())
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert all(torch.equal(weight, wanted[name].bfloat16()) for name, weight in layers.named_parameters())


@pytest.mark.parametrize("asked", ["wrapper", "layers"])
def test_a_state_dict_has_the_last_steps_result_and_loads_into_plain_pytorch(runtime: Runtime, asked: str) -> None:
    layers = mlp()
    model = RoundPipe(layers, runtime=runtime)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    x, y = batch(6)
    model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    state = (model if asked == "wrapper" else layers).state_dict()
    assert list(state) == [name for name, _ in layers.named_parameters()]
    for name, master in model.optim_named_parameters():
        assert torch.equal(state[name], master)
    fresh = mlp(seed=9)
    fresh.load_state_dict(state)
    assert_near(model(x), fresh(x), 1e-5)


def test_a_state_dict_after_the_runtime_was_closed_says_that_it_lags_behind() -> None:
    layers = mlp()
    with Runtime("cpu:1") as runtime:
        model = RoundPipe(layers, runtime=runtime)
        model.step(lambda: None)
    with pytest.warns(UserWarning, match="lags behind"):
        layers.state_dict()
    assert model.is_behind()
    with pytest.warns(UserWarning, match="lags behind"):
        copied = copy.deepcopy(layers)
    # It is nobody's by now.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied.state_dict()


# Two versions of the weights


def test_a_backward_after_newer_weights_is_refused(runtime: Runtime) -> None:
    layers = mlp()
    model = RoundPipe(layers, runtime=runtime)
    x, y = batch(6)
    loss = square_error(model(x), y)
    model.step(lambda: None, is_async=False)
    with pytest.raises(Stale):
        loss.backward()
    square_error(model(x), y).backward()
    model.synchronize()
    truth = twin(layers)
    truth.zero_grad()
    square_error(truth(x), y).backward()
    assert_near(gradients(layers), gradients(truth), 1e-5)


@pytest.mark.parametrize("change", ["write", "load"])
def test_a_backward_after_the_user_changed_the_weights_is_refused(runtime: Runtime, change: str) -> None:
    layers = mlp()
    model = RoundPipe(layers, runtime=runtime)
    x, y = batch(6)
    loss = square_error(model(x), y)
    if change == "write":
        with torch.no_grad():
            layers[2].weight.mul_(2.0)
    else:
        model.load_state_dict(model.state_dict())
    with pytest.raises(Stale):
        loss.backward()


def test_the_first_asynchronous_step_publishes_nothing_so_backward_goes_on(runtime: Runtime) -> None:
    layers = mlp()
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime)
    x, y = batch(6)
    loss = square_error(model(x), y)
    model.step(lambda: None)
    loss.backward()
    model.synchronize()
    train_call(truth, x, y, microbatches=1)
    assert_near(gradients(layers), gradients(truth), 1e-5)


# Parameters that come and go between steps


def test_a_layer_frozen_after_an_asynchronous_step_keeps_that_steps_result(runtime: Runtime) -> None:
    layers = mlp()
    model = RoundPipe(layers, runtime=runtime)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    masters = dict(model.optim_named_parameters())
    x, y = batch(6)
    model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    layers[0].requires_grad_(False)
    model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.synchronize()
    assert all(torch.equal(weight, masters[name]) for name, weight in layers.named_parameters())


def test_a_layer_unfrozen_after_an_asynchronous_step_trains(runtime: Runtime) -> None:
    layers = mlp()
    layers[0].requires_grad_(False)
    model = RoundPipe(layers, runtime=runtime)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    x, y = batch(6)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.step(update)
    layers[0].requires_grad_(True)
    model.synchronize()
    optimizer.add_param_group({"params": [p for n, p in model.optim_named_parameters() if n.startswith("0.")]})
    truth = twin(layers)
    truth.zero_grad()
    model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.step(update, is_async=False)
    model.synchronize()
    train_call(truth, x, y, microbatches=1)
    torch.optim.SGD(truth.parameters(), lr=0.1).step()
    assert_near(weights(layers), weights(truth), 1e-5)
