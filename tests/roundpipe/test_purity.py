"""What leaves a layer beside its output and buffers is refused by name in its first calls, whatever the plan."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import rp_batch
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import PLAN_NAMES, assert_near, batch, gradients, plans, square_error, train_call, twin
from roundpipe import (
    ImpureLayer,
    RoundPipe,
    RoundPipeRunConfig,
    Runtime,
    doing_recompute,
    get_recompute_data,
    save_for_recompute,
    wrap_model_to_roundpipe,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class Layer(nn.Linear):
    """Four to four, followed by what a test wants it to do."""

    def __init__(self, then: Forward, **attributes: Any) -> None:
        super().__init__(4, 4)
        self.then = then
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self, super().forward(x))


def row(then: Forward, **attributes: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Layer(then, **attributes), nn.Linear(4, 3))


def config(plan_name: str = "planned", microbatches: int = 2, grain: Any = None) -> RoundPipeRunConfig:
    plan = plans(3, microbatches)[plan_name]
    return RoundPipeRunConfig(num_microbatch=microbatches, execute_plan=plan, recompute_grain=grain)


def train(layers: nn.Sequential, runtime: Runtime, run_config: RoundPipeRunConfig, calls: int = 2) -> list[Any]:
    model = RoundPipe(layers, runtime=runtime, model_run_config=run_config)
    losses = [
        model.forward_backward((batch(6)[0],), None, batch(6)[1], square_error).detach() for _ in range(calls)
    ]
    model.synchronize()
    return losses


# What does not compute the same again


def _own_generator(layer: Any, y: torch.Tensor) -> torch.Tensor:
    return y * torch.rand(y.shape, generator=layer.own).to(y.device)


def _closure_generator(generator: random.Random) -> Forward:
    return lambda _, y: y * generator.random()


def _closure_noise(generator: random.Random) -> Forward:
    return lambda _, y: y * (1 + 0.003 * generator.gauss(0, 1))


def _counted(layer: Any, y: torch.Tensor) -> torch.Tensor:
    layer.calls += 1
    return y * (1 - 0.1 * layer.calls)


def _running(layer: Any, y: torch.Tensor) -> torch.Tensor:
    layer.mean.mul_(0.9).add_(y.detach().mean().cpu(), alpha=0.1)
    return y - layer.mean.to(y.device)


def _averaged(layer: Any, y: torch.Tensor) -> torch.Tensor:
    layer.state["mean"] = 0.9 * layer.state["mean"] + 0.1 * float(y.detach().mean())
    return y - layer.state["mean"]


def _collected(layer: Any, y: torch.Tensor) -> torch.Tensor:
    layer.log.append(y.detach())
    return y


def _nested(layer: Any, y: torch.Tensor) -> torch.Tensor:
    layer.stats.inner["calls"][0] += 1
    return y


IMPURE: dict[str, tuple[Callable[[], nn.Sequential], str]] = {
    "torch.Generator": (lambda: row(_own_generator, own=torch.Generator()), "drew from own, a random generator"),
    "random.Random": (lambda: row(lambda s, y: y * s.own.random(), own=random.Random(1)), "drew from own"),
    "numpy Generator": (
        lambda: row(lambda s, y: y * float(s.own.random()), own=np.random.default_rng(1)),
        "drew from own",
    ),
    "a generator in a list": (
        lambda: row(lambda s, y: y * s.own[0].random(), own=[random.Random(1)]),
        r"drew from own\[0\]",
    ),
    "a little noise": (
        lambda: row(_closure_noise(random.Random(3))),
        "does not compute the same again",
    ),
    "a closure's generator": (
        lambda: row(_closure_generator(random.Random(3))),
        "does not compute the same again",
    ),
    "time": (lambda: row(lambda _, y: y * (time.perf_counter() * 1e3 % 1)), "does not compute the same again"),
    "a counter": (
        lambda: row(_counted, calls=0),
        r"attribute calls in forward.*scratch_attributes = \('calls',\)",
    ),
    "running statistics": (lambda: row(_running, mean=torch.zeros(())), "attribute mean in forward"),
    "statistics in a dict": (lambda: row(_averaged, state={"mean": 0.0}), r"attribute state\['mean'\] in forward"),
    "a log": (lambda: row(_collected, log=[]), r"attribute len\(log\) in forward"),
    "an object": (
        lambda: row(_nested, stats=SimpleNamespace(inner={"calls": [0]})),
        r"attribute stats.inner\['calls'\]\[0\]",
    ),
}


@pytest.mark.usefixtures("samples_first")
@pytest.mark.pairwise
@pytest.mark.parametrize("plan_name", PLAN_NAMES)
@pytest.mark.parametrize("name", IMPURE)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_layer_with_a_state_of_its_own_is_refused_by_name_whatever_the_plan(
    devices: str, plan_name: str, name: str, microbatches: int
) -> None:
    make, words = IMPURE[name]

    with Runtime(devices) as runtime, pytest.raises(ImpureLayer, match=rf"layer 1 \(Layer\).*{words}"):
        train(make(), runtime, config(plan_name, microbatches))


# What it leaves in attributes


def _loss_left(layer: Any, y: torch.Tensor) -> torch.Tensor:
    layer.aux = y.square().mean()
    return y


def _losses_left(layer: Any, y: torch.Tensor) -> torch.Tensor:
    layer.aux = {"losses": [y.square().mean()]}
    return y


def _number_left(layer: Any, y: torch.Tensor) -> torch.Tensor:
    layer.last = float(y.detach().abs().max())
    return y


def _tensor_left(layer: Any, y: torch.Tensor) -> torch.Tensor:
    layer.last = y.detach()
    return y


def _array_left(layer: Any, y: torch.Tensor) -> torch.Tensor:
    layer.last = y.detach().cpu().numpy().mean()
    return y


def _kept_once(layer: Any, y: torch.Tensor) -> torch.Tensor:
    if not hasattr(layer, "first"):
        layer.first = y.detach().mean()
    return y + layer.first


def _drawn_once(layer: Any, y: torch.Tensor) -> torch.Tensor:
    if not hasattr(layer, "noise"):
        layer.noise = torch.randn(y.shape[1:])
    return y + layer.noise


def _shuffled_once(layer: Any, y: torch.Tensor) -> torch.Tensor:
    if not hasattr(layer, "order"):
        layer.order = random.sample(range(100), 100)
    return y + layer.order[0]


def _kept_by_length(layer: Any, y: torch.Tensor) -> torch.Tensor:
    if len(y) not in layer.__dict__.setdefault("scales", {}):
        layer.scales[len(y)] = float(y.detach().abs().max())
    return y * layer.scales[len(y)]


LEFT: dict[str, tuple[Forward, str]] = {
    "a loss": (_loss_left, "attribute aux in forward"),
    "losses": (_losses_left, r"attribute aux\['losses'\]\[0\] in forward"),
    "a number": (_number_left, "attribute last in forward"),
    "a tensor": (_tensor_left, "attribute last in forward"),
    "a NumPy number": (_array_left, "attribute last in forward"),
    "the first call's mean": (_kept_once, "attribute first in forward"),
    "noise that is drawn once": (_drawn_once, "attribute noise in forward, to what it has computed or drawn"),
    "an order that is drawn once": (_shuffled_once, r"attribute order\[\d+\] in forward"),
    "a scale by length": (_kept_by_length, r"attribute scales\[\d\] in forward"),
}


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.parametrize("with_grad", [True, False])
def test_results_that_are_left_in_attributes_are_refused(devices: str, name: str, with_grad: bool) -> None:
    then, words = LEFT[name]
    # At home in a submodule, too.
    layers = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), Layer(then)))

    with Runtime(devices) as runtime, torch.set_grad_enabled(with_grad):
        model = RoundPipe(layers, runtime=runtime)
        with pytest.raises(
            ImpureLayer, match=rf"layer 1 \(Sequential\).*{words.replace('attribute ', 'attribute 1.')}"
        ):
            model(batch(6)[0])


def test_a_models_own_forward_does_not_read_an_old_attribute_of_a_part(two: Runtime) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(_loss_left) for _ in range(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean() + sum(layer.aux for layer in self.layers)

    model = wrap_model_to_roundpipe(Model(), lower_threshold=1, runtime=two)

    with pytest.raises(ImpureLayer, match=r"changed its attribute .*aux"):
        model(batch(6)[0])


# What may stay


def _cached(layer: Any, y: torch.Tensor) -> torch.Tensor:
    if layer.mask is None or len(layer.mask) < len(y):
        layer.mask = torch.linspace(0, 1, len(y), device=y.device)
        layer.longest = len(y)
        layer.by_length[len(y)] = layer.mask
    return y * layer.mask[: len(y), None]


def _scratch(layer: Any, y: torch.Tensor) -> torch.Tensor:
    layer.last = y
    return layer.last * 2


def _in_place(_: Any, y: torch.Tensor) -> torch.Tensor:
    return y.mul_(2).relu_()


def _saved(layer: Any, y: torch.Tensor) -> torch.Tensor:
    if doing_recompute():
        (scale,) = get_recompute_data()
    else:
        scale = torch.rand(y.shape, generator=GENERATOR).to(y.device)
        save_for_recompute(scale)
    del layer
    return y * scale * 0 + y


def _gradient_inside(_: Any, y: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        x = y.detach().requires_grad_()
        (slope,) = torch.autograd.grad(x.pow(3).sum(), x)
    return y + slope


def _functional_gradient(_: Any, y: torch.Tensor) -> torch.Tensor:
    return y + torch.func.vmap(torch.func.grad(lambda x: x.pow(3).sum()))(y)


def _checkpointed(_: Any, y: torch.Tensor) -> torch.Tensor:
    return checkpoint(torch.tanh, y, use_reentrant=False)


GENERATOR = torch.Generator()
PURE: dict[str, Callable[[], nn.Sequential]] = {
    "a cache by shape": lambda: row(_cached, mask=None, longest=0, by_length={}),
    "scratch": lambda: row(_scratch, scratch_attributes=("last",), last=None),
    "in place": lambda: row(_in_place),
    "saved choices": lambda: row(_saved),
    "a gradient inside": lambda: row(_gradient_inside),
    "a gradient of torch.func inside": lambda: row(_functional_gradient),
    "a checkpoint inside": lambda: row(_checkpointed),
}


@pytest.mark.usefixtures("samples_first")
@pytest.mark.pairwise
@pytest.mark.parametrize("plan_name", PLAN_NAMES)
@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("name", PURE)
def test_layers_that_leave_nothing_behind_train_as_plainly(
    devices: str, plan_name: str, grain: Any, name: str
) -> None:
    layers = PURE[name]()
    truth = twin(layers)

    with Runtime(devices) as runtime:
        losses = train(layers, runtime, config(plan_name, grain=grain))

    forward = truth[1].then
    if forward is _saved:
        truth[1].then = lambda _, y: y
    wanted = [train_call(truth, *batch(6), microbatches=2) for _ in range(2)]
    assert_near(losses, wanted, 1e-5)
    assert_near(gradients(layers), gradients(truth), 1e-5)


def test_nan_is_what_a_second_run_gives_too(two: Runtime) -> None:
    losses = train(row(lambda _, y: y * torch.nan), two, config())

    assert all(loss.isnan() for loss in losses)


class Normed(nn.Module):
    """Its backward goes on with a buffer that its forward has written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.add_(0.1)
        return self.norm(self.linear(x) * self.scale.clone())


