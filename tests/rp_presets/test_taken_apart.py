"""Every class of docs/models.md, taken apart to its smallest modules, gives the numbers of plain transformers."""

import copy
import warnings
from typing import Any

import pytest
import torch
from comparison import Outcome, differences, takes, without_cache, without_dropout
from families import UNBUILDABLE, causal_families
from models_table import WHOLE_ONLY
from roundpipe import RoundPipeRunConfig, Runtime, TrainingWarning, wrap_model_to_roundpipe
from torch import nn

FAMILIES = causal_families(without=UNBUILDABLE)
# Heads folded into the batch, time first, experts, position biases, a recurrent model.
SAMPLE = ("BloomForCausalLM", "XLNetLMHeadModel", "MixtralForCausalLM", "GPT2LMHeadModel", "MambaForCausalLM")
# Rows and tokens of a batch.
OBLONG, SQUARE = (5, 8), (8, 8)


def batch_of(model: nn.Module, rows: int, tokens: int) -> dict[str, Any]:
    ids = torch.randint(4, 70, (rows, tokens), generator=torch.Generator().manual_seed(rows))
    batch: dict[str, Any] = {"input_ids": ids}
    if takes(model, "attention_mask"):
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, tokens - 3 :] = 0
    return without_cache(model, batch)


def trained(model: nn.Module, call: Any, batch: dict[str, Any]) -> Outcome:
    """The output of a call, and the gradient of each parameter of the model: zeros where there is none."""
    output = call(**batch)[0]
    output.square().mean().backward()
    if call is not model:
        call.synchronize()
    named = dict(model.named_parameters())
    grads = {name: torch.zeros_like(one) if one.grad is None else one.grad.clone() for name, one in named.items()}
    return {"output": output.detach(), **grads}


def assert_trains_as_plainly(name: str, size: tuple[int, int]) -> None:
    model = without_dropout(FAMILIES[name].build()).train()
    truth = copy.deepcopy(model)
    batch = batch_of(model, *size)
    try:
        expected = trained(truth, truth, batch)
    except (ValueError, RuntimeError, IndexError, TypeError) as error:
        pytest.skip(f"transformers itself cannot: {error}")
    config = RoundPipeRunConfig(num_microbatch=3)

    with Runtime("cpu:2") as runtime, warnings.catch_warnings():
        # What takes the memory of a whole batch would be told.
        warnings.simplefilter("error", TrainingWarning)
        wrapped = wrap_model_to_roundpipe(
            model, False, lower_threshold=1, runtime=runtime, model_run_config=config
        )
        found = trained(model, wrapped, batch)

    assert differences(found, expected) == []


@pytest.mark.slow
@pytest.mark.parametrize("size", [OBLONG, SQUARE], ids=["oblong", "square"])
@pytest.mark.parametrize("name", [name for name in SAMPLE if name in FAMILIES])
def test_a_family_trains_in_its_smallest_parts_as_plainly(name, size):
    assert_trains_as_plainly(name, size)


@pytest.mark.nightly
@pytest.mark.parametrize("size", [OBLONG, SQUARE], ids=["oblong", "square"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in WHOLE_ONLY])
def test_every_family_trains_in_its_smallest_parts_as_plainly(name, size):
    assert_trains_as_plainly(name, size)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in WHOLE_ONLY])
def test_what_16_bits_round_is_no_reason_to_run_in_one_piece(name):
    model = without_dropout(FAMILIES[name].build()).bfloat16().train()
    batch = batch_of(model, *OBLONG)
    try:
        with torch.no_grad():
            model(**batch)
    except RuntimeError as error:
        pytest.skip(f"transformers itself cannot: {error}")
    config = RoundPipeRunConfig(num_microbatch=3)

    with Runtime("cpu:2") as runtime, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", TrainingWarning)
        wrap_model_to_roundpipe(model, False, lower_threshold=1, runtime=runtime, model_run_config=config)(**batch)
