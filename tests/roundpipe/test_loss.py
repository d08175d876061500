"""`RoundPipe.loss`: the number of `forward_backward`, without gradients and without what only backward needs."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import roundpipe
import rp_batch
import torch
from plain import PLAN_NAMES, assert_near, batch, gradients, mlp, plans, square_error
from roundpipe import AutoRoundPipe, RoundPipe, RoundPipeRunConfig, Runtime, token_mean, wrap_model_to_roundpipe
from rp_engine.errors import TrainingWarning
from rp_presets import OwnLoss, causal_lm_loss
from torch import nn
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_outputs import CausalLMOutput

pytestmark = pytest.mark.filterwarnings("ignore:.*parts were requested")

CPU = torch.default_generator


# What layers and loss functions ran, and under which grad mode. Layers are copied to devices, a global is not.
RUNS: list[tuple[str, bool]] = []


class Noise(nn.Module):
    """Multiplies by numbers of the CPU generator in training mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.randn(x.shape).to(x.device) if self.training else x


def random_row() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), Noise(), nn.Linear(4, 3))


def wrap(layers: nn.Module, runtime: Runtime, parts: int = 3, **settings: Any) -> RoundPipe:
    config = RoundPipeRunConfig(num_microbatch=parts, **settings)
    return RoundPipe(layers, runtime=runtime, model_run_config=config)


def both(model: RoundPipe, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """What `loss` and `forward_backward` return from the same seed; the gradients are dropped."""
    torch.manual_seed(5)
    found = model.loss(*args, **kwargs)
    torch.manual_seed(5)
    wanted = model.forward_backward(*args, **kwargs)
    model.zero_grad()
    return found, wanted


def assert_same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


# The number of `forward_backward`, to the bit


@pytest.mark.pairwise
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", PLAN_NAMES)
def test_the_loss_is_that_of_forward_backward_under_every_plan(
    runtime: Runtime, name: str, training: bool
) -> None:
    model = wrap(random_row(), runtime, execute_plan=plans(5, 3)[name]).train(training)
    x, y = batch(7)

    # Layers are examined in their first calls.
    for _ in range(3):
        found, wanted = both(model, (x,), None, y, square_error)

        assert_same(found, wanted)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_it_is_for_any_number_of_microbatches(runtime: Runtime, parts: int) -> None:
    model = wrap(random_row(), runtime, parts)
    x, y = batch(7)

    found, wanted = both(model, (x,), None, y, square_error)

    assert found.shape == ()
    assert found.device.type == "cpu"
    assert not found.requires_grad
    assert_same(found, wanted)


def test_it_is_where_the_number_of_microbatches_is_left_open(runtime: Runtime) -> None:
    model = RoundPipe(mlp(), runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=None))
    x, y = batch(9)

    found, wanted = both(model, (x,), None, y, square_error)

    assert_near(found, wanted, 1e-6)


def test_several_losses_are_a_list_of_sums(runtime: Runtime) -> None:
    def losses(outputs: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return square_error(outputs, label), (outputs - label).abs().sum()

    model = wrap(random_row(), runtime)
    x, y = batch(7)

    found, wanted = both(model, (x,), None, y, losses)

    assert isinstance(found, list)
    assert len(found) == 2
    assert_same(found, wanted)


def test_a_token_mean_counts_the_labels_of_the_batch(runtime: Runtime) -> None:
    def summed(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), label.flatten(), reduction="sum")

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(11, 6), nn.Tanh(), nn.Linear(6, 11))
    truth = copy.deepcopy(layers)
    ids = torch.randint(11, (5, 4))
    label = ids.masked_fill(torch.arange(4) >= torch.tensor([[4], [1], [0], [2], [3]]), -100)
    model = wrap(layers, runtime)

    found, wanted = both(model, (ids,), None, label, token_mean(summed, shift=False))

    assert_same(found, wanted)
    assert_near(found, functional.cross_entropy(truth(ids).flatten(0, 1), label.flatten()).detach(), 1e-6)


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)

    def forward(self, input_ids=None, labels=None, num_items_in_batch=None):
        return self.embed(input_ids), labels, num_items_in_batch


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 11)

    def forward(self, carry):
        hidden, labels, total = carry
        logits = self.head(hidden)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / total
        return CausalLMOutput(loss=loss, logits=logits)


def own_loss_row() -> nn.Sequential:
    torch.manual_seed(0)
    row = nn.Sequential(First(), Last())
    row.own_loss = OwnLoss("tokens", True, 0.0)
    return row


