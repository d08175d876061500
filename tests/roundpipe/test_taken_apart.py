"""Hugging Face models that are taken apart give the outputs, losses and gradients of plain transformers."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from roundpipe import AutoRoundPipe, RoundPipeError, RoundPipeRunConfig, Runtime
from roundpipe import wrap_model_to_roundpipe as wrap
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}


def gpt2() -> nn.Module:
    dropped = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=2, n_head=2, **dropped))


def t5() -> nn.Module:
    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


def gemma2() -> nn.Module:
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, **HEADS, sliding_window=3, tie_word_embeddings=True))


def bert() -> nn.Module:
    dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**SIZES, num_attention_heads=2, max_position_embeddings=8, **dropped))


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS, num_local_experts=4, num_experts_per_tok=2))


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "t5": t5,
    "gemma2": gemma2,
    "bert": bert,
    "mixtral": mixtral,
}


def made(family: str, attention: str = "eager") -> nn.Module:
    torch.manual_seed(0)
    model = FAMILIES[family]()
    model.set_attn_implementation(attention)
    return model


def batch(size: int = 7, *, mask: bool = True, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 40, (size, 5), generator=generator)
    found = {"input_ids": ids, "labels": ids.clone()}
    if mask:
        found["attention_mask"] = torch.ones_like(ids)
        found["attention_mask"][1, 3:] = 0
        found["labels"][1, 3:] = -100
    return found


def apart(model: nn.Module, runtime: Runtime, upper: int | None = None, **kwargs: Any) -> AutoRoundPipe:
    """Taken apart; `upper` None: a share for each device and one more."""
    config = RoundPipeRunConfig(num_microbatch=3)
    found = wrap(
        model,
        False,
        lower_threshold=1000,
        upper_threshold=upper,
        model_run_config=config,
        runtime=runtime,
        **kwargs,
    )
    assert isinstance(found, AutoRoundPipe)
    return found


@dataclass
class Pair:
    """A model that was taken apart, its users' module, and the same in plain transformers."""

    model: AutoRoundPipe
    layers: nn.Module
    truth: nn.Module

    def compare(self, loss: Callable[[Any], torch.Tensor] = lambda found: found.loss, **inputs: Any) -> None:
        """Outputs, loss and all gradients are equal."""
        found, wanted = self.model(**inputs), self.truth(**inputs, use_cache=False)
        assert found.keys() == wanted.keys()
        for name in wanted:
            _same(found[name], wanted[name], name)
        loss(found).backward()
        loss(wanted).backward()
        self.model.synchronize()
        for (name, parameter), (_, other) in zip(
            self.layers.named_parameters(), self.truth.named_parameters(), strict=True
        ):
            assert (parameter.grad is None) == (other.grad is None), name
            if other.grad is not None:
                assert torch.allclose(parameter.grad, other.grad, rtol=1e-4, atol=1e-5), name


def _same(found: Any, wanted: Any, name: str) -> None:
    if isinstance(wanted, tuple):
        assert len(found) == len(wanted), name
        for one, other in zip(found, wanted, strict=True):
            _same(one, other, name)
    elif wanted is not None:
        assert found.shape == wanted.shape, name
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5), name


def pair(family: str, runtime: Runtime, upper: int | None = None, **kwargs: Any) -> Pair:
    layers = made(family)
    truth = copy.deepcopy(layers)
    return Pair(apart(layers, runtime, upper, **kwargs), layers, truth)


