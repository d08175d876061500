"""Any module can be wrapped: by a preset, as a row, or taken apart; it then trains as in plain PyTorch."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import roundpipe
import torch
from plain import assert_near, gradients, mlp, twin, weights
from roundpipe import AutoRoundPipe, RoundPipe, RoundPipeError, RoundPipeRunConfig, Runtime, Stale
from roundpipe import wrap_model_to_roundpipe as wrap
from torch import nn
from transformers import BartConfig, BartForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM


class Block(nn.Module):
    """A residual block of about 8 kB at width 16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor, *, gain: float = 1.0) -> torch.Tensor:
        return x + gain * self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """What no preset knows: containers, a parameter of its own, a loop."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.shift = nn.Parameter(torch.randn(16))
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.inner = nn.ModuleDict({"row": nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))})
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 40, bias=False)
        self.answer = 42
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.shift
        for block in self.blocks:
            x = block(x, gain=0.5)
        return self.head(self.norm(self.inner["row"](x)))


def net(**kwargs: Any) -> Net:
    torch.manual_seed(0)
    return Net(**kwargs)


def ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 40, (6, 5), generator=torch.Generator().manual_seed(seed))


def wrapped(model: nn.Module, runtime: Runtime, **kwargs: Any) -> AutoRoundPipe:
    """Taken apart, everything above 1 kB on the devices."""
    how = {
        "lower_threshold": 1024,
        "upper_threshold": 9500,
        "model_run_config": RoundPipeRunConfig(num_microbatch=2),
    }
    found = wrap(model, runtime=runtime, **{**how, **kwargs})
    assert isinstance(found, AutoRoundPipe)
    return found


def parts(model: AutoRoundPipe) -> dict[str, RoundPipe]:
    return dict(model.parts)


def plain_steps(model: nn.Module, lag: int, steps: int, make: Callable[..., torch.optim.Optimizer]) -> list[float]:
    """Losses of plain training in which calls read weights that are `lag` steps old."""
    optimizer = make(model.parameters())
    history = [weights(model)]
    losses: list[float] = []
    for seed in range(steps):
        current = weights(model)
        model.load_state_dict(history[max(0, len(history) - 1 - lag)])
        loss = model(ids(seed)).square().mean()
        loss.backward()
        model.load_state_dict(current)
        optimizer.step()
        optimizer.zero_grad()
        history.append(weights(model))
        losses.append(loss.item())
    return losses


# Taken apart


def test_large_submodules_become_models_and_small_ones_stay(two: Runtime) -> None:
    model = wrapped(net(), two)
    assert set(parts(model)) == {"embed", "blocks.0", "blocks.1", "blocks.2", "inner.row", "head"}
    assert len(parts(model)["inner.row"].layer_costs()) == 3
    assert isinstance(model.model.norm, nn.LayerNorm)
    assert model.answer == 42
    assert model.name.startswith("test_wrap.py:")
    assert parts(model)["blocks.1"].name == f"{model.name}.blocks.1"


def test_submodules_above_the_upper_threshold_are_taken_apart_in_turn(two: Runtime) -> None:
    model = wrapped(net(), two, upper_threshold=5000)
    assert "blocks.0.up" in parts(model)
    assert "blocks.0" not in parts(model)


def test_the_default_threshold_is_a_share_for_each_device_and_one_more(two: Runtime) -> None:
    model = wrapped(net(), two, upper_threshold=None)  # about 36 kB in three shares
    assert {"blocks.0", "embed", "head"} <= set(parts(model))


@pytest.mark.few(1)
@pytest.mark.parametrize("lag", [0, 1])
def test_a_model_that_was_taken_apart_trains_as_plain_pytorch(runtime: Runtime, lag: int) -> None:
    layers = net()
    truth = twin(layers)
    model = wrapped(layers, runtime)

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)

    optimizer = make(model.optim_parameters())
    losses: list[float] = []
    for seed in range(6):
        loss = model(ids(seed)).square().mean()
        loss.backward()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=lag == 1)
        losses.append(loss.item())
    model.synchronize()
    wanted = plain_steps(truth, lag, 6, make)
    assert losses == pytest.approx(wanted, rel=1e-4)
    assert_near(weights(model.model), weights(truth), 1e-4)


def test_gradients_add_up_and_are_shown_under_the_old_names(runtime: Runtime) -> None:
    layers = net()
    truth = twin(layers)
    model = wrapped(layers, runtime)
    for seed in range(2):
        model(ids(seed)).square().mean().backward()
        truth(ids(seed)).square().mean().backward()
    names = [name for name, _ in truth.named_parameters()]
    assert [name for name, _ in model.optim_named_parameters()] == names
    model.synchronize()
    found = list(gradients(model.model).values())
    assert_near(dict(zip(names, found, strict=True)), gradients(truth))
    # They were shown, and still count.
    seen: list[torch.Tensor] = []
    model.step(lambda: seen.extend(p.grad.clone() for p in model.parameters()), is_async=False)
    assert_near(dict(zip(names, seen, strict=True)), gradients(truth))
    model.zero_grad()
    model.synchronize()
    assert set(gradients(model.model).values()) == {None}


@pytest.mark.few(1)
@pytest.mark.parametrize("drop", ["zero_grad", "reset"])
def test_gradients_are_dropped_that_autograd_has_put_outside_the_parts(two: Runtime, drop: str) -> None:
    layers = net()
    truth = twin(layers)
    model = wrapped(layers, two)
    model(ids(0)).square().mean().backward()

    getattr(model, drop)()
    model(ids(1)).square().mean().backward()
    model.synchronize()

    truth(ids(1)).square().mean().backward()
    assert_near(gradients(model.model), gradients(truth))


def test_what_code_outside_has_put_into_grad_is_dropped_too(two: Runtime) -> None:
    layers = mlp()
    model = RoundPipe(layers, runtime=two)
    layers[0].weight.sum().backward()

    model.zero_grad()
    model.synchronize()

    assert set(gradients(layers).values()) == {None}


def test_a_weight_that_the_parent_reads_itself_gets_its_gradient(two: Runtime) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(20, 20)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + x @ self.linear.weight

    torch.manual_seed(0)
    layers = Reads()
    truth = twin(layers)
    layers.linear = RoundPipe(layers.linear, runtime=two)
    model = AutoRoundPipe(layers)
    x = torch.randn(4, 20)
    for _ in range(2):
        model(x).square().mean().backward()
        truth(x).square().mean().backward()
    model.synchronize()
    assert_near(gradients(model.model).values(), gradients(truth).values())


def test_state_dicts_keep_their_names_and_load_everywhere(two: Runtime) -> None:
    model = wrapped(net(), two)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.0)
    first, second = Net().state_dict(), Net().state_dict()
    assert list(model.model.state_dict()) == list(first)
    for load, state, wanted in (
        (model.model.load_state_dict, first, first),
        (model.load_state_dict, {f"model.{name}": value for name, value in second.items()}, second),
    ):
        load(state)
        model(ids()).sum().backward()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        model.synchronize()
        assert_near(model.model.state_dict(), wanted, 0)


def test_a_state_dict_that_does_not_fit_a_part_is_refused(two: Runtime) -> None:
    model = wrapped(net(), two)
    state = net().state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*blocks.1.*sideways"):
        model.model.load_state_dict({**state, "blocks.1.sideways": torch.ones(1)})
    del state["blocks.1.up.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks.1.*up.weight"):
        model.model.load_state_dict(state)


@pytest.mark.slow
def test_masters_have_the_optimizers_dtype_inside_and_outside_the_parts(two: Runtime) -> None:
    model = wrapped(net().bfloat16(), two, optim_dtype=torch.float32)
    assert {parameter.dtype for parameter in model.optim_parameters()} == {torch.float32}
    optimizer = roundpipe.optim.AdamW(model.optim_parameters(), lr=1e-2)
    before = weights(model.model)
    for _ in range(3):
        model(ids()).float().square().mean().backward()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    model.synchronize()
    assert all(not torch.equal(before[name], value) for name, value in weights(model.model).items())


def test_evaluation_needs_no_gradients_and_reads_current_weights(two: Runtime) -> None:
    layers = net()
    truth = twin(layers)
    model = wrapped(layers, two)
    with torch.no_grad():
        assert_near(model(ids()), truth(ids()))
    model.eval()
    assert not any(module.training for module in layers.modules())


def test_a_graph_from_before_newer_weights_is_refused_outside_the_parts_too(two: Runtime) -> None:
    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.first, self.last = nn.Linear(20, 20), nn.Linear(4, 20), nn.Linear(20, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.inner(self.first(x)).detach()) if x.sum() > 0 else self.first(x))

    model = wrapped(Outside(), two)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    for x in (torch.ones(2, 4), -torch.ones(2, 4, requires_grad=True)):
        kept = model(x)
        model(x).sum().backward()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        if x.requires_grad:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                kept.sum().backward()
        model.zero_grad()


def test_a_graph_through_a_part_from_before_newer_weights_is_refused(two: Runtime) -> None:
    model = wrapped(net(), two)
    kept = model(ids())
    model(ids()).sum().backward()
    model.step(lambda: None, is_async=False)
    with pytest.raises((Stale, RuntimeError)):
        kept.sum().backward()
    model.zero_grad()


@pytest.mark.later
def test_a_failed_step_stops_every_part_until_reset(two: Runtime) -> None:
    model = wrapped(net(), two)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    before = weights(model.model)

    def fails() -> None:
        optimizer.step()
        raise ValueError("boom")

    model(ids()).sum().backward()
    model.step(fails)
    with pytest.raises(ValueError, match="boom") as caught:
        model.synchronize()
    assert len(caught.value.__notes__) == 1
    with pytest.raises(RoundPipeError):
        model(ids())
    model.reset()
    model.synchronize()
    assert_near(weights(model.model), before, 0)
    model(ids()).sum().backward()
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)


def test_a_step_after_a_failed_one_does_not_run(two: Runtime) -> None:
    model = wrapped(net(), two)
    launched = threading.Event()
    ran: list[int] = []

    def fails() -> None:
        assert launched.wait(30)
        raise ValueError("boom")

    model.step(fails)
    model.step(lambda: ran.append(1))
    launched.set()
    with pytest.raises(ValueError, match="boom"):
        model.synchronize()
    assert not ran


def test_a_part_called_by_itself_tells_of_a_failed_step(two: Runtime) -> None:
    model = wrapped(net(), two)

    def fails() -> None:
        raise ValueError("boom")

    model.step(fails)
    two.optimizer.submit(lambda: None).result(30)
    with pytest.raises(ValueError, match="boom"):
        model.model.embed(ids())
    model.reset()
    model.model.embed(ids())


def test_a_call_waits_for_the_weights_outside_the_parts(two: Runtime) -> None:
    layers = net()
    model = wrapped(layers, two)

    def change() -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name == "shift":
                    parameter.add_(1)

    model.step(change)
    go_on = threading.Event()
    two.optimizer.submit(go_on.wait, 30)
    before = layers.shift.detach().clone()
    model.step(lambda: None)
    threading.Timer(0.5, go_on.set).start()
    seen: list[torch.Tensor] = []
    layers.register_forward_pre_hook(lambda *_: seen.append(layers.shift.detach().clone()))
    with torch.no_grad():
        model(ids())
    go_on.set()
    assert_near(seen[0], before + 1, 0)


def test_a_submodule_at_two_places_is_one_part(two: Runtime) -> None:
    layers = net()
    layers.blocks.append(layers.blocks[0])
    truth = twin(layers)
    model = wrapped(layers, two)
    assert layers.blocks[3] is layers.blocks[0]
    assert [name for name in model.parts if "blocks" in name] == ["blocks.0", "blocks.1", "blocks.2"]
    model(ids()).sum().backward()
    truth(ids()).sum().backward()
    model.synchronize()
    assert_near(gradients(model.model).values(), gradients(truth).values())


@pytest.mark.slow
@pytest.mark.parametrize("upper", [9500, 0])
def test_what_shares_a_parameter_is_one_part_and_trains_as_plain_pytorch(runtime: Runtime, upper: int) -> None:
    layers = net(tied=True)
    truth = twin(layers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = wrapped(layers, runtime, upper_threshold=upper)
    assert model.parts["embed"] is model.parts["head"]
    assert model.parts["embed"].name == f"{model.name}.embed and head"
    assert len(list(model.optim_parameters())) == len(list(truth.parameters()))
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.3)
    plain = torch.optim.SGD(truth.parameters(), lr=0.3)
    for seed in range(3):
        loss = model(ids(seed)).square().mean()
        loss.backward()
        wanted = truth(ids(seed)).square().mean()
        wanted.backward()
        assert_near(loss, wanted)
        model.synchronize()
        assert_near(gradients(layers), gradients(truth))
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        plain.step()
        plain.zero_grad()
    model.synchronize()
    assert_near(weights(layers), weights(truth), 1e-4)
    assert layers.head.weight is layers.embed.weight


class Bert(nn.Module):
    """A head that registers its decoder's bias as its own, too, and decodes with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.head = nn.Module()
        self.head.decoder = nn.Linear(16, 40)
        self.head.decoder.weight = self.embed.weight
        self.head.bias = self.head.decoder.bias
        self.gain = nn.Parameter(torch.ones(40))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head.decoder(torch.tanh(self.embed(ids))) * self.gain + self.head.bias.square()