@pytest.mark.parametrize("returned", [False, True])
def test_the_models_own_loss_is_that_of_labels_in_its_arguments(runtime: Runtime, returned: bool) -> None:
    ids = torch.randint(11, (5, 4), generator=torch.Generator().manual_seed(2))
    labels = ids.masked_fill(torch.arange(4) >= torch.tensor([[4], [1], [0], [2], [3]]), -100)
    model = wrap(own_loss_row(), runtime)

    found, wanted = both(model, input_kwargs={"input_ids": ids, "labels": labels}, return_outputs=returned)

    if not returned:
        assert_same(found, wanted)
        return
    assert_same(found[0], wanted[0])
    assert_same(found[1].loss, found[0])
    assert_same(found[1].logits, wanted[1].logits)


@pytest.mark.few(1)
@pytest.mark.parametrize("is_own", [True, False], ids=["own loss", "causal_lm_loss"])
def test_a_hugging_face_model_has_the_loss_of_its_training_calls(two: Runtime, is_own: bool) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32, "head_dim": 8}
    config = Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1)
    config._attn_implementation = "sdpa"
    model = wrap_model_to_roundpipe(
        Qwen3ForCausalLM(config), runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=3)
    ).eval()
    ids = torch.randint(32, (4, 6))

    if is_own:
        found, wanted = both(model, input_kwargs={"input_ids": ids, "labels": ids})
    else:
        # It reads the hidden states where the head has not computed the logits.
        loss_fn = token_mean(partial(causal_lm_loss, reduction="sum"), shift=True)
        found, wanted = both(model, input_kwargs={"input_ids": ids}, label=ids, loss_fn=loss_fn)

    assert_same(found, wanted)


def test_a_batch_in_microbatches_already_is_taken_as_it_is(runtime: Runtime) -> None:
    packed = RoundPipeRunConfig(num_microbatch=3, merge_output=False)
    bottom = RoundPipe(mlp(), runtime=runtime, model_run_config=packed).eval()
    top = wrap(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), runtime).eval()
    x, y = batch(7)
    with torch.no_grad():
        between = bottom(x)
    assert isinstance(between, rp_batch.Parts)

    found, wanted = both(top, (between,), None, y, square_error)

    assert_same(found, wanted)


def test_outputs_stay_in_microbatches_where_they_are_not_merged(runtime: Runtime) -> None:
    model = wrap(mlp(), runtime, merge_output=False)
    x, y = batch(7)

    loss, outputs = model.loss((x,), None, y, square_error, return_outputs=True)

    outputs.synchronize()
    with torch.no_grad():
        assert_near(torch.cat(list(outputs)), model.model(x), 1e-6)
    assert_near(loss, square_error(torch.cat(list(outputs)), y), 1e-5)


def test_outputs_are_those_of_a_forward(runtime: Runtime) -> None:
    model = wrap(mlp(), runtime)
    x, y = batch(7)

    loss, outputs = model.loss((x,), None, y, square_error, return_outputs=True)

    with torch.no_grad():
        assert_same(outputs, model(x))
    assert not outputs.requires_grad
    assert_same(loss, model.loss((x,), None, y, square_error))


def test_autocast_of_the_caller_holds_for_layers_and_loss(runtime: Runtime) -> None:
    kind = runtime.lanes[0].device.torch_device.type
    model = wrap(mlp(), runtime)
    x, y = batch(7)
    dtypes: list[torch.dtype] = []

    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        dtypes.append(outputs.dtype)
        return square_error(outputs.float(), label)

    with torch.autocast(kind, torch.bfloat16):
        found, wanted = both(model, (x,), None, y, loss_fn)

    assert set(dtypes) == {torch.bfloat16}
    assert_same(found, wanted)


# Modes and random numbers


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_callers_grad_mode_does_not_matter(runtime: Runtime, mode: Callable[[], Any]) -> None:
    model = wrap(mlp(), runtime)
    x, y = batch(7)
    wanted = model.loss((x,), None, y, square_error)

    with mode():
        found = model.loss((x,), None, y, square_error)
        from_inside = model.loss((x * 1,), None, y * 1, square_error)

    assert found.item() == from_inside.item() == wanted.item()