@pytest.mark.usefixtures("samples_first")
@pytest.mark.parametrize("plan_name", ["all fused", "one layer a stage"])
def test_the_second_run_leaves_buffers_as_they_were(devices: str, plan_name: str) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), Normed(), nn.Linear(4, 3))
    truth = twin(layers)

    with Runtime(devices) as runtime:
        losses = train(layers, runtime, config(plan_name))

    wanted = [train_call(truth, *batch(6), microbatches=2) for _ in range(2)]
    assert_near(losses, wanted, 1e-5)
    assert_near(layers.state_dict(), truth.state_dict(), 1e-5)


class Scaled(nn.Linear):
    """Its backward reads, itself, a buffer that its forward has written; and it keeps a tensor for each shape.

    So it runs three times in its first call: the last time on other values, to see whether those change its cache.
    """

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.cache = torch.ones(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache.shape != x.shape[:1]:
            self.cache = torch.arange(1.0, len(x) + 1)
        self.scale.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x) * self.scale * self.cache[:, None]


@pytest.mark.usefixtures("samples_first")
@pytest.mark.parametrize("plan_name", ["all fused", "one layer a stage"])
def test_a_buffer_that_backward_reads_is_bit_by_bit_plain_pytorchs_in_the_first_calls(
    two: Runtime, plan_name: str
) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(Scaled(), Scaled(), nn.Linear(4, 3))
    truth = twin(layers)

    losses = train(layers, two, config(plan_name), calls=4)

    wanted = [train_call(truth, *batch(6), microbatches=2) for _ in range(4)]
    assert torch.equal(torch.stack(losses), torch.stack(wanted))
    assert all(torch.equal(one, truth.state_dict()[name]) for name, one in layers.state_dict().items())