@pytest.mark.parametrize("lag", [0, 1])
def test_a_parameter_of_a_part_is_read_on_the_host_too(runtime: Runtime, lag: int) -> None:
    torch.manual_seed(0)
    layers = Bert()
    truth = twin(layers)
    model = wrapped(layers, runtime)

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)

    optimizer = make(model.optim_parameters())
    losses: list[float] = []
    for seed in range(6):
        loss = model(ids(seed)).square().mean()
        loss.backward()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=lag == 1)
        losses.append(loss.item())
    model.synchronize()
    assert losses == pytest.approx(plain_steps(truth, lag, 6, make), rel=1e-4)
    assert_near(weights(layers), weights(truth), 1e-4)
    kept = model(ids())
    model(ids()).sum().backward()
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    with pytest.raises((Stale, RuntimeError), match=r"newer weights|inplace operation"):
        kept.sum().backward()
    model.zero_grad()


def test_skipped_submodules_stay_as_they_are(two: Runtime) -> None:
    layers = net()
    model = wrapped(layers, two, skip_modules=[layers.blocks[1], layers.inner["row"][2]])
    assert set(parts(model)) == {"embed", "blocks.0", "blocks.2", "inner.row.0", "head"}


def test_settings_for_one_submodule_go_over_those_for_all(two: Runtime) -> None:
    layers = net()
    special = {layers.blocks[1]: RoundPipeRunConfig(num_microbatch=5)}
    common = RoundPipeRunConfig(num_microbatch=2, recompute_grain="layer")
    model = wrapped(layers, two, override_config=special, model_run_config=common)
    found = {name: part.model_run_config for name, part in parts(model).items()}
    assert found["blocks.1"] == RoundPipeRunConfig(num_microbatch=5, recompute_grain="layer")
    assert found["blocks.0"] == common