def test_layers_and_loss_function_run_without_grad_mode_and_once_a_microbatch(runtime: Runtime) -> None:
    lock = threading.Lock()

    class Looking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with lock:
                RUNS.append(("layer", torch.is_grad_enabled()))
            return super().forward(x)

    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        assert not outputs.requires_grad
        with lock:
            RUNS.append(("loss", torch.is_grad_enabled()))
        return square_error(outputs, label)

    model = wrap(nn.Sequential(Looking(4, 3), Looking(3, 3)), runtime)
    x, y = batch(6)
    for _ in range(2):
        # Layers run once more in their first calls, which are examined.
        model.loss((x,), None, y, loss_fn)
    RUNS.clear()

    model.loss((x.requires_grad_(),), None, y, loss_fn)

    assert sorted(RUNS) == [("layer", False)] * 6 + [("loss", False)] * 3
    assert x.grad is None


def test_evaluation_draws_nothing_from_the_callers_generator(runtime: Runtime) -> None:
    model = wrap(random_row(), runtime).eval()
    x, y = batch(7)
    before = CPU.get_state()

    model.loss((x,), None, y, square_error)

    assert torch.equal(CPU.get_state(), before)


def test_training_mode_draws_the_one_number_of_a_call(runtime: Runtime) -> None:
    model = wrap(random_row(), runtime)
    x, y = batch(7)
    torch.manual_seed(5)
    torch.randint(1 << 62, ())
    wanted = CPU.get_state()

    torch.manual_seed(5)
    model.loss((x,), None, y, square_error)

    assert torch.equal(CPU.get_state(), wanted)


def test_the_flags_of_single_modules_count(runtime: Runtime) -> None:
    layers = random_row()
    model = wrap(layers, runtime).eval()
    layers[1].train()
    x, y = batch(7)

    found, wanted = both(model, (x,), None, y, square_error)

    assert_same(found, wanted)
    assert found != model.eval().loss((x,), None, y, square_error)


def test_statistics_of_batch_norms_move_in_training_mode_only(runtime: Runtime) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    truth = copy.deepcopy(layers)
    model = wrap(layers, runtime, parts=2)
    x, y = batch(6)

    model.loss((x,), None, y, square_error)
    model.eval().loss((x,), None, y, square_error)

    model.synchronize()
    for part in x.chunk(2):
        truth(part)
    assert_near(layers[1].running_mean, truth[1].running_mean, 1e-6)
    assert layers[1].num_batches_tracked == 2


# What it leaves alone


def test_gradients_of_earlier_calls_stay_as_they_are(runtime: Runtime) -> None:
    layers = mlp()
    model = wrap(layers, runtime)
    x, y = batch(7)
    model.forward_backward((x,), None, y, square_error)
    model.synchronize()
    wanted = {name: grad.clone() for name, grad in gradients(layers).items() if grad is not None}

    model.loss((x,), None, y, square_error)

    model.synchronize()
    assert_same(gradients(layers), wanted)


def test_it_makes_no_gradients(runtime: Runtime) -> None:
    layers = mlp()
    model = wrap(layers, runtime)
    x, y = batch(7)

    model.loss((x,), None, y, square_error)

    model.synchronize()
    assert all(parameter.grad is None for parameter in layers.parameters())


def test_a_forward_before_it_may_still_run_its_backward(runtime: Runtime) -> None:
    layers, truth = mlp(), mlp()
    model = wrap(layers, runtime)
    x, y = batch(7)
    outputs = model(x)

    model.loss((x,), None, y, square_error)

    square_error(outputs, y).backward()
    model.synchronize()
    square_error(truth(x), y).backward()
    assert_near(gradients(layers), gradients(truth), 1e-5)


def test_it_reads_the_weights_that_any_call_reads(runtime: Runtime) -> None:
    layers = mlp()
    model = wrap(layers, runtime)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.001)
    x, y = batch(7)
    before = model.loss((x,), None, y, square_error)
    model.forward_backward((x,), None, y, square_error)

    model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    late = model.loss((x,), None, y, square_error)
    delay = model.weights_delay
    model.synchronize()
    current = model.loss((x,), None, y, square_error)

    assert (delay, model.weights_delay) == (1, 0)
    assert_same(late, before)
    assert current < before


def test_a_model_without_trainable_parameters_has_a_loss(runtime: Runtime) -> None:
    layers = mlp().requires_grad_(False)
    model = wrap(layers, runtime)
    x, y = batch(7)

    found = model.loss((x,), None, y, square_error)

    assert_near(found, square_error(layers(x), y), 1e-5)