def test_an_object_that_copies_share_with_the_users_layer_may_change(two: Runtime) -> None:
    class Shared:
        calls = 0

        def __deepcopy__(self, memo: object) -> Shared:
            return self

    def count(layer: Any, y: torch.Tensor) -> torch.Tensor:
        layer.shared.calls += 1
        return y

    shared = Shared()

    train(row(count, shared=shared), two, config())

    assert shared.calls > 0


def test_a_layer_that_becomes_impure_in_another_mode_is_refused_there(two: Runtime) -> None:
    def counted(layer: Any, y: torch.Tensor) -> torch.Tensor:
        return _counted(layer, y) if layer.training else y

    model = RoundPipe(row(counted, calls=0).eval(), runtime=two)
    square_error(model(batch(6)[0]), batch(6)[1]).backward()
    model.train()

    with pytest.raises(ImpureLayer, match="calls"):
        model(batch(6)[0])


def test_after_it_was_refused_a_layer_may_be_mended_and_trains(two: Runtime) -> None:
    layers = row(_counted, calls=0)
    truth = twin(layers)
    model = RoundPipe(layers, runtime=two, model_run_config=config())
    x, y = batch(6)
    with pytest.raises(ImpureLayer):
        model.forward_backward((x,), None, y, square_error)
    model.zero_grad()
    layers[1].then = truth[1].then = lambda _, y: y * 2

    model.forward_backward((x,), None, y, square_error)
    model.synchronize()

    train_call(truth, x, y, microbatches=2)
    assert_near(gradients(layers), gradients(truth), 1e-5)