def test_fused_calls_are_refused_in_words(two: Runtime) -> None:
    with pytest.raises(RoundPipeError, match="no forward_backward"):
        wrapped(net(), two).forward_backward((ids(),))


def test_a_hugging_face_model_that_is_taken_apart_trains(two: Runtime) -> None:
    config = GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    torch.manual_seed(0)
    layers = GPT2LMHeadModel(config)
    truth = twin(layers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = wrapped(layers, two, use_sequential_preset=False, upper_threshold=14000)
    assert "transformer.h.0" in parts(model)
    assert model.config is config
    for train in (layers, truth):
        train.train()
    loss = model(ids(), labels=ids()).loss
    loss.backward()
    wanted = truth(ids(), labels=ids()).loss
    wanted.backward()
    assert_near(loss, wanted)
    model.synchronize()
    assert_near(gradients(model.model).values(), gradients(truth).values(), 1e-4)


# Whole


def test_a_module_too_small_to_take_apart_becomes_one_layer(two: Runtime) -> None:
    model = wrap(net(), runtime=two)
    assert isinstance(model, RoundPipe)
    assert len(model.layer_costs()) == 1
    model.forward_backward((ids(),), loss_fn=lambda outputs, _: outputs.sum())


def test_rows_inside_a_row_give_their_layers_if_they_are_large(two: Runtime) -> None:
    large, small = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)), nn.Sequential(nn.Linear(2, 2))
    row = nn.Sequential(nn.Linear(40, 40), large, small)
    row.answer = 42
    model = wrap(row, upper_threshold=10000, runtime=two)
    assert isinstance(model, RoundPipe)
    assert [type(layer) for layer in model.model] == [nn.Linear, nn.Linear, nn.Linear, nn.Sequential]
    assert model.answer == 42
    assert model.original_model is row


