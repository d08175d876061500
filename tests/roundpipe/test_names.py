"""Modules, parameters and state dicts of a wrapped model have the names of the user's own model."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from plain import assert_near, weights
from roundpipe import AutoRoundPipe, RoundPipe, RoundPipeError, Runtime
from roundpipe import wrap_model_to_roundpipe as wrap
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM


def qwen(*, tied: bool = False, seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=tied,
    )
    return Qwen3ForCausalLM(config)


def gpt2(*, tied: bool = False, seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    dropped = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    config = GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=2, n_head=2, **dropped)
    config.tie_word_embeddings = tied
    return GPT2LMHeadModel(config)


def ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 40, (6, 5), generator=torch.Generator().manual_seed(seed))


KINDS = {
    "row": (qwen, {}),
    "taken apart": (qwen, {"use_sequential_preset": False, "lower_threshold": 1000}),
    "another family": (gpt2, {"use_sequential_preset": False, "lower_threshold": 1000}),
}


@pytest.fixture(params=[(kind, tied) for kind in KINDS for tied in (False, True)], ids=str)
def case(request: pytest.FixtureRequest, two: Runtime) -> tuple[Any, Any]:
    """A wrapped model, and a function that makes models of its class."""
    kind, tied = request.param
    make, how = KINDS[kind]
    model = wrap(make(tied=tied), runtime=two, **how)
    assert isinstance(model, RoundPipe if kind == "row" else AutoRoundPipe)
    return model, lambda seed: make(tied=tied, seed=seed)


def names(found: Any) -> list[str]:
    return [name for name, _ in found]


@pytest.mark.few(1)
def test_names_are_those_of_the_users_model(case: tuple[Any, Any]) -> None:
    model, make = case
    truth = make(1)
    assert names(model.named_modules()) == names(truth.named_modules())
    assert names(model.named_buffers()) == names(truth.named_buffers())
    assert names(model.optim_named_parameters()) == names(truth.named_parameters())
    assert list(model.state_dict()) == list(truth.state_dict())
    with pytest.warns(UserWarning, match="lag behind"):
        assert names(model.named_parameters()) == names(truth.named_parameters())
    seen: list[str] = []
    model.step(lambda: seen.extend(names(model.named_parameters(remove_duplicate=False))), is_async=False)
    assert seen == names(truth.named_parameters(remove_duplicate=False))


@pytest.mark.few(1)
def test_modules_are_found_by_their_names(case: tuple[Any, Any]) -> None:
    model, make = case
    for name, module in make(1).named_modules():
        assert type(model.get_submodule(name)) is (type(module) if name else type(model))
    for name, parameter in make(1).named_parameters():
        assert model.get_parameter(name).shape == parameter.shape


@pytest.mark.slow
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_of_the_users_model_loads(case: tuple[Any, Any], assign: bool) -> None:
    model, make = case
    truth = make(1)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    state = {name: value.clone() for name, value in truth.state_dict().items()}
    model.load_state_dict(state, assign=assign)
    assert_near(model.state_dict(), truth.state_dict(), 0)
    plain = torch.optim.SGD(truth.parameters(), lr=0.1)
    for seed in range(2):
        model(ids(seed)).logits.square().mean().backward()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        truth(ids(seed)).logits.square().mean().backward()
        plain.step()
        plain.zero_grad()
    assert_near(model.state_dict(), truth.state_dict(), 1e-5)
    users = model.original_model or model.model
    assert_near(weights(users), weights(truth), 1e-5)


@pytest.mark.few(1)
def test_a_state_dict_that_does_not_fit_is_refused_by_the_models_own_names(case: tuple[Any, Any]) -> None:
    model, make = case
    state = make(1).state_dict()
    gone = next(iter(state))
    del state[gone]
    with pytest.raises(RuntimeError, match=rf'Missing key.*"{gone}"'):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"sideways"'):
        model.load_state_dict({**make(1).state_dict(), "sideways": torch.ones(1)})


def test_a_wrapped_model_inside_another_module_is_transparent(two: Runtime) -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.scale = inner, nn.Parameter(torch.ones(1))

    model, truth = Outer(wrap(qwen(), runtime=two)), Outer(qwen(seed=1))
    assert isinstance(model.inner, RoundPipe)
    assert names(model.named_parameters()) == names(truth.named_parameters())
    assert list(model.state_dict()) == list(truth.state_dict())
    model.load_state_dict(truth.state_dict())
    assert_near(model.state_dict(), truth.state_dict(), 0)
    with pytest.raises(RuntimeError, match="sideways"):
        model.load_state_dict({**truth.state_dict(), "inner.sideways": torch.ones(1)})


def test_a_copy_of_a_model_that_was_taken_apart_is_plain(two: Runtime) -> None:
    layers = gpt2()
    model = wrap(layers, False, lower_threshold=1000, runtime=two)
    wanted = model(ids()).logits
    made = copy.deepcopy(layers)
    found = made(ids(), use_cache=False).logits
    assert_near(found, wanted, 1e-5)
    found.sum().backward()
    assert made.lm_head.weight.grad is not None
    assert_near(pickle.loads(pickle.dumps(layers.lm_head))(torch.ones(2, 16)), layers.lm_head(torch.ones(2, 16)))
    wrap(copy.deepcopy(layers), False, lower_threshold=1000, runtime=two)


def test_what_is_added_where_the_row_does_not_run_it_is_refused(two: Runtime) -> None:
    original = qwen()
    model = wrap(original, runtime=two)
    original.adapter = nn.Linear(2, 2)
    for call in (lambda: model(ids()), lambda: list(model.optim_parameters())):
        with pytest.raises(RoundPipeError, match=r"adapter\.weight was added"):
            call()
    with pytest.raises(RoundPipeError, match=r"adapter\.weight was added"):
        model.forward_backward((ids(),), loss_fn=lambda outputs, _: outputs.logits.sum())