@pytest.mark.parametrize("counts", [False, True])
def test_without_seeds_outputs_are_not_compared_but_attributes_are(two: Runtime, counts: bool) -> None:
    layers = row(_counted, calls=0) if counts else nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    model = RoundPipe(layers, runtime=two, model_run_config=RoundPipeRunConfig(preserve_rng_state=False))
    x, y = batch(6)

    if counts:
        with pytest.raises(ImpureLayer, match="calls"):
            model.forward_backward((x,), None, y, square_error)
    else:
        model.forward_backward((x,), None, y, square_error)


# Later calls

SWITCHED: list[bool] = []


def _later(layer: Any, y: torch.Tensor) -> torch.Tensor:
    del layer
    return y * LATER_NUMBERS.random() if SWITCHED else y


LATER_NUMBERS = random.Random(1)


@pytest.mark.parametrize("grain", ["stage", pytest.param("layer", marks=pytest.mark.slow)])
def test_a_layer_that_becomes_impure_later_is_refused_within_a_hundred_calls(devices: str, grain: Any) -> None:
    SWITCHED.clear()
    x, y = batch(6)
    with Runtime(devices) as runtime:
        model = RoundPipe(
            row(_later), runtime=runtime, model_run_config=config("one layer a stage", 2, grain), name="mine"
        )

        def calls(count: int) -> None:
            for _ in range(count):
                model.zero_grad()
                model.forward_backward((x,), None, y, square_error)
            model.synchronize()

        calls(70)
        SWITCHED.append(True)

        with pytest.raises(ImpureLayer, match=r"layer 1 \(Layer\) did not compute the same again") as raised:
            calls(100)

        SWITCHED.clear()
        assert "in model 'mine'" in "".join(raised.value.__notes__)
        calls(2)


def test_a_layer_that_begins_to_draw_from_pythons_generator_is_seeded_within_a_hundred_calls(two: Runtime) -> None:
    def drops(_: Any, y: torch.Tensor) -> torch.Tensor:
        return y * random.random() if SWITCHED else y

    SWITCHED.clear()
    x, y = batch(6)
    model = RoundPipe(row(drops), runtime=two, model_run_config=config("all fused", 1))

    def loss() -> float:
        model.zero_grad()
        torch.manual_seed(1)
        return float(model.forward_backward((x,), None, y, square_error))

    loss()
    SWITCHED.append(True)
    for _ in range(100):
        loss()

    assert loss() == loss()
    SWITCHED.clear()