@pytest.fixture(params=["cpu:1", "cpu:3"])
def devices(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """A runtime on one or three devices."""
    with Runtime(request.param) as opened:
        yield opened


UPPER = [None, 6000, 0, 10**6]


@pytest.mark.pairwise
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("upper", UPPER)
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("size", [1, 3, 5, 7])
def test_losses_and_gradients_are_those_of_plain_transformers(
    devices: Runtime, family: str, upper: int | None, mask: bool, size: int
) -> None:
    both = pair(family, devices, upper)
    for seed in range(2):
        both.compare(**batch(max(size, 2) if mask else size, mask=mask, seed=seed))


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("upper", UPPER)
@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
def test_collected_outputs_have_whole_batches_and_gradients(
    devices: Runtime, family: str, upper: int | None, asked: str
) -> None:
    both = pair(family, devices, upper)

    def collected(found: Any) -> list[torch.Tensor]:
        kinds = ("hidden_states", "attentions", "encoder_hidden_states", "decoder_attentions", "cross_attentions")
        return [value for kind in kinds for value in found.get(kind) or ()]

    if not collected(both.truth(**batch(), **{asked: True})):
        pytest.skip("this transformers does not collect them")
    both.compare(
        lambda found: found.loss + sum(value.square().mean() for value in collected(found)),
        **batch(),
        **{asked: True},
    )
    both.compare(**batch(seed=1))


@pytest.mark.few(1)
@pytest.mark.parametrize("upper", UPPER)
def test_router_logits_are_collected_and_their_loss_trains_the_router(devices: Runtime, upper: int | None) -> None:
    pair("mixtral", devices, upper).compare(
        lambda found: found.loss + found.aux_loss, **batch(), output_router_logits=True
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_large_tied_embeddings_run_on_devices(two: Runtime, family: str) -> None:
    both = pair(family, two, 6000)
    tied = [name for name, part in both.model.parts.items() if " and " in part.name]
    assert len(tied) == {"t5": 4, "mixtral": 0}.get(family, 2)


@pytest.mark.slow
@pytest.mark.parametrize("upper", UPPER)
def test_outputs_are_collected_once_whichever_twins_are_made(devices: Runtime, upper: int | None) -> None:
    both = pair("mixtral", devices, upper)
    for frozen in (False, True):
        # Twins are made anew after this.
        both.layers.lm_head.weight.requires_grad_(not frozen)
        both.truth.lm_head.weight.requires_grad_(not frozen)
        both.compare(**batch(), output_router_logits=True)
        both.model.zero_grad()
        both.truth.zero_grad()


# Hooks of users


class Penalty:
    """A hook that appends a penalty on what a module returns."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def __call__(self, *call: Any) -> None:
        output = call[-1][0] if isinstance(call[-1], tuple) else call[-1]
        self.found.append(output.square().mean())


PLACES = ["model.layers.1", "model.layers.0.self_attn", "model.layers.1.mlp.gate_proj", "model.norm", "lm_head"]


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("upper", UPPER)
def test_users_hooks_see_whole_batches_and_their_penalties_train(
    two: Runtime, place: str, upper: int | None
) -> None:
    layers = made("gemma2")
    truth = copy.deepcopy(layers)
    penalties = [Penalty(), Penalty()]
    for found, penalty in zip((layers, truth), penalties, strict=True):
        found.get_submodule(place).register_forward_hook(penalty)
    both = Pair(apart(layers, two, upper), layers, truth)
    remaining = iter(penalties)
    both.compare(lambda found: found.loss + next(remaining).found.pop(), **batch())
    assert [penalty.found for penalty in penalties] == [[], []]


@pytest.mark.later
def test_a_hook_that_changes_an_output_does_so_once(two: Runtime) -> None:
    layers = made("gemma2")
    for place in ("model.layers.0", "model.layers.1.mlp"):
        layers.get_submodule(place).register_forward_hook(lambda *call: call[2] * 2)
        layers.get_submodule(place).register_forward_pre_hook(lambda *call: (call[1][0] + 1, *call[1][1:]))
    truth = copy.deepcopy(layers)
    Pair(apart(layers, two, 6000), layers, truth).compare(**batch())


@pytest.mark.later
def test_a_hook_on_what_a_part_runs_may_come_later(two: Runtime) -> None:
    both = pair("gemma2", two, 6000)
    penalties = [Penalty(), Penalty()]
    assert "model.layers.1.self_attn" in both.model.parts
    for found, penalty in zip((both.layers, both.truth), penalties, strict=True):
        found.get_submodule("model.layers.1.self_attn").register_forward_hook(penalty)
    remaining = iter(penalties)
    both.compare(lambda found: found.loss + next(remaining).found.pop(), **batch())


@pytest.mark.later
def test_a_later_hook_inside_a_part_is_refused_by_name_before_anything_runs(two: Runtime) -> None:
    both = pair("gemma2", two, 6000)
    ran: list[nn.Module] = []
    both.layers.register_forward_pre_hook(lambda module, _: ran.append(module))
    hook = both.layers.model.layers[1].self_attn.o_proj.register_forward_hook(Penalty())
    with pytest.raises(RoundPipeError, match=r"model\.layers\.1\.self_attn\.o_proj has a hook"):
        both.model(**batch())
    assert not ran
    with pytest.raises(RoundPipeError, match=r"inside model\.layers\.1\.self_attn, which"):
        both.layers.model.layers[1].self_attn(torch.ones(1, 5, 16))
    hook.remove()
    both.compare(**batch())


def test_gradient_checkpointing_is_refused(two: Runtime) -> None:
    both = pair("gemma2", two, 10000)
    assert "model.layers.0" in both.model.parts
    both.layers.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient_checkpointing_disable"):
        both.model(**batch())
    both.layers.gradient_checkpointing_disable()
    both.compare(**batch())


@pytest.mark.slow
def test_compiled_parts_collect_what_is_asked(two: Runtime) -> None:
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(inputs)
        return graph.forward

    torch.compiler.reset()
    both = pair("gemma2", two, 6000, compile_layers={"backend": backend, "dynamic": True})
    both.compare(**batch(6))
    assert compiled
    both.compare(**batch(6, seed=1), output_attentions=True, output_hidden_states=True)


# What parts may not do, and what they hand back beside a batch


class Writer(nn.Module):
    """Leaves a result in a container that it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, notes: Any) -> torch.Tensor:
        x = self.linear(x)
        notes[-1 if isinstance(notes, list) else "last"] = x
        return x


class Noted(nn.Module):
    """Hands one container to all of its layers."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Writer(), Writer()])
        self.make = make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        notes = {"inner": self.make()}
        for layer in self.layers:
            x = layer(x, notes["inner"])
        return x


@pytest.mark.parametrize("make", [dict, UserDict, lambda: [None]], ids=["dict", "object", "list"])
def test_a_part_that_writes_into_what_it_is_handed_is_refused(make: Callable[[], Any]) -> None:
    config = RoundPipeRunConfig(num_microbatch=2)
    with Runtime("cpu:2") as runtime:
        # Each of the two layers is a part: both together are too large.
        model = wrap(
            Noted(make), False, runtime=runtime, model_run_config=config, lower_threshold=0, upper_threshold=100
        )
        with pytest.raises(RoundPipeError, match=r"layers\.0.* writes into a .* that it is handed"):
            model(torch.ones(4, 4))


class WithBias(nn.Module):
    """Returns its bias for the caller to add."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ self.linear.weight.T, self.linear.bias


class Biased(nn.Module):
    """Adds what its layer returns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = WithBias(width)
        self.head = nn.Linear(width, 60)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, bias = self.layer(x)
        return self.head(x + bias)


@pytest.mark.parametrize(("rows", "width"), [(5, 6), (4, 7)], ids=["unequal microbatches", "no multiple"])
def test_a_bias_that_a_part_returns_is_no_batch(rows: int, width: int) -> None:
    model = Biased(width)
    truth = copy.deepcopy(model)
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))
    config = RoundPipeRunConfig(num_microbatch=2)
    with Runtime("cpu:2") as runtime:
        # The layer is a part, since it is not too large.
        wrapped = wrap(
            model, False, runtime=runtime, model_run_config=config, lower_threshold=0, upper_threshold=200
        )
        wrapped(x).square().sum().backward()
        wrapped.synchronize()
    truth(x).square().sum().backward()
    for one, other in zip(model.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_batch_without_samples_is_plain_pytorchs(two: Runtime) -> None:
    model = Biased(6)
    truth = copy.deepcopy(model)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    wrapped = wrap(model, False, runtime=two, lower_threshold=0, upper_threshold=200)

    for rows in (0, 4, 0):
        wrapped(x[:rows]).square().sum().backward()
        truth(x[:rows]).square().sum().backward()
    wrapped.synchronize()

    for one, other in zip(model.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
