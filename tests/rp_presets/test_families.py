"""Rows of tiny models of every family of transformers, against the models themselves."""

import pytest
import torch
from comparison import (
    as_layers,
    cases_that_run,
    causal_cases,
    compare,
    differences,
    outcome,
    plainly,
    without_dropout,
)
from families import TRAINING_ONLY, UNBUILDABLE, causal_families
from kinds import KINDS, OBSERVED_WITH
from models_table import IS_NO_ROW
from rp_presets import UnsupportedModel, to_sequential
from sometimes import one_in

# Unlike each other: keys shared between layers, routers with an auxiliary loss, linear attention beside full,
# state spaces, latent attention, parallel blocks, positions in attention, layers that return tuples.
SAMPLE = (
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "Gemma4ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3_5ForCausalLM",
    "DeepseekV3ForCausalLM",
    "MambaForCausalLM",
    "BloomForCausalLM",
)
SAMPLE_OF_KINDS = ("T5", "Bert, sequences", "Whisper", "ViT", "LLaVA")
# Older versions of transformers have fewer.
FAMILIES = causal_families()


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def assert_row_equals(name: str, **settings) -> None:
    model = without_dropout(FAMILIES[name].build(**settings))
    modes = (True,) if name in TRAINING_ONLY else (False, True)
    model.train(modes[0])
    assert compare(model, cases_that_run(model, causal_cases(model)), modes) == []


def assert_kind_equals(name: str) -> None:
    model, cases = KINDS[name]()
    without_dropout(model)
    example = {key: next(iter(cases.values()))[key] for key in OBSERVED_WITH.get(name, ())}
    assert compare(model, cases, example_inputs=example or None) == []


@pytest.mark.parametrize("name", one_in(4, [name for name in SAMPLE if name in FAMILIES]))
def test_a_row_of_a_causal_family_equals_its_model(name):
    assert_row_equals(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE_OF_KINDS)
def test_a_row_of_another_kind_equals_its_model(name):
    assert_kind_equals(name)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_embeddings_may_be_tied_or_not(name, tied):
    model = without_dropout(FAMILIES[name].build(tie_word_embeddings=tied))
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    cases = dict(list(causal_cases(model))[:3])
    assert compare(model, cases) == []


def test_shared_keys_are_reached():
    model = FAMILIES["Gemma4ForCausalLM"].build()
    shares = [layer.self_attn.is_kv_shared_layer for layer in model.model.layers]
    assert shares == [False] * 3 + [True] * 3


def test_a_comparison_notices_what_is_wrong():
    model = without_dropout(FAMILIES["LlamaForCausalLM"].build())
    row = to_sequential(model)
    inputs = dict(causal_cases(model))["labels"]
    expected = outcome(model, plainly(model, inputs))
    row[1], row[2] = row[2], row[1]
    row[1].index, row[2].index = 0, 1
    found = differences(outcome(model, as_layers(row, inputs)), expected)
    assert any(text.startswith("logits") for text in found)
    assert any(text.startswith("gradient of") for text in found)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in {*SAMPLE, *UNBUILDABLE, *IS_NO_ROW}])
def test_a_row_of_every_other_causal_family_equals_its_model(name):
    assert_row_equals(name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in KINDS if name not in SAMPLE_OF_KINDS])
def test_a_row_of_every_other_kind_equals_its_model(name):
    assert_kind_equals(name)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "reason"), [(name, IS_NO_ROW[name]) for name in IS_NO_ROW if name in FAMILIES])
def test_a_family_that_is_no_row_is_refused_with_its_reason(name, reason):
    with pytest.raises(UnsupportedModel, match=reason):
        to_sequential(FAMILIES[name].build())


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in UNBUILDABLE if name in FAMILIES])
def test_what_is_listed_as_unbuildable_cannot_be_built(name):
    with pytest.raises((ImportError, ValueError)):
        FAMILIES[name].build()