def qwen() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return Qwen3ForCausalLM(config)


@pytest.mark.parametrize("preset", [True, None])
def test_a_preset_makes_a_row(two: Runtime, preset: bool | None) -> None:
    original = qwen()
    model = wrap(original, preset, runtime=two)
    assert isinstance(model, RoundPipe)
    assert [type(layer).__name__ for layer in model.model] == ["Prologue", "Layer", "Layer", "Epilogue"]
    assert model.config is original.config
    assert model.vocab_size == 40


def bart() -> BartForCausalLM:
    # The code around its layers drops by a function, not by a module.
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "d_model": 16, "decoder_layers": 2, "decoder_ffn_dim": 16, "dropout": 0.5}
    config = BartConfig(**sizes, decoder_attention_heads=2, max_position_embeddings=16, is_decoder=True)
    return BartForCausalLM(config)


def test_a_row_follows_the_mode_of_the_users_model(two: Runtime) -> None:
    original = bart()
    model = wrap(original, True, runtime=two)
    model(ids())
    original.eval()
    with torch.no_grad():
        assert_near(model(ids()).logits, twin(original)(ids()).logits, 1e-5)
        assert not model.training
        original.train()
        assert not torch.equal(model(ids()).logits, model(ids()).logits)


def test_the_mode_of_parts_of_the_users_model_stays(two: Runtime) -> None:
    original = bart().eval()
    original.training = True
    model = wrap(original, True, runtime=two)
    with torch.no_grad():
        assert torch.equal(model(ids()).logits, model(ids()).logits)


