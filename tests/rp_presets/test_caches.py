"""A cache in microbatches is to its holder the cache in one piece, and to its layers one cache a microbatch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_presets import to_sequential
from rp_presets.caches.devices import bring
from rp_presets.caches.parts import in_parts, sizes_of
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    LlamaConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)

SIZES = (2, 1, 3)
NUM_LAYERS = 2
SLIDING = Qwen3Config(
    num_hidden_layers=NUM_LAYERS, use_sliding_window=True, sliding_window=4, max_window_layers=1, head_dim=3
)
CACHES: dict[str, Callable[[], Any]] = {
    "grows by layers": DynamicCache,
    "of a config": lambda: DynamicCache(config=LlamaConfig(num_hidden_layers=NUM_LAYERS)),
    "with a window": lambda: DynamicCache(config=SLIDING),
    "static": lambda: StaticCache(config=LlamaConfig(num_hidden_layers=NUM_LAYERS), max_cache_len=12),
}


def written(cache: Any, parts: Sequence[Any], sizes: Sequence[int], num_tokens: int = 3) -> None:
    """Write the same keys and values to a cache, and to the caches of its microbatches."""
    ends = [0, *accumulate(sizes)]
    for layer in range(NUM_LAYERS):
        keys, values = torch.randn(2, sum(sizes), 2, num_tokens, 3)
        cache.update(keys, values, layer)
        for part, (start, end) in zip(parts, pairwise(ends), strict=True):
            part.update(keys[start:end], values[start:end], layer)


def same(plain: Any, apart: Any) -> None:
    assert len(plain) == len(apart)
    assert int(plain.get_seq_length()) == int(apart.get_seq_length())
    assert plain.is_sliding == apart.is_sliding
    for one, other in zip(plain.layers, apart.layers, strict=True):
        assert isinstance(other, type(one))
        assert one.get_mask_sizes(1) == other.get_mask_sizes(1)
        if one.is_initialized and one.keys.numel():
            assert torch.equal(one.keys, other.keys)
            assert torch.equal(one.values, other.values)


@pytest.mark.parametrize("kind", CACHES)
@settings(max_examples=examples(20))
@given(data=st.data())
def test_whatever_is_done_to_a_cache_is_done_to_its_parts(kind: str, data: st.DataObject) -> None:
    plain, apart = CACHES[kind](), CACHES[kind]()
    sizes = SIZES
    written(plain, in_parts(apart, sizes), sizes)

    for _ in range(3):
        doing = data.draw(st.sampled_from(["reorder", "repeat", "select", "crop", "reset", "copy"]))
        if doing == "reorder":
            ends = [0, *accumulate(sizes)]
            own = [st.lists(st.integers(a, b - 1), min_size=b - a, max_size=b - a) for a, b in pairwise(ends)]
            index = torch.tensor([row for rows in data.draw(st.tuples(*own)) for row in rows])
            plain.reorder_cache(index)
            apart.reorder_cache(index)
        elif doing == "repeat" and kind != "static":
            plain.batch_repeat_interleave(2)
            apart.batch_repeat_interleave(2)
            sizes = tuple(2 * size for size in sizes)
        elif doing == "select" and kind != "static":
            index = torch.tensor(sorted(data.draw(st.sets(st.integers(0, sum(sizes) - 1), min_size=1))))
            plain.batch_select_indices(index)
            apart.batch_select_indices(index)
            ends = [0, *accumulate(sizes)]
            left = [int(((index >= a) & (index < b)).sum()) for a, b in pairwise(ends)]
            sizes = tuple(size for size in left if size)
        elif doing == "crop" and kind in ("grows by layers", "of a config"):
            plain.crop(-1)
            apart.crop(-1)
        elif doing == "reset" and kind == "static":
            plain.reset()
            apart.reset()
        elif doing == "copy":
            plain, apart = copy.deepcopy(plain), copy.deepcopy(apart)
        same(plain, apart)
        parts = in_parts(apart, sizes)
        assert sizes_of(apart) == sizes
        written(plain, parts, sizes, num_tokens=1)
        same(plain, apart)


@pytest.mark.parametrize("kind", CACHES)
def test_what_a_cache_holds_already_is_divided(kind: str) -> None:
    plain, apart = CACHES[kind](), CACHES[kind]()
    written(plain, [apart], [sum(SIZES)])

    parts = in_parts(apart, SIZES)

    same(plain, apart)
    written(plain, parts, SIZES, num_tokens=1)
    same(plain, apart)


def test_a_static_cache_that_was_made_for_all_samples_is_divided() -> None:
    plain, apart = CACHES["static"](), CACHES["static"]()
    for cache in (plain, apart):
        cache.early_initialization(sum(SIZES), 2, 3, torch.float32, torch.device("cpu"))

    parts = in_parts(apart, SIZES)

    written(plain, parts, SIZES)
    same(plain, apart)
    assert plain.batch_size == apart.batch_size == sum(SIZES)


def test_a_copy_goes_on_by_itself() -> None:
    cache, plain = DynamicCache(), DynamicCache()
    written(plain, in_parts(cache, SIZES), SIZES)

    copied, stored = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    cache.crop(-2)

    same(plain, copied)
    same(plain, stored)
    written(plain, in_parts(copied, SIZES), SIZES)
    same(plain, copied)


def test_samples_stay_in_their_microbatch() -> None:
    cache = DynamicCache()
    written(DynamicCache(), in_parts(cache, SIZES), SIZES)

    with pytest.raises(ValueError, match=r"microbatches of \(2, 1, 3\), but is to be reordered to .* from one to"):
        cache.reorder_cache(torch.tensor([0, 2, 2, 3, 4, 5]))
    with pytest.raises(ValueError, match="samples that are kept must be in their order"):
        cache.batch_select_indices(torch.tensor([5, 0]))
    with pytest.raises(ValueError, match="holds 6 samples, but is to be reordered to 2"):
        cache.reorder_cache(torch.tensor([0, 1]))


def test_another_call_does_not_write_a_cache_in_parts() -> None:
    cache = DynamicCache()
    written(DynamicCache(), in_parts(cache, SIZES), SIZES)

    with pytest.raises(ValueError, match="this cache holds its samples in 3 microbatches"):
        cache.update(torch.zeros(6, 2, 1, 3), torch.zeros(6, 2, 1, 3), 0)


def test_other_samples_are_refused() -> None:
    cache = DynamicCache()
    written(cache, [DynamicCache()], [5])

    with pytest.raises(ValueError, match="the cache holds 5 samples, but the call has 6"):
        in_parts(cache, SIZES)
    parts = in_parts(cache, (2, 3))
    with pytest.raises(
        ValueError, match=r"microbatches of \(2, 3\), but the call has microbatches of \(2, 1, 3\)"
    ):
        in_parts(cache, SIZES)
    assert len(parts) == 2


def test_caches_that_do_not_tell_where_samples_are_stay_in_one_piece() -> None:
    class Mine(DynamicCache):
        pass

    for cache in (Mine(), EncoderDecoderCache(DynamicCache(), DynamicCache())):
        with pytest.raises(ValueError, match=f"{type(cache).__name__} cannot be divided .* num_microbatch=1"):
            in_parts(cache, SIZES)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_what_was_read_elsewhere_goes_where_each_layer_runs(kind: Any) -> None:
    sizes = {"vocab_size": 8, "hidden_size": 6, "intermediate_size": 8, "num_attention_heads": 2, "head_dim": 4}
    config = Qwen3Config(**sizes, num_key_value_heads=1, num_hidden_layers=2, max_position_embeddings=16)
    model = Qwen3ForCausalLM(config).eval()
    cache = kind(config=config, max_cache_len=6) if kind is StaticCache else kind(config=config)
    ids = torch.ones(2, 3, dtype=torch.long)
    first, *others = to_sequential(copy.deepcopy(model)).to("meta")
    with torch.no_grad():
        model(ids, past_key_values=cache)

        found = first(ids[:, :1].to("meta"), past_key_values=cache)
        for layer in others:
            found = layer(found)

    assert found.logits.shape == (2, 1, 8)
    for layer in cache.layers:
        assert {value.device.type for value in vars(layer).values() if isinstance(value, torch.Tensor)} == {"meta"}
        assert layer.device == torch.device("meta")


def test_only_the_layers_named_are_brought_and_those_of_both_caches_of_an_encoder_decoder() -> None:
    cache: Any = EncoderDecoderCache(DynamicCache(), DynamicCache())
    own, crossed = cache.self_attention_cache, cache.cross_attention_cache
    for inner in (own, crossed):
        written(DynamicCache(), [inner], (2,))

    bring(cache, {1, 7}, torch.device("meta"))

    for inner in (own, crossed):
        assert [layer.keys.device.type for layer in inner.layers] == ["cpu", "meta"]
