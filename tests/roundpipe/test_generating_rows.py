"""While text is generated, what need not be computed is not: prompts that repeat, samples that have ended."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from roundpipe import RoundPipeRunConfig, Runtime, wrap_model_to_roundpipe
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

PROMPTS = torch.tensor([[3, 4, 5, 6], [0, 0, 7, 8], [9, 3, 5, 4], [0, 4, 4, 9], [3, 3, 3, 3], [8, 9, 2, 1]])
NUM_TOKENS = 14
# A text ends by one token of three, so that most are over soon.
ENDS = list(range(10, 20))


class Counted(nn.Module):
    """A layer's part that notes how many rows it computes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ROWS.append(len(x))
        return self.inner(x)


ROWS: list[int] = []


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    # The only call of a forward that counts: the row's layers are deep copies.
    model.model.layers[1].mlp = Counted(model.model.layers[1].mlp)
    return model


@pytest.fixture(params=["cpu:1", "cpu:2"])
def wrapped(llama: LlamaForCausalLM, request: pytest.FixtureRequest) -> Iterator[Any]:
    with Runtime(request.param) as runtime:
        yield wrap_model_to_roundpipe(copy.deepcopy(llama), runtime=runtime)


def generated(model: Any, prompts: torch.Tensor = PROMPTS, **options: Any) -> tuple[Any, list[int]]:
    """The tokens, and how many rows were computed, call by call."""
    ROWS.clear()
    torch.manual_seed(2)
    options = {"eos_token_id": ENDS, "max_new_tokens": NUM_TOKENS, **options}
    return model.generate(prompts, attention_mask=(prompts != 0).long(), **options), list(ROWS)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "guided": {"do_sample": True, "guidance_scale": 1.4},
    "sampled": {"do_sample": True, "temperature": 1.3, "top_k": 20},
    "static cache": {"do_sample": True, "cache_implementation": "static"},
    "repeats are unlikely": {"do_sample": True, "repetition_penalty": 1.2, "min_new_tokens": 2, "top_p": 0.9},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_samples_that_have_ended_leave(way: str, microbatches: int, llama: LlamaForCausalLM, wrapped: Any) -> None:
    expected, all_rows = generated(llama, **WAYS[way])

    config = RoundPipeRunConfig(num_microbatch=microbatches)
    found, rows = generated(wrapped, **WAYS[way], roundpipe_run_config=config)

    assert torch.equal(found, expected)
    # As many calls as the last sample needs, and in the last ones a few rows only.
    assert sum(rows) < 0.8 * sum(all_rows)


def test_each_text_is_computed_to_its_end_and_no_further(llama: LlamaForCausalLM, wrapped: Any) -> None:
    found, rows = generated(wrapped, do_sample=True)
    new = found[:, PROMPTS.shape[1] :]
    ends = (new[:, :, None] == torch.tensor(ENDS)).any(2)
    lengths = torch.where(ends.any(1), ends.int().argmax(1) + 1, new.shape[1])

    assert torch.equal(found, generated(llama, do_sample=True)[0])
    assert rows == [int((lengths > step).sum()) for step in range(new.shape[1])]


@pytest.mark.few(1)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "cache_implementation": "static"},
    ],
    ids=str,
)
def test_a_prompt_is_read_once_for_all_its_texts(
    options: dict[str, Any], microbatches: int, llama: LlamaForCausalLM, wrapped: Any
) -> None:
    expected, all_rows = generated(llama, **options)

    config = RoundPipeRunConfig(num_microbatch=microbatches)
    found, rows = generated(wrapped, **options, roundpipe_run_config=config)

    assert torch.equal(found, expected)
    assert sum(rows[:microbatches]) == len(PROMPTS) < all_rows[0]


def test_prompts_that_repeat_are_read_once(llama: LlamaForCausalLM, wrapped: Any) -> None:
    prompts = PROMPTS[[0, 0, 0, 1, 2, 2]]
    expected, _ = generated(llama, prompts, do_sample=True)

    found, rows = generated(wrapped, prompts, do_sample=True)

    assert torch.equal(found, expected)
    assert rows[0] == 3


def test_prompts_with_other_padding_are_read_each(llama: LlamaForCausalLM, wrapped: Any) -> None:
    prompts = PROMPTS[[0, 0]]
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    options = {"max_new_tokens": 5, "attention_mask": mask}
    expected = llama.generate(prompts, **options)
    ROWS.clear()

    assert torch.equal(wrapped.generate(prompts, **options), expected)
    assert ROWS[0] == 2


def test_all_is_computed_where_the_cache_is_the_callers(llama: LlamaForCausalLM, wrapped: Any) -> None:
    cache = DynamicCache(config=llama.config)
    returned, rows = generated(wrapped, do_sample=True, return_dict_in_generate=True)

    tokens, _ = generated(wrapped, do_sample=True, past_key_values=cache)

    assert torch.equal(returned.sequences, tokens)
    assert set(rows) == {len(PROMPTS)}
    for each in (returned.past_key_values, cache):
        assert each.layers[0].keys.shape[:3] == (len(PROMPTS), 2, tokens.shape[1] - 1)


def test_dropout_acts_on_each_row(llama: LlamaForCausalLM) -> None:
    with Runtime("cpu:1") as runtime:
        model = copy.deepcopy(llama)
        model.config.attention_dropout = 0.1
        wrapped: Any = wrap_model_to_roundpipe(model.train(), runtime=runtime)

        _, rows = generated(wrapped, do_sample=True, num_return_sequences=3)

    assert set(rows) == {3 * len(PROMPTS)}
