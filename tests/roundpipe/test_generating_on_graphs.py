"""`generate` with a static cache and `launch="graphs"`: the tokens of runs by Python, and where these stay."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from roundpipe import ImpureLayer, RoundPipe, RoundPipeRunConfig, Runtime, wrap_model_to_roundpipe
from roundpipe.optim import AdamW
from rp_engine.execution.graphs.layer_graphs import LayerGraphs
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import StaticLayer

PROMPTS = torch.tensor([[3, 4, 5, 6], [0, 0, 7, 8], [9, 3, 5, 4]])
NUM_TOKENS = 12
# The prompt's call brings weights; a token's is seen, the next one captured, and one more tried.
NUM_REPLAYED = NUM_TOKENS - 4
GRAPHS = RoundPipeRunConfig(launch="graphs")
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
    "pad_token_id": 0,
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.3, "top_k": 20},
    "prefilled in chunks": {"prefill_chunk_size": 2},
    "several of each": {"do_sample": True, "num_return_sequences": 2},
}


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[LayerGraphs]:
    """Those that were replayed, once for each replay."""
    found: list[LayerGraphs] = []
    plain = LayerGraphs.replay

    def replay(self: LayerGraphs, *args: Any) -> Any:
        found.append(self)
        return plain(self, *args)

    monkeypatch.setattr(LayerGraphs, "replay", replay)
    return found


def wrapped(model: nn.Module, runtime: Runtime, config: RoundPipeRunConfig = GRAPHS) -> RoundPipe:
    found = wrap_model_to_roundpipe(copy.deepcopy(model), runtime=runtime, model_run_config=config)
    assert isinstance(found, RoundPipe)
    return found


def generated(model: Any, prompts: torch.Tensor = PROMPTS, **options: Any) -> Any:
    torch.manual_seed(1)
    mask, lengths = (prompts != 0).long(), {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS}
    if not isinstance(model, RoundPipe):
        prompts, mask = prompts.to(model.device), mask.to(model.device)
    return model.generate(prompts, attention_mask=mask, **{"cache_implementation": "static", **lengths, **options})


def of_itself(model: Any, runtime: Runtime, **options: Any) -> torch.Tensor:
    """What the model itself generates on the device, where it draws and rounds as there."""
    there = copy.deepcopy(model).to(runtime.lanes[0].device.torch_device)
    return generated(there, **options).cpu()


def reasons(caplog: pytest.LogCaptureFixture) -> str:
    return " ".join(one.getMessage() for one in caplog.records if "run without graphs" in one.getMessage())


def each_token(body: Callable[[int], object]) -> StoppingCriteriaList:
    """Have something done after each token, which is given how many there are."""

    class Does(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> Any:
            del scores
            body(input_ids.shape[1])
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    return StoppingCriteriaList([Does()])


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_the_model_itself(
    way: str, microbatches: int, llama: LlamaForCausalLM, runtime: Runtime, graphs: list[LayerGraphs]
) -> None:
    expected = of_itself(llama, runtime, **WAYS[way])
    config = RoundPipeRunConfig(num_microbatch=microbatches)

    found = generated(wrapped(llama, runtime), **WAYS[way], roundpipe_run_config=config)

    assert torch.equal(found, expected)
    assert len(graphs) >= microbatches * NUM_REPLAYED
    # All layers at once, but for the code around them.
    assert {one.layers for one in graphs} == {range(1, 4)}
    assert len(set(graphs)) == microbatches


@pytest.mark.few(1)
@pytest.mark.parametrize("is_given", [False, True])
def test_tokens_are_the_same_in_inference_mode(
    is_given: bool, llama: LlamaForCausalLM, runtime: Runtime, graphs: list[LayerGraphs]
) -> None:
    model = wrapped(llama, runtime)
    with torch.inference_mode():
        own = {"past_key_values": static_cache(llama), "cache_implementation": None} if is_given else {}

        found = generated(model, **own)

    assert torch.equal(found, of_itself(llama, runtime))
    assert len(graphs) >= NUM_REPLAYED


def large_llama() -> LlamaForCausalLM:
    """Of many layers, beside which keys and values take little memory."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 14}
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes})).eval()


def weights_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.later
def test_devices_that_share_the_layers_replay_each_its_own(graphs: list[LayerGraphs]) -> None:
    large = large_llama()
    with Runtime("cpu:2", device_memory_bytes=int(0.9 * weights_of(large))) as runtime:
        config = RoundPipeRunConfig(num_microbatch=2)
        found = generated(wrapped(large, runtime), roundpipe_run_config=config)

        assert torch.equal(found, of_itself(large, runtime))
    first, second = sorted({one.layers for one in graphs}, key=lambda layers: layers.start)
    assert (first.start, first.stop, second.stop) == (1, second.start, 15)
    assert len(set(graphs)) == 4