def test_a_model_that_steps_in_backward_needs_no_optimizer_for_it(runtime: Runtime) -> None:
    layers = mlp()
    truth = copy.deepcopy(layers)
    config = RoundPipeRunConfig(num_microbatch=3)
    model = RoundPipe(layers, runtime=runtime, step_in_backward=True, model_run_config=config)
    x, y = batch(7)

    found = model.loss((x,), None, y, square_error)

    assert_near(found, square_error(truth(x), y).detach(), 1e-5)
    assert_same(dict(layers.state_dict()), dict(truth.state_dict()))


def test_outputs_that_cannot_leave_a_device_may_be_read_by_the_loss_function(runtime: Runtime) -> None:
    class Wrapped(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {1.5: x.square(), "kept": lambda: x}

    model = wrap(nn.Sequential(nn.Linear(4, 3), Wrapped()), runtime)
    x, y = batch(7)

    found, wanted = both(model, (x,), None, y, lambda outputs, label: square_error(outputs["kept"](), label))

    assert_same(found, wanted)


def test_its_calls_are_planned_as_inference(runtime: Runtime) -> None:
    model = wrap(mlp(), runtime)
    x, y = batch(7)

    for _ in range(4):
        model.loss((x,), None, y, square_error)
    model.synchronize()

    (found,) = model.call_times()
    assert "infer calls of 3 microbatches" in found.what
    assert found.plan.fused is None
    assert not found.plan.backward


# Errors


def test_a_label_needs_a_loss_function(two: Runtime) -> None:
    x, y = batch(6)

    with pytest.raises(ValueError, match="label is given, but no loss_fn"):
        wrap(mlp(), two).loss((x,), label=y)


def test_it_computes_no_gradients_where_they_are_asked_for(two: Runtime) -> None:
    x, y = batch(6)

    with pytest.raises(ValueError, match="loss computes no gradients, but requires_grad is True"):
        wrap(mlp(), two).loss((x,), None, y, square_error, run_config=RoundPipeRunConfig(requires_grad=True))


@pytest.mark.parametrize("asked", [True, False])
def test_settings_of_the_model_about_gradients_do_not_matter(two: Runtime, asked: bool) -> None:
    x, y = batch(6)

    found = wrap(mlp(), two, requires_grad=asked).loss((x,), None, y, square_error)

    assert_near(found, square_error(mlp()(x), y).detach(), 1e-5)


def test_inputs_are_a_tuple(two: Runtime) -> None:
    x, y = batch(6)

    with pytest.raises(TypeError, match="input_args must be a tuple"):
        wrap(mlp(), two).loss(x, None, y, square_error)  # pyright: ignore[reportArgumentType]


def test_a_loss_has_one_element(runtime: Runtime) -> None:
    x, y = batch(6)

    with pytest.raises(TypeError, match=r"tensor of shape \(2, 3\) instead; reduce it"):
        wrap(mlp(), runtime).loss((x,), None, y, lambda outputs, label: outputs - label)


def test_microbatches_have_as_many_losses_as_each_other(runtime: Runtime) -> None:
    def uneven(outputs: torch.Tensor, label: torch.Tensor) -> list[torch.Tensor]:  # noqa: ARG001 - as called
        return [outputs.sum()] * len(outputs)

    with pytest.raises(TypeError, match="as many losses for every microbatch"):
        wrap(mlp(), runtime).loss((batch(7)[0],), None, batch(7)[1], uneven)


def test_an_error_of_the_loss_function_says_where_and_the_next_call_is_well(runtime: Runtime) -> None:
    def fails(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - as called
        raise KeyError("mine")

    model = wrap(mlp(), runtime, parts=1)
    x, y = batch(6)

    with pytest.raises(KeyError, match="mine") as told:
        model.loss((x,), None, y, fails)

    assert any("in the loss function, forward, microbatch 0" in note for note in told.value.__notes__)
    assert_near(model.loss((x,), None, y, square_error), square_error(mlp()(x), y).detach(), 1e-5)
    model.forward_backward((x,), None, y, square_error)
    model.synchronize()


def test_a_loss_without_a_graph_is_fine_as_nothing_is_trained(runtime: Runtime) -> None:
    model = wrap(mlp(), runtime)
    x, y = batch(6)

    found = model.loss((x,), None, y, lambda outputs, label: square_error(outputs.detach(), label))

    assert_near(found, square_error(mlp()(x), y).detach(), 1e-5)


def test_a_mean_of_each_microbatch_is_warned_of(two: Runtime) -> None:
    x, y = batch(6)

    with pytest.warns(TrainingWarning, match="loss_fn takes a mean"):
        wrap(mlp(), two).loss((x,), None, y, functional.mse_loss)


def test_a_profile_counts_it_as_a_call(two: Runtime, tmp_path: Any) -> None:
    model = wrap(mlp(), two)
    x, y = batch(6)

    with roundpipe.profile(tmp_path / "trace.json") as taken:
        model.loss((x,), None, y, square_error)

    assert taken.summary.num_calls == 1


# Models that are taken apart


class Net(nn.Module):
    """No row: a dropout and a weight outside the part."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 3))

    def forward(self, x: torch.Tensor, label: torch.Tensor | None = None) -> Any:
        outputs = functional.dropout(self.inner(x) * self.scale, 0.3, self.training)
        loss = None if label is None else functional.mse_loss(outputs, label)
        return CausalLMOutput(loss=loss, logits=outputs)


def of_logits(outputs: CausalLMOutput, label: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(outputs.logits, label)


def taken_apart(runtime: Runtime) -> tuple[AutoRoundPipe, Net]:
    torch.manual_seed(0)
    net = Net()
    truth = copy.deepcopy(net)
    net.inner = RoundPipe(net.inner, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=3))
    return AutoRoundPipe(net, name="net"), truth


def test_a_model_in_parts_has_its_own_loss_or_that_of_a_function_of_the_whole_batch(runtime: Runtime) -> None:
    model, truth = taken_apart(runtime)
    model.eval()
    x, y = batch(7)
    before = CPU.get_state()

    own = model.loss((x,), {"label": y})
    theirs, outputs = model.loss((x,), None, y, of_logits, return_outputs=True)

    with torch.no_grad():
        wanted = truth.eval()(x, y)
    assert_near(own, wanted.loss, 1e-6)
    assert_same(theirs, own)
    assert_near(outputs.logits, wanted.logits, 1e-6)
    assert not own.requires_grad
    assert torch.equal(CPU.get_state(), before)


def test_a_model_in_parts_has_the_loss_that_it_is_trained_with(runtime: Runtime) -> None:
    model, _ = taken_apart(runtime)
    x, y = batch(7)

    for _ in range(2):
        torch.manual_seed(5)
        found = model.loss((x,), {"label": y})
        torch.manual_seed(5)
        wanted = model(x, y).loss

        assert_same(found, wanted.detach())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_in_parts_has_a_loss_in_any_grad_mode(runtime: Runtime, mode: Callable[[], Any]) -> None:
    model, _ = taken_apart(runtime)
    model.eval()
    x, y = batch(7)
    wanted = model.loss((x,), {"label": y})

    with mode():
        found = model.loss((x,), {"label": y})

    assert found.item() == wanted.item()


def test_a_loss_of_a_model_in_parts_leaves_gradients_and_pending_backwards_alone(runtime: Runtime) -> None:
    model, truth = taken_apart(runtime)
    model.eval()
    truth.eval()
    x, y = batch(7)
    loss = model(x, y).loss

    model.loss((x.requires_grad_(),), {"label": y})

    assert x.grad is None
    assert model.model.scale.grad is None
    loss.backward()
    model.synchronize()
    truth(x.detach(), y).loss.backward()
    assert_near(model.model.scale.grad, truth.scale.grad, 1e-6)


def test_losses_of_a_model_in_parts_are_a_list_where_the_function_returns_several(two: Runtime) -> None:
    model, _ = taken_apart(two)
    model.eval()
    x, y = batch(7)

    found = model.loss((x,), None, y, lambda outputs, label: (of_logits(outputs, label), outputs.logits.sum()))

    assert isinstance(found, list)
    assert_same(found[0], model.loss((x,), {"label": y}))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"run_config": RoundPipeRunConfig()}, TypeError, "'net' runs in parts.*takes no run_config"),
        ({"label": torch.zeros(7, 3)}, ValueError, "label is given, but no loss_fn"),
        ({}, TypeError, "returned a CausalLMOutput without a loss"),
        ({"loss_fn": lambda outputs, _: outputs.logits}, TypeError, "must return a tensor of one element"),
        ({"input_args": batch(7)[0]}, TypeError, "input_args must be a tuple"),
    ],
    ids=["settings", "label", "no loss", "many elements", "no tuple"],
)
def test_what_a_loss_of_a_model_in_parts_cannot_be_given(
    two: Runtime, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    model, _ = taken_apart(two)

    with pytest.raises(error, match=words):
        model.loss(**{"input_args": (batch(7)[0],), **arguments})
