"""`generate` on the devices: the tokens that the model itself generates on the host."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, wrap_model_to_roundpipe
from roundpipe.optim import AdamW
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from torch import nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)

PROMPTS = torch.tensor([[3, 4, 5, 6], [0, 0, 7, 8], [9, 3, 5, 4]])
MASK = (PROMPTS != 0).long()
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.3, "top_k": 20},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "static cache": {"cache_implementation": "static"},
    "prefilled in chunks": {"prefill_chunk_size": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "without a cache": {"use_cache": False},
    "guided away": {"guidance_scale": 2.0, "negative_prompt_ids": torch.tensor([[7, 7], [5, 3], [9, 9]])},
}


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def wrapped(llama: LlamaForCausalLM, runtime: Runtime) -> RoundPipe:
    config = RoundPipeRunConfig(num_microbatch=2)
    model = wrap_model_to_roundpipe(copy.deepcopy(llama), runtime=runtime, model_run_config=config)
    assert isinstance(model, RoundPipe)
    return model


def generated(model: Any, prompts: torch.Tensor = PROMPTS, *given: Any, **options: Any) -> Any:
    torch.manual_seed(1)
    if not isinstance(model, RoundPipe):
        # What is given is where the weights are.
        prompts = prompts.to(model.device)
        options |= {name: value.to(model.device) for name, value in options.items() if torch.is_tensor(value)}
    mask = (prompts != 0).long()
    return model.generate(prompts, *given, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, **options)


def on_the_device(llama: LlamaForCausalLM, wrapped: RoundPipe) -> LlamaForCausalLM:
    """The model where the wrapped one runs: GPUs round otherwise, and draw otherwise."""
    return copy.deepcopy(llama).to(wrapped.runtime.lanes[0].device.torch_device)


def tokens_of_itself(
    llama: LlamaForCausalLM, wrapped: RoundPipe, prompts: torch.Tensor = PROMPTS, **options: Any
) -> torch.Tensor:
    """What the model itself generates there, on the host."""
    return generated(on_the_device(llama, wrapped), prompts, **options).cpu()


def in_microbatches(count: int) -> RoundPipeRunConfig:
    return RoundPipeRunConfig(num_microbatch=count)


@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_the_model_itself(
    way: str, microbatches: int, llama: LlamaForCausalLM, wrapped: RoundPipe
) -> None:
    prompts = PROMPTS[:1] if way == "prompt lookup" else PROMPTS
    expected = tokens_of_itself(llama, wrapped, prompts, **WAYS[way])

    found = generated(wrapped, prompts, **WAYS[way], roundpipe_run_config=in_microbatches(microbatches))

    assert torch.equal(found, expected)


def test_scores_are_those_of_the_model_itself(llama: LlamaForCausalLM, wrapped: RoundPipe) -> None:
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected: Any = generated(on_the_device(llama, wrapped), **asked)

    found: Any = generated(wrapped, **asked)

    assert torch.equal(found.sequences, expected.sequences.cpu())
    for one, other in zip(found.scores + found.logits, expected.scores + expected.logits, strict=True):
        torch.testing.assert_close(one, other.cpu(), rtol=1e-5, atol=1e-6)


def test_text_ends_at_strings_that_the_tokenizer_knows(llama: LlamaForCausalLM, wrapped: RoundPipe) -> None:
    inner = Tokenizer(BPE(vocab={chr(ord("A") + token): token for token in range(40)}, merges=[]))
    inner.decoder = ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="A")
    prompt = PROMPTS[:1]
    there = on_the_device(llama, wrapped)
    third = int(there.generate(prompt.to(there.device), max_new_tokens=3, min_new_tokens=3)[0, -1])
    asked = {"max_new_tokens": 8, "stop_strings": [chr(ord("A") + third)], "tokenizer": tokenizer}
    expected = there.generate(prompt.to(there.device), **asked).cpu()
    assert expected.shape[1] <= prompt.shape[1] + 3

    assert torch.equal(wrapped.generate(prompt, **asked), expected)


@pytest.mark.slow
def test_what_steps_have_learned_is_there(llama: LlamaForCausalLM, wrapped: RoundPipe) -> None:
    plain = copy.deepcopy(llama)
    optimizer, of_plain = AdamW(wrapped.optim_parameters(), lr=0.1), torch.optim.AdamW(plain.parameters(), lr=0.1)
    for _ in range(3):
        wrapped.forward_backward(input_kwargs={"input_ids": PROMPTS, "labels": PROMPTS})
        wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        wrapped.synchronize()
        plain(input_ids=PROMPTS, labels=PROMPTS).loss.backward()
        of_plain.step()
        of_plain.zero_grad()
    before = tokens_of_itself(llama, wrapped)

    found = generated(wrapped)

    assert torch.equal(found, tokens_of_itself(plain, wrapped))
    assert not torch.equal(found, before)
    # And goes on.
    wrapped.forward_backward(input_kwargs={"input_ids": PROMPTS, "labels": PROMPTS})
    wrapped.step(lambda: optimizer.step(), is_async=False)


def test_in_training_mode_the_same_tokens_are_sampled(llama: LlamaForCausalLM, wrapped: RoundPipe) -> None:
    expected = tokens_of_itself(llama, wrapped, do_sample=True)

    assert torch.equal(generated(wrapped.train(), do_sample=True), expected)


@pytest.mark.parametrize("training", [False, True])
def test_nothing_is_drawn_from_the_callers_generator_but_by_sampling(wrapped: RoundPipe, training: bool) -> None:
    wrapped.train(training)
    torch.manual_seed(5)
    state = torch.get_rng_state()

    wrapped.generate(PROMPTS, attention_mask=MASK, max_new_tokens=3)

    assert torch.equal(torch.get_rng_state(), state)


def test_guidance_beside_a_cache_of_another_kind_is_refused(wrapped: RoundPipe) -> None:
    with pytest.raises(
        ValueError, match=r"guidance_scale calls forward without the prompt, too, .* is a StaticCache"
    ):
        generated(wrapped, guidance_scale=2.0, cache_implementation="static")


def test_drafts_by_the_first_layers_are_refused_before_the_config_has_fewer(wrapped: RoundPipe) -> None:
    with pytest.raises(ValueError, match="assistant_early_exit drafts with the model's first layers alone"):
        generated(wrapped, PROMPTS[:1], assistant_early_exit=1)

    assert wrapped.config.num_hidden_layers == 3


def test_a_step_while_text_is_generated_is_refused(wrapped: RoundPipe) -> None:
    class Steps(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            del scores
            wrapped.step(lambda: None)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    with pytest.raises(RuntimeError, match="generate is under way; step after it has returned"):
        generated(wrapped, stopping_criteria=StoppingCriteriaList([Steps()]))

    wrapped.step(lambda: None)


def test_an_error_in_the_loop_is_raised_as_it_is(llama: LlamaForCausalLM, wrapped: RoundPipe) -> None:
    def broken(*_: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        generated(wrapped, logits_processor=LogitsProcessorList([broken]))

    assert torch.equal(generated(wrapped), tokens_of_itself(llama, wrapped))


def test_an_error_in_a_layer_is_raised_as_it_is(llama: LlamaForCausalLM, runtime: Runtime) -> None:
    model = copy.deepcopy(llama)
    is_broken = True

    class Breaks(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if is_broken:
                raise KeyError("mine")
            return self.inner(x)

    model.model.layers[1].mlp.down_proj = Breaks(model.model.layers[1].mlp.down_proj)
    is_broken = False
    wrapped = wrap_model_to_roundpipe(model, runtime=runtime)
    is_broken = True

    with pytest.raises(KeyError, match="mine") as raised:
        generated(wrapped)

    assert any("layer 2" in note for note in raised.value.__notes__)
    is_broken = False
    assert torch.equal(generated(wrapped), tokens_of_itself(llama, wrapped))


def test_a_forward_that_fails_in_a_layer_does_not_run_again(llama: LlamaForCausalLM, runtime: Runtime) -> None:
    model, runs = copy.deepcopy(llama), []

    class Lacking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if is_broken:
                runs.append(len(x))
                raise NotImplementedError("mine")
            return x

    is_broken = False
    model.model.layers[1].mlp = Lacking()
    wrapped = wrap_model_to_roundpipe(model, runtime=runtime)
    is_broken = True

    with pytest.raises(NotImplementedError, match="mine"):
        generated(wrapped)

    # The first layer has written the cache by then.
    assert len(runs) == 1


def test_a_forward_takes_a_cache(llama: LlamaForCausalLM, wrapped: RoundPipe) -> None:
    caches: list[Any] = [DynamicCache(config=llama.config), DynamicCache(config=llama.config)]
    with torch.no_grad():
        for ids in (PROMPTS[:1], torch.tensor([[9]])):
            found = wrapped(input_ids=ids, past_key_values=caches[0], use_cache=True)
            expected = llama(input_ids=ids, past_key_values=caches[1], use_cache=True)

            torch.testing.assert_close(found.logits, expected.logits)
            assert found.past_key_values is caches[0]

    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 5


def test_a_forward_divides_a_cache_by_samples(llama: LlamaForCausalLM, wrapped: RoundPipe) -> None:
    caches: list[Any] = [DynamicCache(config=llama.config), DynamicCache(config=llama.config)]
    with torch.no_grad():
        for ids, count in ((PROMPTS, 2), (PROMPTS[:, :1], 1)):
            config = in_microbatches(count)
            found = wrapped(input_ids=ids, past_key_values=caches[0], use_cache=True, roundpipe_run_config=config)
            expected = llama(input_ids=ids, past_key_values=caches[1], use_cache=True)

            torch.testing.assert_close(found.logits, expected.logits)
            assert found.past_key_values is caches[0]

    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        torch.testing.assert_close(one.keys.cpu(), other.keys)


def test_what_was_read_before_is_divided(llama: LlamaForCausalLM, wrapped: RoundPipe) -> None:
    def with_prefix(model: Any, reader: LlamaForCausalLM, **settings: Any) -> torch.Tensor:
        cache: Any = DynamicCache(config=llama.config)
        with torch.no_grad():
            reader(input_ids=ids[:, :4].to(reader.device), past_key_values=cache, use_cache=True)
        found = generated(model, ids, past_key_values=cache, **settings)
        assert cache.get_seq_length() == ids.shape[1] + 5
        return found.cpu()

    ids = torch.cat([PROMPTS[[0, 0, 0]], PROMPTS[[2, 0, 2]]], dim=1)
    there = on_the_device(llama, wrapped)
    expected = with_prefix(there, reader=there)

    # On the host, where its weights are.
    found = with_prefix(wrapped, reader=llama, roundpipe_run_config=in_microbatches(2))

    assert torch.equal(found, expected)


@pytest.mark.parametrize("told", ["by the call", "by a config", "by a config in its place", "by the model"])
def test_beams_of_a_sample_stay_together(told: str, llama: LlamaForCausalLM, wrapped: RoundPipe) -> None:
    settings = GenerationConfig(num_beams=3, pad_token_id=0)
    options = {"by the call": {"num_beams": 3}, "by a config": {"generation_config": settings}}.get(told, {})
    if told == "by the model":
        wrapped.generation_config.num_beams = 3
    given = (settings,) if told == "by a config in its place" else ()
    expected = tokens_of_itself(llama, wrapped, num_beams=3)
    # All beams of a prompt are read.
    wrapped.train()

    found = generated(wrapped, PROMPTS, *given, **options, roundpipe_run_config=in_microbatches(2))

    assert torch.equal(found, expected)


def test_a_cache_of_an_unknown_class_is_used_in_one_piece(llama: LlamaForCausalLM, wrapped: RoundPipe) -> None:
    class Mine(DynamicCache):
        pass

    with pytest.raises(ValueError, match="samples of a Mine cannot be divided"):
        generated(wrapped, past_key_values=Mine(), roundpipe_run_config=in_microbatches(2))

    assert torch.equal(generated(wrapped, past_key_values=Mine()), tokens_of_itself(llama, wrapped))


def test_a_cache_in_a_call_with_gradients_is_refused(llama: LlamaForCausalLM, wrapped: RoundPipe) -> None:
    with pytest.raises(ValueError, match="a key-value cache must not be given in a call with gradients"):
        wrapped(input_ids=PROMPTS, past_key_values=DynamicCache(config=llama.config))


def test_anything_else_in_place_of_a_cache_is_refused(wrapped: RoundPipe) -> None:
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="past_key_values must be a cache of transformers, but is"),
    ):
        wrapped(input_ids=PROMPTS, past_key_values=((torch.ones(1), torch.ones(1)),))


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft")


def test_adapters_generate_as_in_the_model_itself(llama: LlamaForCausalLM, runtime: Runtime, peft: Any) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(llama), config).eval()
    wrapped: Any = wrap_model_to_roundpipe(copy.deepcopy(model), runtime=runtime)

    found = generated(wrapped)

    assert torch.equal(found, tokens_of_itself(model, wrapped))
    assert not torch.equal(found, tokens_of_itself(llama, wrapped))


def test_a_learned_prompt_is_refused(llama: LlamaForCausalLM, runtime: Runtime, peft: Any) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(copy.deepcopy(llama), config).eval()

    with pytest.raises(ValueError, match="PromptTuningConfig learns a prompt, which PEFT puts before the input"):
        generated(wrap_model_to_roundpipe(model, runtime=runtime))


def test_adapters_of_a_call_are_refused_before_it_begins(
    llama: LlamaForCausalLM, runtime: Runtime, peft: Any
) -> None:
    model = peft.get_peft_model(copy.deepcopy(llama), peft.LoraConfig(r=4, target_modules=["q_proj"])).eval()
    wrapped: Any = wrap_model_to_roundpipe(model, runtime=runtime)

    with pytest.raises(ValueError, match=r"adapter_names must not be given, .* use_sequential_preset=False"):
        generated(wrapped, adapter_names=["default"] * len(PROMPTS))


@pytest.mark.later
def test_an_encoder_with_a_decoder_is_refused_with_what_to_do(runtime: Runtime) -> None:
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=40, **sizes, decoder_start_token_id=0)
    wrapped: Any = wrap_model_to_roundpipe(T5ForConditionalGeneration(config).eval(), runtime=runtime)

    with pytest.raises(ValueError, match=r"is an encoder with a decoder: .* original_model\.generate"):
        generated(wrapped)

    optimizer = AdamW(wrapped.optim_parameters(), lr=0.1)
    wrapped.forward_backward(input_kwargs={"input_ids": PROMPTS, "labels": PROMPTS})
    wrapped.step(lambda: optimizer.step())
    wrapped.synchronize()
    plain: Any = T5ForConditionalGeneration(config).eval()
    plain.load_state_dict(wrapped.state_dict())
    assert torch.equal(generated(wrapped.original_model), generated(plain))
