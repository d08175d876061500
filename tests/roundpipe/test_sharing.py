"""Parameters that are shared, frozen, unused, patched or adapted train as in plain PyTorch."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain import PLAN_NAMES, assert_near, batch, gradients, plans, square_error, train_call, twin, weights
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from rp_sched import Plan
from torch import nn
from torch.nn.utils import parametrizations

pytestmark = pytest.mark.usefixtures("small_departures")


class Tied(nn.Module):
    """Multiplies by a weight that another layer has too."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T + self.bias


class Adapter(nn.Module):
    """A frozen layer and a low-rank addition, as PEFT makes them."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))


class Unused(nn.Module):
    """Has a parameter that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def tied_across() -> nn.Sequential:
    first = nn.Linear(4, 4)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(4, 4), Tied(first.weight), nn.Linear(4, 3))


def tied_within() -> nn.Sequential:
    inner = nn.Linear(4, 4)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(inner, nn.Tanh(), Tied(inner.weight)), nn.Linear(4, 3))


def same_module() -> nn.Sequential:
    block = nn.Linear(4, 4)
    return nn.Sequential(block, nn.Tanh(), block, block, nn.Linear(4, 3))


def frozen_bottom() -> nn.Sequential:
    row = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    row[0].requires_grad_(False)
    row[2].requires_grad_(False)
    row[3].weight.requires_grad_(False)
    return row


def adapters() -> nn.Sequential:
    return nn.Sequential(*(Adapter(nn.Linear(4, 4)) for _ in range(4)), Adapter(nn.Linear(4, 3)))


def unused() -> nn.Sequential:
    return nn.Sequential(Unused(), nn.Tanh(), Unused(), nn.Linear(4, 3))


def parametrized() -> nn.Sequential:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 4)),
        nn.Tanh(),
        parametrizations.orthogonal(nn.Linear(4, 4)),
        nn.Linear(4, 3),
    )


def mixed_dtypes() -> nn.Sequential:
    class Cast(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 4, dtype=dtype), nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.to(self.linear.weight.dtype)).float() * self.scale

    return nn.Sequential(Cast(torch.float64), Cast(torch.float32), nn.Linear(4, 3))


def strided() -> nn.Sequential:
    row = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    row[0].weight = nn.Parameter(row[0].weight.detach().T.contiguous().T)
    return row


def recurrent() -> nn.Sequential:
    class First(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, Any]) -> torch.Tensor:
            return pair[0]

    return nn.Sequential(nn.LSTM(4, 4, batch_first=True), First(), nn.Linear(4, 3))


