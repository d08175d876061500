"""What users see of a model: its settings, parameters, attributes and names, and what it refuses in words."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import rp_batch
import torch
from plain import assert_near, batch, gradients, mlp, square_error, train_call, twin, weights
from roundpipe import AutoRoundPipe, Busy, ModelExecutePlan, RoundPipe, RoundPipeRunConfig, Runtime
from torch import nn

FULL = RoundPipeRunConfig(
    requires_grad=True,
    output_device=torch.device("cpu"),
    preserve_rng_state=False,
    recompute_grain="layer",
    num_microbatch=2,
    split_input=((rp_batch.Split(0),), {}),
    split_label=rp_batch.Split(0),
    merge_output=rp_batch.Concat(0),
    execute_plan=ModelExecutePlan([range(5)], [range(5)]),
    launch="graphs",
    compute="fp8",
)


def wrap(runtime: Runtime, layers: nn.Module | None = None, **kwargs: Any) -> RoundPipe:
    return RoundPipe(mlp() if layers is None else layers, runtime=runtime, **kwargs)


# Settings


def test_the_settings_have_their_names_order_and_no_defaults() -> None:
    names = "requires_grad output_device preserve_rng_state recompute_grain num_microbatch split_input split_label"
    assert [field.name for field in fields(RoundPipeRunConfig)] == [
        *names.split(),
        "merge_output",
        "execute_plan",
        "launch",
        "compute",
    ]
    assert all(field.default is None for field in fields(RoundPipeRunConfig))


@pytest.mark.parametrize("name", [field.name for field in fields(RoundPipeRunConfig)])
def test_a_calls_setting_goes_over_the_models_and_others_stay(name: str) -> None:
    own = RoundPipeRunConfig(**{name: getattr(FULL, name)})
    below = RoundPipeRunConfig(num_microbatch=7, recompute_grain="stage", requires_grad=False)
    found = own.over(below)
    assert getattr(found, name) is getattr(FULL, name)
    for field in fields(RoundPipeRunConfig):
        if field.name != name:
            assert getattr(found, field.name) is getattr(below, field.name)
        assert getattr(RoundPipeRunConfig().over(FULL), field.name) is getattr(FULL, field.name)


def microbatches(model: RoundPipe, config: RoundPipeRunConfig | None) -> int:
    counted: list[int] = []
    x, y = batch(12)

    def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        counted.append(len(labels))
        return square_error(outputs, labels)

    model.forward_backward((x,), None, y, loss_fn, run_config=config)
    return len(counted)


def test_the_number_of_microbatches_is_the_calls_the_models_or_one_more_than_devices(runtime: Runtime) -> None:
    if runtime.lanes[0].device.torch_device.type == "cpu":
        # On GPUs it is chosen; see test_microbatches.
        assert microbatches(wrap(runtime), None) == len(runtime.lanes) + 1
    model = wrap(runtime, model_run_config=RoundPipeRunConfig(num_microbatch=3))
    assert microbatches(model, None) == 3
    assert microbatches(model, RoundPipeRunConfig(num_microbatch=6)) == 6
    assert microbatches(model, RoundPipeRunConfig(recompute_grain="layer")) == 3


@pytest.mark.parametrize("level", ["model", "call"])
def test_specs_of_inputs_labels_and_outputs_count_at_both_levels(runtime: Runtime, level: str) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    config = RoundPipeRunConfig(
        num_microbatch=2,
        # The batch is the second dimension of inputs and outputs; every microbatch gets all labels.
        split_input=((rp_batch.Split(1),), {}),
        split_label=rp_batch.Replicate(),
        merge_output=rp_batch.Concat(1),
    )
    model = wrap(runtime, twin(layers), model_run_config=config if level == "model" else None)
    x, labels = torch.randn(3, 6, 4), torch.randn(5)
    seen: list[tuple[torch.Size, torch.Size]] = []

    def loss_fn(outputs: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        seen.append((outputs.shape, given.shape))
        return outputs.sum() * given.sum()

    loss, outputs = model.forward_backward(
        (x,), None, labels, loss_fn, True, run_config=config if level == "call" else None
    )
    assert seen == [((3, 3, 4), (5,))] * 2
    assert_near(outputs, layers(x))
    assert_near(loss, layers(x).sum() * labels.sum(), 1e-4)


@pytest.mark.parametrize("level", ["model", "call"])
def test_forward_prepares_no_backward_if_told_so(two: Runtime, level: str) -> None:
    config = RoundPipeRunConfig(requires_grad=False)
    model = wrap(two, model_run_config=config if level == "model" else None)
    call = config if level == "call" else None
    x, y = batch(6)
    assert not model(x, roundpipe_run_config=call).requires_grad
    assert model(x, roundpipe_run_config=RoundPipeRunConfig(requires_grad=True)).requires_grad
    with pytest.raises(ValueError, match="requires_grad is False"):
        model.forward_backward((x,), None, y, square_error, run_config=call)


def test_a_spec_that_means_nothing_is_refused_by_the_call(two: Runtime) -> None:
    model = wrap(two)
    x, y = batch(6)
    for bad in ({"split_input": "rows"}, {"split_label": 3}, {"merge_output": "rows"}):
        with pytest.raises((rp_batch.BatchError, TypeError, ValueError)):
            model.forward_backward((x,), None, y, square_error, True, run_config=RoundPipeRunConfig(**bad))
    model.zero_grad()
    model.forward_backward((x,), None, y, square_error)


# Calls


class Anything(nn.Module):
    """No row: takes and returns what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        return {"out": self.linear(x) * scale, "none": None, "rows": x.sum(1)}


