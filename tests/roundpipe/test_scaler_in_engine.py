"""The gradient scaler in steps that run behind the calls; publishing without synchronizing; the optimizers."""

from __future__ import annotations

import copy
import math
import pickle
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import roundpipe
import rp_optim
import torch
from plain import assert_near, batch, gradients, mlp, plans, square_error, train_call, twin, weights
from roundpipe import Busy, GradScaler, RoundPipe, RoundPipeRunConfig, Runtime, StepFailed
from torch import nn

CALLS = 20
# Calls whose labels are infinite, so that their step is skipped.
BAD = frozenset({0, 3, 4, 9, 15})
START, GROWTH, BACKOFF, INTERVAL = 1024.0, 2.0, 0.25, 2


def scales_after(updates: int) -> list[float]:
    """The scale after each number of updates, by torch's rule."""
    scales, good = [START], 0
    for step in range(updates):
        good = 0 if step in BAD else good + 1
        factor = BACKOFF if step in BAD else GROWTH if good == INTERVAL else 1.0
        good %= INTERVAL
        scales.append(scales[-1] * factor)
    return scales


def new_scaler(runtime: Runtime, **settings: Any) -> GradScaler:
    given = {"init_scale": START, "growth_factor": GROWTH, "backoff_factor": BACKOFF, "growth_interval": INTERVAL}
    return GradScaler(**{**given, **settings}, runtime=runtime)


