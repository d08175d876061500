"""Tiny models of transformers in random weights: tied, untied, and with experts."""

from __future__ import annotations

from typing import Any

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def tied() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**SMALL, tie_word_embeddings=True))


def untied() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SMALL))


def with_experts() -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **EXPERTS))