class OwnForward(nn.Sequential):
    """An nn.Sequential that does more than its layers."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def test_any_module_is_one_layer(runtime: Runtime) -> None:
    layers = Anything()
    truth = twin(layers)
    model = wrap(runtime, layers)
    x, _ = batch(6)
    loss, outputs = model.forward_backward(
        (x,), {"scale": 2.0}, loss_fn=lambda outputs, _: outputs["out"].sum(), return_outputs=True
    )
    wanted = truth(x, scale=2.0)
    wanted["out"].sum().backward()
    model.synchronize()
    assert_near(loss, wanted["out"].sum())
    assert outputs["none"] is None
    assert_near(outputs["rows"], wanted["rows"])
    assert_near(gradients(layers), gradients(truth))


@pytest.mark.parametrize("patched", [False, True])
def test_a_row_whose_forward_is_its_own_is_one_layer(two: Runtime, patched: bool) -> None:
    layers = mlp() if patched else OwnForward(*mlp())
    if patched:
        layers.forward = lambda x: nn.Sequential.forward(layers, x) * 2
    model = wrap(two, layers)
    assert len(model.layer_costs()) == 1
    x, _ = batch(6)
    assert_near(model(x), layers(x))


def test_layers_of_the_row_may_be_exchanged_added_and_removed(runtime: Runtime) -> None:
    layers = mlp()
    model = wrap(runtime, layers)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    x, y = batch(6)
    model.forward_backward((x,), None, y, square_error)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    for change in (
        lambda: layers.__setitem__(1, nn.ReLU()),
        lambda: layers.append(nn.Linear(3, 3)),
        lambda: layers.__delitem__(3),
    ):
        change()
        assert_near(model(x), layers(x))
        model.forward_backward((x,), None, y, square_error)
        model.synchronize()
        truth = twin(layers)
        truth.zero_grad()
        train_call(truth, x, y, microbatches=1)
        model.zero_grad()
        model.forward_backward((x,), None, y, square_error)
        model.synchronize()
        assert_near(gradients(layers), gradients(truth))
        model.zero_grad()
    assert {name for name, _ in model.optim_named_parameters()} == dict(layers.named_parameters()).keys()


def test_hooks_on_the_row_itself_are_refused_whenever_they_come(two: Runtime) -> None:
    layers = mlp()
    handle = layers.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hooks"):
        wrap(two, layers)
    handle.remove()
    model = wrap(two, layers)
    model(batch(6)[0])
    layers.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hooks"):
        model(batch(6)[0])


@pytest.mark.parametrize("make", [list, tuple])
def test_a_loss_function_that_returns_a_sequence_gives_a_list_of_sums(
    runtime: Runtime, make: Callable[[Any], Any]
) -> None:
    layers = mlp()
    truth = twin(layers)
    model = wrap(runtime, layers, model_run_config=RoundPipeRunConfig(num_microbatch=3))
    x, y = batch(6)
    losses = model.forward_backward(
        (x,), None, y, lambda outputs, labels: make([square_error(outputs, labels), outputs.sum()])
    )
    assert isinstance(losses, list)
    square_error(truth(x), y).add(truth(x).sum()).backward()
    assert_near(losses, [square_error(truth(x), y), truth(x).sum()], 1e-4)
    model.synchronize()
    assert_near(gradients(layers), gradients(truth), 1e-4)


def test_microbatches_with_more_losses_than_others_are_refused(two: Runtime) -> None:
    model = RoundPipe(nn.Linear(2, 2), runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=2))

    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> list[torch.Tensor]:
        return [outputs.sum()] * int(label[0])

    with pytest.raises(TypeError, match=r"as many losses .* returned 2 for one and 1 for another") as refused:
        model.forward_backward((torch.ones(4, 2),), label=torch.tensor([1, 1, 2, 2]), loss_fn=loss_fn)
    # As any error of a loss function, behind which gradients may be incomplete.
    assert "in the loss function" in refused.value.__notes__[0]
    model.zero_grad()
    assert len(model.forward_backward((torch.ones(4, 2),), label=torch.full((4,), 2), loss_fn=loss_fn)) == 2


def test_without_arguments_the_output_is_the_loss(two: Runtime) -> None:
    class Loss(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.square().sum()

    layers = nn.Sequential(*mlp(), Loss())
    model = wrap(two, layers)
    x, _ = batch(6)
    found = model.forward_backward(input_kwargs={}, input_args=(x,))
    assert_near(found, layers(x), 1e-4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"input_kwargs": [1]}, "input_kwargs"),
        ({"loss_fn": None}, "loss_fn"),
        ({"run_config": {"num_microbatch": 2}}, "run_config"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused(two: Runtime, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        wrap(two).forward_backward(**{"input_args": (batch(6)[0],), **arguments})


def test_settings_of_the_wrong_type_are_refused_everywhere(two: Runtime) -> None:
    with pytest.raises(TypeError, match="model_run_config"):
        wrap(two, model_run_config={"num_microbatch": 2})
    with pytest.raises(TypeError, match="roundpipe_run_config"):
        wrap(two)(batch(6)[0], roundpipe_run_config={"num_microbatch": 2})
    with pytest.raises(TypeError, match="name"):
        wrap(two, name=3)
    with pytest.raises(TypeError, match="runtime"):
        RoundPipe(mlp(), runtime="cpu:2")  # type: ignore[arg-type]


# Steps


def test_step_passes_arguments_on_and_refuses_one_in_the_wrong_place(two: Runtime) -> None:
    model = wrap(two)
    seen: list[Any] = []

    def step_fn(*args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs, threading.current_thread() is threading.main_thread()))

    model.step(step_fn, False, 1, 2, three=3)
    model.step(step_fn, True, 4)
    model.synchronize()
    assert seen == [((1, 2), {"three": 3}, False), ((4,), {}, False)]
    with pytest.raises(TypeError, match="is_async must be a bool"):
        model.step(step_fn, torch.optim.SGD(model.optim_parameters(), lr=0.1))  # type: ignore[arg-type]
    with pytest.raises(Busy):
        model.step(model.synchronize, False)


# Parameters


def test_named_optimizer_parameters_have_the_models_names_and_the_asked_dtype(two: Runtime) -> None:
    layers = mlp().bfloat16()
    layers[0].bias.requires_grad_(False)
    layers.append(layers[0])
    model = wrap(two, layers, optim_dtype=torch.float32)
    trained = [name for name, parameter in layers.named_parameters() if parameter.requires_grad]
    found = dict(model.optim_named_parameters())
    assert list(found) == trained
    assert {parameter.dtype for parameter in found.values()} == {torch.float32}
    assert list(map(id, model.optim_parameters())) == list(map(id, found.values()))
    twice = dict(model.optim_named_parameters("net", remove_duplicate=False))
    assert twice["net.5.weight"] is twice["net.0.weight"]


def test_parameters_warn_outside_step_functions_and_are_the_optimizers_inside(two: Runtime) -> None:
    layers = mlp()
    model = wrap(two, layers)
    inside: list[Any] = []

    def look() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            inside.extend(
                [list(model.parameters()), list(model.named_parameters()), list(model.parameters(False))]
            )

    model.step(look, False)
    assert list(map(id, inside[0])) == list(map(id, model.optim_parameters()))
    assert [name for name, _ in inside[1]] == [name for name, _ in layers.named_parameters()]
    assert inside[2] == []
    for ask in (model.parameters, model.named_parameters):
        with pytest.warns(UserWarning, match="optim_parameters"):
            found = list(ask())
        assert len(found) == len(inside[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.requires_grad_(False) is model
        model.train().eval().zero_grad()
        model.state_dict()
    assert not any(parameter.requires_grad for parameter in layers.parameters())


def test_a_layer_that_is_unfrozen_after_wrapping_is_among_the_optimizers_parameters_at_once(two: Runtime) -> None:
    layers = mlp()
    layers[0].requires_grad_(False)
    model = wrap(two, layers)
    layers[0].requires_grad_(True)
    found = dict(model.optim_named_parameters())
    assert "0.weight" in found
    optimizer = torch.optim.SGD(found.values(), lr=0.1)
    x, y = batch(6)
    before = weights(layers)
    model.forward_backward((x,), None, y, square_error)
    model.step(optimizer.step, False)
    model.synchronize()
    assert not torch.equal(before["0.weight"], layers[0].weight)


def test_a_penalty_on_the_raw_weights_counts(runtime: Runtime) -> None:
    layers = mlp()
    truth = twin(layers)
    model = wrap(runtime, layers)
    x, y = batch(6)
    for turn in range(2):
        for net, call in ((layers, model), (truth, truth)):
            loss = square_error(call(x), y) + net[0].weight.square().sum()
            loss.backward()
        if turn == 0:
            # Shown, and added to by autograd itself.
            model.synchronize()
            for net in (layers, truth):
                net[2].weight.square().sum().backward()
    model.synchronize()
    assert_near(gradients(layers), gradients(truth))


def test_a_penalty_is_not_dropped_with_the_gradients_of_a_step_that_is_under_way(two: Runtime) -> None:
    layers = mlp()
    model = wrap(two, layers)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    go_on = threading.Event()
    x, y = batch(6)
    model.forward_backward((x,), None, y, square_error)
    model.step(lambda: (go_on.wait(30), optimizer.zero_grad()))
    layers[0].weight.square().sum().backward()
    # The call takes the penalty over, and so waits for the step, which goes on once it does.
    threading.Timer(0.5, go_on.set).start()
    with torch.no_grad():
        model(x)
    go_on.set()
    model.synchronize()
    assert_near(layers[0].weight.grad, 2 * layers[0].weight)


def test_after_a_synchronous_step_nothing_is_left_to_publish(two: Runtime) -> None:
    model = wrap(two)
    x, _ = batch(6)
    model(x).sum().backward()
    model.step(lambda: None, False)
    kept = model(x)
    model.synchronize()
    kept.sum().backward()


# Attributes


def made_from() -> tuple[nn.Sequential, nn.Module]:
    original = nn.Module()
    original.config = {"width": 6}
    original.shared = "original"
    layers = mlp()
    layers.shared = layers.own = "row"
    return layers, original


def test_attributes_are_read_from_the_original_first_and_then_from_what_is_wrapped(two: Runtime) -> None:
    layers, original = made_from()
    model = wrap(two, layers)
    assert model.shared == "row"
    model.set_original_model(original)
    assert (model.config, model.shared, model.own) == ({"width": 6}, "original", "row")
    assert model.original_model is original
    with pytest.raises(AttributeError, match="nonesuch"):
        model.nonesuch  # noqa: B018
    with pytest.raises(TypeError, match=r"nn\.Module"):
        model.set_original_model("gpt")  # type: ignore[arg-type]


def test_attributes_are_written_to_and_deleted_from_whoever_has_them(two: Runtime) -> None:
    layers, original = made_from()
    model = wrap(two, layers)
    model.set_original_model(original)
    model.shared = "new"
    assert original.shared == layers.shared == "new"
    model.own = 1
    assert layers.own == 1
    assert not hasattr(original, "own")
    model.note = "here"
    assert model.note == "here"
    assert not hasattr(layers, "note")
    model.name = "renamed"
    assert model.name == "renamed"
    assert not hasattr(layers, "name")
    for gone in ("shared", "own", "note"):
        delattr(model, gone)
        assert not hasattr(model, gone)
    with pytest.raises(AttributeError):
        del model.nonesuch


def test_a_plain_attribute_of_a_single_layer_is_changed_through_the_model(two: Runtime) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 3), 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale

    layers = Scaled()
    model = wrap(two, layers)
    x, _ = batch(6)
    before = model(x)
    model.scale = 3.0
    assert_near(model(x), before * 3)
    model.linear = nn.Linear(4, 3)
    assert_near(model(x), layers(x))


@pytest.mark.parametrize("name", ["model", "extra", "head"])
def test_a_module_that_no_call_would_use_is_refused(two: Runtime, name: str) -> None:
    model = wrap(two)
    original = nn.Module()
    original.head = nn.Linear(1, 1)
    model.set_original_model(original)
    with pytest.raises(TypeError, match=r"model\.model"):
        setattr(model, name, nn.Linear(1, 1))


def test_a_model_is_named_after_the_line_that_wrapped_it(two: Runtime) -> None:
    frame = inspect.currentframe()
    assert frame is not None
    model, line = RoundPipe(mlp(), runtime=two), frame.f_lineno
    auto, auto_line = AutoRoundPipe(nn.Linear(1, 1), runtime=two), frame.f_lineno
    assert (model.name, auto.name) == (f"{Path(__file__).name}:{line}", f"{Path(__file__).name}:{auto_line}")
    assert wrap(two, name="mine").name == "mine"


# Copies


@pytest.mark.parametrize("make", [lambda runtime: wrap(runtime), lambda r: AutoRoundPipe(mlp(), runtime=r)])
def test_copies_of_a_wrapped_model_are_refused_in_words(
    two: Runtime, make: Callable[[Runtime], RoundPipe | AutoRoundPipe], tmp_path: Path
) -> None:
    model = make(two)
    for attempt in (
        lambda: copy.deepcopy(model),
        lambda: copy.copy(model),
        lambda: pickle.dumps(model),
        lambda: torch.save(model, tmp_path / "model.pt"),
    ):
        with pytest.raises(TypeError, match=r"synchronize\(\).*model\.model"):
            attempt()
    with pytest.raises(TypeError, match="wrap it with compile_layers=True"):
        model.compile()


@pytest.mark.few(1)
@pytest.mark.parametrize("pin", ["alloc", "off"])
def test_what_is_wrapped_can_be_copied_pickled_and_saved(two: Runtime, pin: Any, tmp_path: Path) -> None:
    layers = mlp()
    model = wrap(two, layers, pin_model=pin)
    x, y = batch(6)
    model.forward_backward((x,), None, y, square_error)
    model.synchronize()
    torch.save(layers, tmp_path / "layers.pt")
    loaded = torch.load(tmp_path / "layers.pt", weights_only=False)
    for copied in (copy.deepcopy(layers), pickle.loads(pickle.dumps(layers)), loaded):
        assert_near(weights(copied), weights(layers), 0)
        again = wrap(two, copied)
        assert_near(again(x), model(x), 0)
    assert (tmp_path / "layers.pt").stat().st_size < 20_000


# One model a parameter


@pytest.mark.slow
def test_a_parameter_of_two_models_is_refused_and_free_again_when_one_is_gone(two: Runtime) -> None:
    shared = nn.Linear(4, 4)
    first = wrap(two, nn.Sequential(shared, nn.Linear(4, 3)), name="first")
    with pytest.raises(ValueError, match=r"'weight' of layer 1 .* 'first'"):
        wrap(two, nn.Sequential(nn.Tanh(), shared))
    with pytest.raises(ValueError, match="'first'"):
        wrap(two, first.model)
    first(batch(6)[0])
    del first
    wrap(two, nn.Sequential(nn.Tanh(), shared))


def test_a_layer_that_moves_from_one_model_to_another_belongs_to_the_other(two: Runtime) -> None:
    layers, other = mlp(), mlp()
    model, second = wrap(two, layers), wrap(two, other)
    moved = layers[2]
    x, _ = batch(6)
    other[2] = moved
    with pytest.raises(ValueError, match="already belongs"):
        second(x)
    layers[2] = nn.Linear(6, 6)
    model(x)
    assert_near(second(x), other(x))


# The end


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["row", "auto"])
def test_a_dropped_model_is_collected_with_its_memory_and_starts_no_thread(runtime: Runtime, kind: str) -> None:
    x, _ = batch(6)

    def use() -> list[weakref.ref[Any]]:
        layers = mlp(width=64)
        if kind == "auto":
            layers[0] = RoundPipe(layers[0], runtime=runtime)
        model = AutoRoundPipe(layers) if kind == "auto" else wrap(runtime, layers)
        optimizer = torch.optim.Adam(model.optim_parameters(), lr=0.1)
        kept = model(x)
        model(x).sum().backward()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        model.synchronize()
        del kept
        return [weakref.ref(model), weakref.ref(layers), weakref.ref(layers[2].weight)]

    def used() -> tuple[object, ...]:
        for lane in runtime.lanes:
            lane.device.synchronize()
            lane.retainer.flush()
        gc.collect()
        on_devices = [use.used_bytes for use in runtime.memory()]
        host = runtime.host_memory()
        return on_devices, host.used_bytes, host.pinned_bytes, threading.active_count()

    for _ in range(2 * len(runtime.lanes)):
        use()
    before = used()
    gone = use()
    after = used()
    assert [ref() for ref in gone] == [None] * 3
    assert after == before