def data(call: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(6, seed=call)
    return x, y * math.inf if call in BAD else y


@pytest.mark.pairwise
@dataclass
class Scaled:
    """A model that trains through a scaler, and what its losses were scaled with."""

    layers: nn.Sequential
    runtime: Runtime
    plan: str = "planned"
    scaler: GradScaler = field(init=False)
    used: list[set[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plans(5, 3)[self.plan])
        self.model = RoundPipe(self.layers, torch.float32, runtime=self.runtime, model_run_config=config)
        self.optimizer = roundpipe.optim.AdamW(self.model.optim_parameters(), lr=1e-2)
        self.scaler = new_scaler(self.runtime)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scaled = self.scaler.scale(torch.ones(())).item()
        self.used[-1].add(scaled)
        return self.scaler.scale(square_error(outputs, labels))

    def call(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss, unscaled by what it was scaled with."""
        self.used.append(set())
        loss = self.model.forward_backward(input_args=(x,), label=y, loss_fn=self.loss)
        (scale,) = self.used[-1]
        return loss / scale

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.optimizer.zero_grad()

    def step(self, *, is_async: bool = True) -> None:
        self.model.step(self.update, is_async=is_async)
        self.scaler.update(is_async=is_async)


class Truth:
    """Plain PyTorch without a scaler: bad steps left out, results read one step late."""

    def __init__(self, layers: nn.Module) -> None:
        self.weights = twin(layers)
        self.masters = [nn.Parameter(p.detach().clone()) for p in self.weights.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-2)

    def publish(self) -> None:
        with torch.no_grad():
            for weight, master in zip(self.weights.parameters(), self.masters, strict=True):
                weight.copy_(master)

    def call(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.weights.zero_grad()
        return train_call(self.weights, x, y, microbatches=3)

    def step(self, *, is_async: bool, skip: bool) -> None:
        self.publish()
        for weight, master in zip(self.weights.parameters(), self.masters, strict=True):
            master.grad = weight.grad
        if not skip:
            self.optimizer.step()
        if not is_async:
            self.publish()


# Against plain PyTorch


@pytest.mark.pairwise
@pytest.mark.parametrize("plan", ["planned", "one layer a stage", "microbatches divided"])
@pytest.mark.parametrize("kind", ["asynchronous", "synchronous", "mixed"])
def test_training_through_a_scaler_is_training_without_one_less_the_bad_steps(
    runtime: Runtime, kind: str, plan: str
) -> None:
    layers = mlp()
    truth, trained = Truth(layers), Scaled(layers, runtime, plan)
    for call in range(CALLS):
        is_async = kind == "asynchronous" or (kind == "mixed" and call % 3 != 2)
        x, y = data(call)
        found, wanted = trained.call(x, y), truth.call(x, y)
        if call not in BAD:
            assert_near(found, wanted, 1e-4, f"loss of call {call}")
        trained.step(is_async=is_async)
        truth.step(is_async=is_async, skip=call in BAD)
    trained.model.synchronize()
    truth.publish()
    assert_near(weights(layers), weights(truth.weights), 1e-4)
    assert trained.scaler.state_dict()["scale"] == scales_after(CALLS)[-1]


def test_each_loss_is_scaled_with_the_result_of_the_update_before_the_last(runtime: Runtime) -> None:
    trained = Scaled(mlp(), runtime)
    for call in range(CALLS):
        trained.call(*data(call))
        trained.step()
    scales = scales_after(CALLS)
    assert trained.used == [{scales[max(call - 1, 0)]} for call in range(CALLS)]
    assert len(set(scales)) > 4


def test_after_a_synchronous_update_each_loss_is_scaled_with_its_result(runtime: Runtime) -> None:
    trained = Scaled(mlp(), runtime)
    for call in range(CALLS):
        trained.call(*data(call))
        trained.step(is_async=False)
    assert trained.used == [{scale} for scale in scales_after(CALLS)[:-1]]


def test_a_slow_optimizer_changes_no_scale_and_holds_no_call_back(two: Runtime) -> None:
    trained = Scaled(mlp(), two)
    gate, update = threading.Event(), trained.update

    def slow() -> None:
        assert gate.wait(30)
        update()

    trained.call(*data(1))
    trained.step()
    trained.call(*data(2))
    trained.model.step(slow)
    trained.scaler.update()
    trained.call(*data(3))
    gate.set()
    trained.step()
    trained.model.synchronize()
    assert trained.used == [{START}, {START}, {START}]
    trained.call(*data(5))
    # After two good steps the scale has grown; the loss of the third was infinite, which comes one call later.
    assert trained.used[-1] == {START * GROWTH}


# Skipped steps


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_async", [True, False])
def test_a_skipped_step_leaves_weights_masters_and_moments_as_they_were(
    runtime: Runtime, is_async: bool, dtype: torch.dtype
) -> None:
    layers = mlp().to(dtype)
    trained = Scaled(layers, runtime)
    x, y = (tensor.to(dtype) for tensor in batch(6))
    trained.call(x, y)
    trained.step(is_async=is_async)
    trained.model.synchronize()
    before = weights(layers), [p.detach().clone() for p in trained.model.optim_parameters()]
    state = copy.deepcopy(trained.optimizer.state_dict()["state"])
    with torch.no_grad():
        outputs = trained.model(x)
    for _ in range(2):
        trained.call(x, y * math.inf)
        trained.step(is_async=is_async)
        with torch.no_grad():
            assert torch.equal(trained.model(x), outputs)
    trained.model.synchronize()
    after = weights(layers), [p.detach().clone() for p in trained.model.optim_parameters()]
    assert all(torch.equal(after[0][name], value) for name, value in before[0].items())
    assert all(map(torch.equal, after[1], before[1]))
    found = trained.optimizer.state_dict()["state"]
    assert all(torch.equal(found[i]["exp_avg"], state[i]["exp_avg"]) for i in state)
    assert all(p.grad is None for p in layers.parameters())


def test_half_precision_gradients_that_overflow_are_skipped_until_the_scale_fits(runtime: Runtime) -> None:
    layers = mlp().half()
    trained = Scaled(layers, runtime)
    trained.scaler = new_scaler(runtime, init_scale=2.0**18, growth_interval=2000)
    x, y = (tensor.half() for tensor in batch(6))
    before = weights(layers)
    skipped = 0
    for _ in range(12):
        trained.used.append(set())
        loss_fn = lambda outputs, labels: trained.scaler.scale(square_error(outputs.float(), labels))  # noqa: E731
        trained.model.forward_backward(input_args=(x,), label=y, loss_fn=loss_fn)
        trained.step()
        trained.model.synchronize()
        assert all(value.isfinite().all() for value in weights(layers).values())
        skipped += all(torch.equal(value, before[name]) for name, value in weights(layers).items())
    assert 0 < skipped < 10
    assert trained.scaler.state_dict()["scale"] == 2.0**18 * BACKOFF**skipped


# Other ways through a step


def test_gradients_are_clipped_after_unscaling(runtime: Runtime) -> None:
    layers, clip = mlp(), 0.05
    truth = twin(layers)
    trained = Scaled(layers, runtime)
    x, y = batch(6)
    sgd = torch.optim.SGD(trained.model.optim_parameters(), lr=0.1)
    plain = torch.optim.SGD(truth.parameters(), lr=0.1)

    def update() -> None:
        trained.scaler.unscale_(sgd)
        roundpipe.optim.clip_grad_norm_(trained.model.parameters(), clip)
        trained.scaler.step(sgd)
        sgd.zero_grad()

    trained.call(x, y)
    trained.model.step(update)
    trained.scaler.update()
    trained.model.synchronize()
    train_call(truth, x, y, microbatches=3)
    assert torch.nn.utils.clip_grad_norm_(truth.parameters(), clip) > 10 * clip
    plain.step()
    assert_near(weights(layers), weights(truth))


def test_scaled_gradients_add_up_over_calls_fused_and_separate(runtime: Runtime) -> None:
    layers = mlp()
    truth = twin(layers)
    trained = Scaled(layers, runtime)
    sgd = torch.optim.SGD(trained.model.optim_parameters(), lr=0.01)
    x, y = batch(6)
    trained.call(x, y)
    trained.scaler.scale(square_error(trained.model(2 * x), y)).backward()
    trained.model.step(lambda: (trained.scaler.step(sgd), sgd.zero_grad()))
    trained.scaler.update()
    trained.model.synchronize()
    train_call(truth, x, y, microbatches=3)
    train_call(truth, 2 * x, y, microbatches=1)
    torch.optim.SGD(truth.parameters(), lr=0.01).step()
    assert_near(weights(layers), weights(truth))


def test_a_scaler_that_is_not_enabled_changes_nothing(two: Runtime) -> None:
    layers = mlp()
    truth = twin(layers)
    trained = Scaled(layers, two)
    trained.scaler = new_scaler(two, enabled=False)
    trained.optimizer = torch.optim.SGD(trained.model.optim_parameters(), lr=0.1)
    x, y = batch(6)
    assert_near(trained.call(x, y), train_call(truth, x, y, microbatches=3))
    assert trained.used == [{1.0}]
    trained.step()
    trained.model.synchronize()
    torch.optim.SGD(truth.parameters(), lr=0.1).step()
    assert_near(weights(layers), weights(truth))


def test_a_scaler_goes_with_the_default_runtime_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_DEVICES", "cpu")
    layers = mlp()
    model = RoundPipe(layers)
    before = weights(layers)
    optimizer = roundpipe.optim.SGD(model.optim_parameters(), lr=0.1)
    scaler = GradScaler()
    x, y = batch(6)

    loss_fn = lambda outputs, labels: scaler.scale(square_error(outputs, labels))  # noqa: E731
    model.forward_backward(input_args=(x,), label=y, loss_fn=loss_fn)
    model.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()), is_async=False)
    scaler.update(is_async=False)

    assert not torch.equal(layers[0].weight, before["0.weight"])
    model.runtime.close()


def test_a_scaler_of_another_runtime_is_refused_in_words(two: Runtime) -> None:
    trained = Scaled(mlp(), two)
    with Runtime("cpu:1") as other:
        trained.scaler = new_scaler(other)
        trained.call(*batch(6))
        with pytest.raises(rp_optim.WrongThread, match="not its own"):
            trained.model.step(trained.update, is_async=False)
        with pytest.raises(StepFailed):
            trained.call(*batch(6))


# sync_optim_param


def test_syncing_publishes_the_last_result_and_leaves_gradients_where_they_are(runtime: Runtime) -> None:
    layers = mlp()
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.01)
    plain = torch.optim.SGD(truth.parameters(), lr=0.01)
    x, y = batch(6)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for turn in range(3):
        loss = model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
        assert_near(loss, train_call(truth, x, y, microbatches=1), 1e-5, f"turn {turn}")
        model.step(update)
        plain.step()
        plain.zero_grad()
        model.forward_backward(input_args=(2 * x,), label=y, loss_fn=square_error)
        model.sync_optim_param()
        assert_near(weights(layers), weights(truth))
        assert all(p.grad is None for p in layers.parameters())
        model.synchronize()
        grads = gradients(layers)
        model.sync_optim_param()
        assert all(torch.equal(gradients(layers)[name], grad) for name, grad in grads.items())
        model.zero_grad()


def test_a_step_function_finds_the_results_of_the_steps_before_it(two: Runtime) -> None:
    layers = mlp()
    model = RoundPipe(layers, runtime=two)
    found: list[list[float]] = []

    def fill(value: float) -> None:
        with torch.no_grad():
            for master in model.parameters():
                master.fill_(value)
        model.sync_optim_param()
        found.append(sorted({weight.mean().item() for weight in layers.parameters()}))

    for value, is_async in ((1.0, False), (2.0, True), (3.0, True), (4.0, False), (5.0, True)):
        model.step(fill, is_async, value)
    model.sync_optim_param()
    assert found[1:] == [[1.0], [2.0], [3.0], [4.0]]
    assert {weight.mean().item() for weight in layers.parameters()} == {5.0}


def test_another_models_step_function_may_not_sync(two: Runtime) -> None:
    one, other = RoundPipe(mlp(), runtime=two), RoundPipe(mlp(), runtime=two)
    with pytest.raises(Busy):
        one.step(other.sync_optim_param, is_async=False)


def test_syncing_raises_what_a_step_raised(two: Runtime) -> None:
    model = RoundPipe(mlp(), runtime=two)

    def fails() -> None:
        raise LookupError

    model.step(fails)
    with pytest.raises(LookupError):
        model.sync_optim_param()


# roundpipe.optim


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Lion", "Adafactor"])
def test_each_optimizer_of_roundpipe_trains_a_model(runtime: Runtime, name: str) -> None:
    layers = mlp().to(torch.bfloat16)
    model = RoundPipe(layers, torch.float32, runtime=runtime)
    optimizer = getattr(roundpipe.optim, name)(model.optim_parameters(), lr=1e-3)
    x, y = (tensor.to(torch.bfloat16) for tensor in batch(6))
    losses = []
    for _ in range(8):
        losses.append(model.forward_backward(input_args=(x,), label=y, loss_fn=square_error).item())
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("call", [0, 5, 11])
def test_training_goes_on_with_a_copy_of_the_scaler_as_with_the_first(
    two: Runtime, monkeypatch: pytest.MonkeyPatch, is_async: bool, call: int
) -> None:
    # What is pickled belongs to the default runtime, which is this test's.
    monkeypatch.setattr("rp_engine.optimizer.scaler.default_runtime", lambda: two)

    def trained(copied: Any) -> tuple[list[float], Any]:
        layers = mlp()
        model = RoundPipe(layers, runtime=two)
        optimizer = torch.optim.SGD(model.optim_parameters(), lr=1e-3)
        scaler = new_scaler(two)
        scales: list[float] = []
        for number in range(CALLS):
            if number == call:
                scaler = copied(scaler)
            x, y = data(number)
            model.forward_backward(
                input_args=(x,), label=y, loss_fn=lambda o, t, s=scaler: s.scale(square_error(o, t))
            )
            model.step(lambda s=scaler: (s.step(optimizer), optimizer.zero_grad()), is_async=is_async)
            scaler.update(is_async=is_async)
            scales.append(scaler.get_scale())
        model.synchronize()
        return scales, weights(layers)

    scales, wanted = trained(lambda scaler: scaler)
    for copied in (copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))):
        found_scales, found = trained(copied)
        assert found_scales == scales
        assert_near(found, wanted, 0.0)