def test_settings_of_the_users_model_may_change_after_it_is_wrapped(two: Runtime) -> None:
    original = qwen()
    model = wrap(original, True, runtime=two)
    model(ids())
    original.config.output_hidden_states = True
    found, wanted = model(ids()), twin(original)(ids())
    assert_near(list(found.hidden_states), list(wanted.hidden_states), 1e-5)
    original.config.output_hidden_states = False
    original.set_attn_implementation("eager")
    found = model(ids(), output_attentions=True)
    assert_near(list(found.attentions), list(twin(original)(ids(), output_attentions=True).attentions), 1e-5)


def test_without_the_preset_the_same_model_is_taken_apart(two: Runtime) -> None:
    truth = qwen()
    model = wrap(twin(truth), False, lower_threshold=1000, runtime=two)
    assert isinstance(model, AutoRoundPipe)
    assert "model.layers.1.self_attn" in parts(model)
    # A cache is not made, whatever the configuration says; one that is asked for is refused.
    assert_near(model(ids()).logits, truth(ids()).logits, 1e-4)
    with pytest.raises(ValueError, match="use_cache=False"):
        model(ids(), use_cache=True)


# Refused


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"use_sequential_preset": True}, NotImplementedError, "example_inputs"),
        ({"use_sequential_preset": "qwen3"}, ValueError, "True, False or None"),
        ({"model": "net"}, TypeError, "nn.Module"),
        ({"lower_threshold": -1}, ValueError, "lower_threshold"),
        ({"upper_threshold": 1.5}, ValueError, "upper_threshold"),
        ({"override_config": {nn.Linear(1, 1): RoundPipeRunConfig()}}, ValueError, "not wrapped by itself"),
        ({"override_config": {nn.Linear(1, 1): 3}}, TypeError, "RoundPipeRunConfig"),
        ({"model_run_config": {"num_microbatch": 3}}, TypeError, "RoundPipeRunConfig"),
        ({"pin_model": "always"}, ValueError, "pin_model"),
        ({"optim_dtype": torch.int8}, TypeError, "optim_dtype"),
        ({"speed": 3}, TypeError, "speed"),
    ],
)
def test_what_cannot_be_wrapped_is_refused_and_left_as_it_was(
    two: Runtime, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    layers = net()
    before = dict(layers.named_modules())
    with pytest.raises(error, match=words):
        wrap(**{"model": layers, "lower_threshold": 1024, "runtime": two, **arguments})
    assert dict(layers.named_modules()) == before


def test_the_model_itself_cannot_be_skipped(two: Runtime) -> None:
    layers = net()
    with pytest.raises(ValueError, match="skip_modules"):
        wrap(layers, skip_modules=[layers], runtime=two)


def test_what_is_wrapped_already_is_refused(two: Runtime) -> None:
    model = wrapped(net(), two)
    for again in (model, model.model, RoundPipe(mlp(), runtime=two)):
        with pytest.raises(TypeError, match="already"):
            wrap(again, runtime=two)
    with pytest.raises(TypeError, match="already"):
        RoundPipe(model.model, runtime=two)
    with pytest.raises(TypeError, match="already"):
        AutoRoundPipe(nn.ModuleList([model]), runtime=two)


def test_parts_on_different_devices_are_refused(two: Runtime) -> None:
    with Runtime("cpu:1") as other:
        both = nn.ModuleList([RoundPipe(mlp(), runtime=two), RoundPipe(mlp(), runtime=other)])
        with pytest.raises(ValueError, match="share a runtime"):
            AutoRoundPipe(both)


def test_an_unknown_argument_is_refused(two: Runtime) -> None:
    AutoRoundPipe(net(), runtime=two, pin_model="off", model_run_config=RoundPipeRunConfig())
    with pytest.raises(TypeError, match="speed"):
        AutoRoundPipe(net(), runtime=two, speed=3)


def test_the_memory_of_a_model_that_was_taken_apart_is_that_of_all_its_parts(two: Runtime) -> None:
    model = wrapped(net(), two)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    nbytes = sum(parameter.nbytes for parameter in net().parameters())
    report = model.memory_report(optimizer)
    assert nbytes <= report.weights_bytes <= 1.1 * nbytes
    assert report.masters_bytes == nbytes


class _Outside(nn.Module):
    """Its small norm stays on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(4), nn.Linear(4, 400), nn.Linear(400, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.wide(self.norm(x)).tanh())


def test_zero_grad_drops_gradients_of_parameters_outside_of_the_parts(two: Runtime) -> None:
    torch.manual_seed(0)
    truth = _Outside()
    module = twin(truth)
    model = roundpipe.wrap_model_to_roundpipe(module, runtime=two, lower_threshold=1000)
    x = torch.randn(4, 4)

    for each in (truth, model):
        each(x).square().sum().backward()
        each.zero_grad()
        each(2 * x).square().sum().backward()
    model.synchronize()

    assert isinstance(model, AutoRoundPipe)
    assert_near(gradients(module), gradients(truth), 1e-5)