ROWS = [
    tied_across,
    tied_within,
    same_module,
    frozen_bottom,
    adapters,
    unused,
    parametrized,
    mixed_dtypes,
    strided,
    recurrent,
]


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.usefixtures("samples_first")
@pytest.mark.parametrize("plan_name", PLAN_NAMES)
@pytest.mark.parametrize("make", ROWS)
def test_gradients_and_steps_are_those_of_plain_pytorch(
    runtime: Runtime, make: Callable[[], nn.Sequential], plan_name: str
) -> None:
    torch.manual_seed(0)
    layers = make()
    truth = twin(layers)
    plan = plans(len(layers), 3)[plan_name]
    model = RoundPipe(
        layers, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=3, execute_plan=plan)
    )
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.05, momentum=0.9)
    plain = torch.optim.SGD([p for p in truth.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    for seed in range(3):
        x, y = batch(7, seed)
        loss = model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
        assert_near(loss, train_call(truth, x, y, microbatches=3), 1e-4)
        if seed == 2:
            model.synchronize()
            assert_near(gradients(layers), gradients(truth), 1e-4)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        plain.step()
        plain.zero_grad()
    model.synchronize()
    assert_near(weights(layers), weights(truth), 1e-4)


def test_frozen_layers_move_no_gradients(two: Runtime) -> None:
    layers = frozen_bottom()
    model = RoundPipe(layers, runtime=two)
    names = [name for name, _ in model.optim_named_parameters()]
    assert names == ["3.bias", "4.weight", "4.bias"]
    x, y = batch(6)
    model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.synchronize()
    assert {name for name, grad in gradients(layers).items() if grad is not None} == set(names)


def test_a_wholly_frozen_model_still_gives_gradients_of_inputs(runtime: Runtime) -> None:
    layers = frozen_bottom().requires_grad_(False)
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime)
    x, y = batch(6)
    assert not model(x).requires_grad
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    square_error(model(ours), y).backward()
    square_error(truth(theirs), y).backward()
    assert_near(ours.grad, theirs.grad, 1e-5)


def test_the_optimizer_state_of_a_parameter_without_gradient_stays_empty(runtime: Runtime) -> None:
    layers = unused()
    before = weights(layers)
    model = RoundPipe(layers, runtime=runtime)
    optimizer = torch.optim.AdamW(model.optim_parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(3):
        x, y = batch(6)
        model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    model.synchronize()
    for name, master in model.optim_named_parameters():
        assert (master in optimizer.state) == ("unused" not in name)
        assert torch.equal(weights(layers)[name], before[name]) == ("unused" in name)


def test_freezing_and_unfreezing_between_calls_is_seen(runtime: Runtime) -> None:
    layers = frozen_bottom()
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime)
    for turn in range(4):
        for net in (layers, truth):
            net[0].requires_grad_(turn % 2 == 0)
            net[4].bias.requires_grad_(turn < 2)
        x, y = batch(6, turn)
        model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
        model.synchronize()
        train_call(truth, x, y, microbatches=1)
        trained = {name for name, parameter in truth.named_parameters() if parameter.requires_grad}
        found, wanted = gradients(layers), gradients(truth)
        assert_near({n: found[n] for n in trained}, {n: wanted[n] for n in trained}, 1e-5)
        model.zero_grad()
        truth.zero_grad()


@pytest.mark.parametrize("first", [True, False], ids=["before the first call", "after it"])
def test_module_hooks_run_on_every_call(runtime: Runtime, first: bool) -> None:
    layers = frozen_bottom()
    x, y = batch(6)
    model = RoundPipe(layers, runtime=runtime)
    if not first:
        model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
        model.synchronize()
        model.zero_grad()

    def add(net: nn.Sequential) -> list[Any]:
        return [
            net[1].register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
            net[2].register_forward_hook(lambda _module, _args, output: output + 1),
            net[3].register_full_backward_hook(lambda _module, grads, _out: (grads[0] * 3,)),
        ]

    truth = twin(layers)
    truth.zero_grad()
    handles = add(layers)
    add(truth)
    for net in (layers, truth):
        net[0].requires_grad_(True)
    model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.synchronize()
    train_call(truth, x, y, microbatches=1)
    assert_near(gradients(layers), gradients(truth), 1e-5)
    for handle in handles:
        handle.remove()
    model.zero_grad()
    model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.synchronize()
    truth = twin(layers)
    truth.zero_grad()
    train_call(truth, x, y, microbatches=1)
    assert_near(gradients(layers), gradients(truth), 1e-5)


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(True, id="before the first call"),
        pytest.param(False, id="after it"),
    ],
)
def test_a_patched_forward_is_used_with_the_devices_weights(runtime: Runtime, first: bool) -> None:
    layers = frozen_bottom()
    model = RoundPipe(layers, runtime=runtime)
    x, y = batch(6)
    for _ in range(0 if first else 4):  # until every device has run every layer
        model(x, roundpipe_run_config=RoundPipeRunConfig(execute_plan=Plan((range(5),), None, (range(5),))))

    def patched(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight) * 2 + self.bias

    layers[3].forward = types.MethodType(patched, layers[3])
    truth = twin(layers)
    loss = model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.synchronize()
    assert_near(loss, train_call(truth, x, y, microbatches=1), 1e-5)
    assert_near(gradients(layers), gradients(truth), 1e-5)


def test_plain_attributes_changed_between_calls_are_seen(runtime: Runtime) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(0.1), nn.Linear(4, 3))
    divided = RoundPipeRunConfig(execute_plan=Plan((range(3),), None, (range(3),)))
    model = RoundPipe(layers, runtime=runtime)
    x, _ = batch(6)
    for _ in range(4):  # until every device has run every layer
        assert_near(model(x, roundpipe_run_config=divided), layers(x), 1e-5)
    layers[1].negative_slope = 0.9
    assert_near(model(x), layers(x), 1e-5)


