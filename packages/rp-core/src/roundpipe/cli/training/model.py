"""The model that a job trains: Qwen3 over bytes, with random weights."""
# torch types its generators, and transformers its models, by half:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

BYTES = 256


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of a Qwen3 model; the default one learns from about a minute of two cores."""

    layers: int = 4
    hidden: int = 96
    intermediate: int = 256
    heads: int = 3
    key_value_heads: int = 1
    head_numbers: int = 32


def make_model(size: ModelSize, *, dtype: torch.dtype, seed: int, seq_len: int) -> Qwen3ForCausalLM:
    """Make the model on the host; in every dtype its weights are the same ones, rounded.

    The caller's random state is left as it was.
    """
    config = _config(size, seq_len)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drawn = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # Not `drawn.to(dtype)`, which would round the rotary frequencies too.
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(drawn.state_dict())
    return cast(Qwen3ForCausalLM, model)


def save_model(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write what ``AutoModelForCausalLM.from_pretrained`` reads."""
    # The bar over one small file would follow the one that matters.
    logging.disable_progress_bar()
    model.save_pretrained(folder)


def _config(size: ModelSize, seq_len: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=BYTES,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        head_dim=size.head_numbers,
        max_position_embeddings=max(1024, seq_len),
        tie_word_embeddings=True,
        # Wider than for a large model: in a few hundred steps the weights cannot grow far from where they begin.
        initializer_range=0.05,
        use_cache=False,
    )
