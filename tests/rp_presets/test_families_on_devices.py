"""Tiny models of every family, trained by the engine on CPU devices, against plain transformers."""

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from comparison import Outcome, differences, padding, takes, tokens, without_cache, without_dropout
from families import UNBUILDABLE, causal_families
from models_table import IS_NO_ROW, WHOLE_ONLY
from roundpipe import ImpureLayer, RoundPipeRunConfig, Runtime, wrap_model_to_roundpipe
from torch import nn

FAMILIES = causal_families(without=UNBUILDABLE)
# A mixture of experts, keys that layers share, linear attention, tied weights, layers that return tuples.
SAMPLE = ("GPT2LMHeadModel", "Gemma4ForCausalLM", "MixtralForCausalLM", "Qwen3_5ForCausalLM")


def batch_for(model: nn.Module) -> dict[str, Any]:
    """Five rows, padded where the model takes a mask, so that microbatches have other numbers of labels."""
    ids = torch.cat([tokens(), tokens().flip(1), tokens()[:1].roll(3, 1)])
    mask = torch.cat([padding("right"), torch.ones_like(padding("left")), padding("right")[1:]])
    batch = {"input_ids": ids}
    if takes(model, "attention_mask"):
        batch["attention_mask"] = mask
    if takes(model, "labels"):
        batch["labels"] = ids.masked_fill(mask == 0, -100)
    return without_cache(model, batch)


def gradients(model: nn.Module, loss: torch.Tensor) -> Outcome:
    """The loss, and the gradient of each parameter: zeros where there is none."""
    named = dict(model.named_parameters())
    grads = {name: torch.zeros_like(one) if one.grad is None else one.grad.clone() for name, one in named.items()}
    return {"loss": loss.detach(), **grads}


def plain_outcome(model: nn.Module, batch: dict[str, Any]) -> Outcome:
    output = model(**batch)
    loss = output.loss if "labels" in batch else output[0].square().mean()
    loss.backward()
    return gradients(model, loss)


def engine_outcome(
    model: nn.Module, batch: dict[str, Any], devices: str, *, is_row: bool, **options: Any
) -> Outcome:
    with Runtime(devices) as runtime, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = RoundPipeRunConfig(num_microbatch=3 if "labels" in batch else 1)
        wrapped = wrap_model_to_roundpipe(model, is_row, runtime=runtime, model_run_config=config, **options)
        if is_row and "labels" in batch:
            loss = wrapped.forward_backward(input_kwargs=batch)
        else:
            output = wrapped(**batch)
            loss = output.loss if "labels" in batch else output[0].square().mean()
            loss.backward()
        wrapped.synchronize()
    return gradients(model, loss)


def assert_trains_as_plainly(name: str, devices: str, *, is_row: bool, **options: Any) -> None:
    model = without_dropout(FAMILIES[name].build()).train()
    truth = copy.deepcopy(model)
    batch = batch_for(model)
    try:
        expected = plain_outcome(truth, batch)
    except (ValueError, RuntimeError, IndexError) as error:
        pytest.skip(f"transformers itself cannot: {error}")
    assert differences(engine_outcome(model, batch, devices, is_row=is_row, **options), expected) == []


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:3"])
@pytest.mark.parametrize("name", [name for name in SAMPLE if name in FAMILIES])
def test_a_family_trains_on_devices_as_plainly(name, devices):
    assert_trains_as_plainly(name, devices, is_row=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "compile_layers"),
    [
        # Torch traces and differentiates it; code in C++, which takes most of the time, is for the night.
        ("LlamaForCausalLM", {"backend": "aot_eager"}),
        *(
            pytest.param(name, True, marks=pytest.mark.nightly)
            for name in (
                "LlamaForCausalLM",
                "Qwen3ForCausalLM",
                "MixtralForCausalLM",
                "GPT2LMHeadModel",
                "Gemma2ForCausalLM",
                "BloomForCausalLM",
            )
        ),
    ],
)
def test_compiled_layers_of_a_row_have_the_same_numbers(name, compile_layers):
    torch._dynamo.reset()
    assert_trains_as_plainly(name, "cpu:2", is_row=True, compile_layers=compile_layers)


@pytest.mark.nightly
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:3"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in IS_NO_ROW])
def test_every_row_trains_on_devices_as_plainly(name, devices):
    assert_trains_as_plainly(name, devices, is_row=True)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in WHOLE_ONLY])
def test_every_family_trains_taken_apart_as_plainly(name):
    assert_trains_as_plainly(name, "cpu:3", is_row=False)


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["bf16", "compiled"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in IS_NO_ROW])
def test_no_row_is_taken_for_impure(name, how):
    torch._dynamo.reset()
    model = without_dropout(FAMILIES[name].build()).train()
    model = model.bfloat16() if how == "bf16" else model
    options = {"compile_layers": {"backend": "aot_eager"}} if how == "compiled" else {}

    try:
        engine_outcome(model, batch_for(model), "cpu:2", is_row=True, **options)
    except ImpureLayer:
        raise
    except (ValueError, RuntimeError, IndexError, TypeError) as error:
        pytest.skip(f"it cannot be trained so: {error}")


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in FAMILIES if name in WHOLE_ONLY])
def test_a_family_whose_parts_cannot_be_split_says_so(name):
    with pytest.raises((RuntimeError, ValueError)) as raised:
        assert_trains_as_plainly(name, "cpu:3", is_row=False)
    told = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert re.search(WHOLE_ONLY[name], told), told