def test_scores_are_those_of_runs_by_python(
    llama: LlamaForCausalLM, runtime: Runtime, graphs: list[LayerGraphs]
) -> None:
    asked = {"return_dict_in_generate": True, "output_logits": True}
    eager: Any = generated(wrapped(llama, runtime, RoundPipeRunConfig(launch="eager")), **asked)
    assert not graphs

    found: Any = generated(wrapped(llama, runtime), **asked)

    assert len(graphs) >= NUM_REPLAYED
    for one, other in zip(found.logits, eager.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0 if one.device.type == "cpu" else 1e-5)


@pytest.mark.later
def test_the_next_text_is_that_of_the_weights_after_a_step(
    llama: LlamaForCausalLM, runtime: Runtime, graphs: list[LayerGraphs]
) -> None:
    model = wrapped(llama, runtime)
    before = generated(model)
    optimizer = AdamW(model.optim_parameters(), lr=0.1)
    model.forward_backward(input_kwargs={"input_ids": PROMPTS, "labels": PROMPTS})
    model.step(lambda: optimizer.step(), is_async=False)
    graphs.clear()

    found = generated(model)

    assert len(graphs) >= NUM_REPLAYED
    learned = copy.deepcopy(llama)
    learned.load_state_dict(model.state_dict())
    assert torch.equal(found, of_itself(learned, runtime))
    assert not torch.equal(found, before)


@pytest.mark.later
def test_nothing_is_left_of_graphs_when_generate_has_returned(
    llama: LlamaForCausalLM, runtime: Runtime, graphs: list[LayerGraphs]
) -> None:
    model = wrapped(llama, runtime)
    generated(model)
    seen = weakref.ref(graphs[0])
    graphs.clear()
    gc.collect()

    assert seen() is None
    assert torch.equal(generated(model), of_itself(llama, runtime))


def test_an_error_between_tokens_leaves_nothing_either(
    llama: LlamaForCausalLM, runtime: Runtime, graphs: list[LayerGraphs]
) -> None:
    def breaks(length: int) -> None:
        if length == PROMPTS.shape[1] + NUM_TOKENS - 2:
            raise KeyError("mine")

    model = wrapped(llama, runtime)
    with pytest.raises(KeyError, match="mine"):
        generated(model, stopping_criteria=each_token(breaks))
    assert graphs

    assert torch.equal(generated(model), of_itself(llama, runtime))


def test_a_cache_that_grows_has_no_graphs(
    llama: LlamaForCausalLM, runtime: Runtime, graphs: list[LayerGraphs], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "rp_engine"):
        found = generated(wrapped(llama, runtime), cache_implementation=None)

    assert torch.equal(found, of_itself(llama, runtime, cache_implementation=None))
    assert not graphs
    assert 'generate(..., cache_implementation="static") makes one of fixed size' in reasons(caplog)


def test_beams_that_are_reordered_have_none(
    llama: LlamaForCausalLM, runtime: Runtime, graphs: list[LayerGraphs], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "rp_engine"):
        found = generated(wrapped(llama, runtime), num_beams=3)

    assert torch.equal(found, of_itself(llama, runtime, num_beams=3))
    assert not graphs
    assert "their cache is elsewhere" in reasons(caplog)


def test_a_window_that_python_counts_has_none(
    runtime: Runtime, graphs: list[LayerGraphs], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    mistral = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6)).eval()

    with caplog.at_level(logging.INFO, "rp_engine"):
        found = generated(wrapped(mistral, runtime))

    assert torch.equal(found, of_itself(mistral, runtime))
    assert not graphs
    assert "other numbers in Python" in reasons(caplog)


def test_a_cache_that_was_moved_is_captured_anew(
    llama: LlamaForCausalLM, runtime: Runtime, graphs: list[LayerGraphs]
) -> None:
    def move(length: int) -> None:
        if length == PROMPTS.shape[1] + 6:
            assert graphs
            for layer in cache.layers:
                layer.keys = layer.keys.clone()

    model = wrapped(llama, runtime)
    cache = static_cache(llama)
    options = {"cache_implementation": None, "max_new_tokens": 20, "min_new_tokens": 20}

    found = generated(model, past_key_values=cache, stopping_criteria=each_token(move), **options)

    expected = of_itself(llama, runtime, max_new_tokens=20, min_new_tokens=20)
    assert torch.equal(found, expected)
    assert len(set(graphs)) == 2


def static_cache(model: LlamaForCausalLM) -> Any:

    return StaticCache(config=model.config, max_cache_len=32)


@pytest.mark.later
def test_layers_whose_weights_come_anew_each_token_have_none(graphs: list[LayerGraphs]) -> None:
    large = large_llama()
    with Runtime("cpu:1", device_memory_bytes=int(0.7 * weights_of(large))) as runtime:
        found = generated(wrapped(large, runtime))

        assert torch.equal(found, of_itself(large, runtime))
    # The first layers' weights stay.
    assert all(one.layers.start == 1 and one.layers.stop < 14 for one in graphs)