# Any layer: as plainly, or refused


def _chance(name: str) -> Callable[[Any], float]:
    return {
        "python": lambda _: random.random(),
        "numpy": lambda _: float(np.random.rand()),
        "own": lambda layer: layer.own.random(),
        "counter": lambda layer: (layer.__dict__.update(calls=layer.calls + 1), layer.calls % 2 / 2)[1],
        "none": lambda _: 0.2,
    }[name]


def any_row(kinds: list[str]) -> nn.Sequential:
    def dropped(chance: Callable[[Any], float]) -> Forward:
        return lambda layer, y: y * 0.0 if chance(layer) > 0.4 else y + 1

    torch.manual_seed(0)
    layers = [Layer(dropped(_chance(kind)), own=random.Random(1), calls=0) for kind in kinds]
    return nn.Sequential(*layers, nn.Linear(4, 3))


@settings(max_examples=examples(40), deadline=None)
@given(
    kinds=st.lists(st.sampled_from(["python", "numpy", "own", "counter", "none"]), min_size=2, max_size=3),
    plan_name=st.sampled_from(PLAN_NAMES),
    grain=st.sampled_from(["stage", "layer"]),
    devices=st.sampled_from(["cpu:1", "cpu:2", "cpu:4"]),
    microbatches=st.integers(1, 3),
)
def test_any_row_trains_the_same_everywhere_or_is_refused(
    kinds: list[str], plan_name: str, grain: Any, devices: str, microbatches: int
) -> None:
    def trained(devices: str, plan_name: str, grain: Any) -> Any:
        layers = any_row(kinds)
        plan = plans(len(layers), microbatches)[plan_name]
        run_config = RoundPipeRunConfig(
            num_microbatch=microbatches,
            execute_plan=plan,
            recompute_grain=grain,
            # Layers that draw random numbers show no split that is right.
            split_input=((rp_batch.Split(),), None),
        )
        torch.manual_seed(5)
        with Runtime(devices) as runtime:
            losses = train(layers, runtime, run_config, calls=3)
        return losses, gradients(layers)

    if {"own", "counter"} & set(kinds):
        with pytest.raises(ImpureLayer):
            trained(devices, plan_name, grain)
        return
    wanted, wanted_gradients = trained("cpu:1", "all fused", "stage")

    found, found_gradients = trained(devices, plan_name, grain)

    assert_near(found, wanted, 1e-5)
    zeros = {name: torch.zeros(()) for name in wanted_gradients}
    assert_near(_or_zero(found_gradients, zeros), _or_zero(wanted_gradients, zeros), 1e-5)


def _or_zero(grads: Any, zeros: Any) -> Any:
    return {name: zeros[name] if grad is None or not grad.any() else grad for name, grad in grads.items()}


class RoundsOtherwise(nn.Module):
    """As a processor's kernels, which may be chosen by where memory lies."""

    signs: ClassVar = itertools.cycle([1.0, -1.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + next(self.signs) * 1e-7)


def test_a_layer_that_rounds_otherwise_in_a_second_run_is_no_impure_one(runtime: Runtime) -> None:
    model = RoundPipe(nn.Sequential(nn.Linear(4, 4), RoundsOtherwise()), runtime=runtime)

    loss = model.forward_backward((torch.ones(4, 4),), loss_fn=lambda output, _: output.sum())

    assert loss.isfinite()


class DrawsALittle(nn.Module):
    """Adds two parts in a hundred of its own noise, which the engine does not seed."""

    generator: ClassVar = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 0.02 * torch.randn(x.shape, generator=self.generator).to(x))


def test_noise_of_ones_own_in_16_bits_is_no_rounding() -> None:
    with Runtime("cpu:1") as runtime:
        model = RoundPipe(nn.Sequential(nn.Linear(4, 64), DrawsALittle()).bfloat16(), runtime=runtime)

        with pytest.raises(ImpureLayer, match="does not compute the same again"):
            model.forward_backward((torch.ones(4, 4).bfloat16(),), loss_fn=lambda output, _: output.sum())