class Configured(nn.Module):
    """Computes as a configuration says that layers share."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.linear, self.config = nn.Linear(4, 4), config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.config.scale + self.config.inner.shifts["all"] + self.config.more[0].shift


class Config:
    """An ordinary class, with one of the standard library's inside."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.inner = types.SimpleNamespace(shifts={"all": 1.0})
        self.more = [types.SimpleNamespace(shift=0.0)]


def set_scale(config: Config) -> None:
    config.scale = 0.5


def set_entry(config: Config) -> None:
    config.inner.shifts["all"] = 2.0


def set_inner(config: Config) -> None:
    config.more[0].shift = 1.0


@pytest.mark.parametrize("change", [set_scale, set_entry, set_inner])
def test_settings_that_are_changed_in_a_configuration_between_calls_are_seen(
    runtime: Runtime, change: Callable[[Config], None]
) -> None:
    torch.manual_seed(0)
    config = Config()
    layers = nn.Sequential(Configured(config), nn.Tanh(), Configured(config))
    model = RoundPipe(layers, runtime=runtime)
    x, _ = batch(6)
    before = layers(x)
    for _ in range(4):
        assert_near(model(x), before, 1e-5)

    change(config)

    assert not torch.allclose(layers(x), before)
    assert_near(model(x), layers(x), 1e-5)


def test_submodules_exchanged_between_calls_are_seen(runtime: Runtime) -> None:
    layers = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 3))
    model = RoundPipe(layers, runtime=runtime)
    x, _ = batch(6)
    assert_near(model(x), layers(x), 1e-5)
    layers[0][1] = nn.ReLU()
    assert_near(model(x), layers(x), 1e-5)
    layers[0][0] = nn.Linear(4, 4)
    assert_near(model(x), layers(x), 1e-5)
    layers[0][0].weight.data = torch.ones(4, 4)
    assert_near(model(x), layers(x), 1e-5)


@pytest.mark.parametrize("pin", ["alloc", "register", "off"])
def test_every_way_of_pinning_gives_the_same_numbers(runtime: Runtime, pin: Any) -> None:
    layers = tied_across()
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime, pin_model=pin)
    x, y = batch(6)
    loss = model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.synchronize()
    assert_near(loss, train_call(truth, x, y, microbatches=1), 1e-5)
    assert_near(gradients(layers), gradients(truth), 1e-5)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("plan_name", ["one layer a stage", "microbatches divided"])
def test_layers_that_were_compiled_before_wrapping_train_alike(runtime: Runtime, plan_name: str) -> None:
    layers = tied_across()
    truth = twin(layers)
    # The eager backend: what is asked here is whether the compiled call reads the device's weights.
    layers[0].compile(backend="eager")
    layers[3].compile(backend="eager")
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plans(5, 3)[plan_name])
    model = RoundPipe(layers, runtime=runtime, model_run_config=config)
    for seed in range(2):
        x, y = batch(6, seed)
        loss = model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
        model.synchronize()
        assert_near(loss, train_call(truth, x, y, microbatches=3), 1e-5)
        assert_near(gradients(layers), gradients(truth), 1e-5)


class Prompted(nn.Module):
    """Hands a parameter and a buffer of its own on, beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.prompt = nn.Linear(6, 6), nn.Parameter(torch.ones(6))
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.linear(x), self.prompt, self.scale


class Prompt(nn.Module):
    """Uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, prompt, scale = given
        return self.linear(x) * prompt + scale


@pytest.mark.parametrize("plan_name", PLAN_NAMES)
def test_a_layer_may_return_a_parameter_and_a_buffer_of_its_own(runtime: Runtime, plan_name: str) -> None:
    layers = nn.Sequential(Prompted(), Prompt(), nn.Linear(6, 6))
    truth = twin(layers)
    config = RoundPipeRunConfig(num_microbatch=4, execute_plan=plans(3, 4)[plan_name])
    model = RoundPipe(layers, runtime=runtime, model_run_config=config)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    for _ in range(2):
        model.forward_backward((x,), None, y, square_error)
        train_call(truth, x, y, microbatches=4)
    model.synchronize()
    assert_near(gradients(layers), gradients(truth), 1e-4)