def test_graphs_go_with_weights_that_must_leave(
    llama: LlamaForCausalLM, runtime: Runtime, graphs: list[LayerGraphs]
) -> None:
    def leave(length: int) -> None:
        # There is no public way to have memory become short at this moment for some weights alone.
        kept: Any = model._engine.aside._kept[0]
        if length == PROMPTS.shape[1] + 6:
            assert kept.graphs.has_any
            runtime.lanes[0].do(lambda: kept._drop([next(iter(kept._blocks))])).result()
            assert not kept.graphs.has_any

    model: Any = wrapped(llama, runtime)
    options = {"max_new_tokens": 20, "min_new_tokens": 20}

    found = generated(model, stopping_criteria=each_token(leave), **options)

    assert torch.equal(found, of_itself(llama, runtime, **options))
    assert len(set(graphs)) == 2


class Counted(nn.Module):
    """Counts its runs in Python. `factors`: a number that nothing of a call tells."""

    factors: ClassVar[list[float]] = [1.0]

    def __init__(self, inner: nn.Module, *, counts: bool) -> None:
        super().__init__()
        self.inner, self.counts, self.count = inner, counts, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += self.counts
        return self.inner(x) * self.factors[0]


def with_counted(llama: LlamaForCausalLM, *, counts: bool) -> LlamaForCausalLM:
    model = copy.deepcopy(llama)
    model.model.layers[1].mlp.down_proj = Counted(model.model.layers[1].mlp.down_proj, counts=counts)
    return model.eval()


def test_a_layer_that_counts_in_python_runs_without(
    llama: LlamaForCausalLM, runtime: Runtime, graphs: list[LayerGraphs], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "rp_engine"):
        found = generated(wrapped(with_counted(llama, counts=True), runtime))

    assert torch.equal(found, of_itself(llama, runtime))
    assert all(2 not in one.layers for one in graphs)
    assert "they change plain attributes" in reasons(caplog)
    assert "their cache" not in reasons(caplog)


def test_a_number_that_changes_unseen_is_told(
    llama: LlamaForCausalLM, runtime: Runtime, graphs: list[LayerGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counted, "factors", [1.0])

    def change(length: int) -> None:
        if length == PROMPTS.shape[1] + 6:
            assert graphs
            Counted.factors[0] = 1.5

    with pytest.raises(ImpureLayer, match="gives something else than a run by Python"):
        generated(wrapped(with_counted(llama, counts=False), runtime), stopping_criteria=each_token(change))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["values", "cumulative_length"])
def test_what_replays_leave_in_the_cache_is_compared_too(
    name: str,
    llama: LlamaForCausalLM,
    runtime: Runtime,
    graphs: list[LayerGraphs],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As if a graph wrote one key elsewhere, and gave right results this time.
    plain = LayerGraphs.replay

    def replay(self: LayerGraphs, *args: Any) -> Any:
        found = plain(self, *args)
        written = getattr(cache.layers[2], name)
        (written[:, :, 20] if written.ndim else written).add_(1)
        return found

    monkeypatch.setattr(LayerGraphs, "replay", replay)
    cache = static_cache(llama)

    with caplog.at_level(logging.INFO, "rp_engine"):
        found = generated(wrapped(llama, runtime), past_key_values=cache, cache_implementation=None)

    assert torch.equal(found, of_itself(llama, runtime))
    assert len(graphs) == 1
    told = {"values": "a replay differs from", "cumulative_length": "a replay writes other numbers to their state"}
    assert told[name] in reasons(caplog)


class Flagged(StaticLayer):
    """Sets a flag in the seventh call of all layers: the first of those in the third run of three layers."""

    num_calls: ClassVar[list[int]] = [0]

    def update(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls[0] += 1
        self.is_late = self.is_late or self.num_calls[0] == 7
        return super().update(*args, **kwargs)


def test_what_a_capture_changes_of_the_cache_in_python_is_set_back(
    llama: LlamaForCausalLM,
    runtime: Runtime,
    graphs: list[LayerGraphs],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Flagged, "num_calls", [0])
    flags: list[list[bool]] = []
    cache = static_cache(llama)
    for layer in cache.layers:
        layer.__class__ = Flagged
        layer.is_late = False
    noting = each_token(lambda _: flags.append([layer.is_late for layer in cache.layers]))

    with caplog.at_level(logging.INFO, "rp_engine"):
        found = generated(
            wrapped(llama, runtime),
            past_key_values=cache,
            cache_implementation=None,
            stopping_criteria=noting,
        )

    assert torch.equal(found, of_itself(llama, runtime))
    assert not graphs
    assert "they change what their cache holds beside its tensors" in reasons(caplog)
    # That run captures. The run by Python that follows was the tenth.
    assert flags == [[False] * 3] * NUM_TOKENS
