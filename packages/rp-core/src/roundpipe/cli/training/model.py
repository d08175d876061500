"""The model of a training job: a small Qwen3 over bytes, with random weights."""
# The types of torch's generators and of transformers' models are incomplete:
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
    """Sizes of a Qwen3 model; the default trains for about a minute on two cores."""

    layers: int = 4
    hidden: int = 96
    intermediate: int = 256
    heads: int = 3
    key_value_heads: int = 1
    head_numbers: int = 32


def make_model(size: ModelSize, *, dtype: torch.dtype, seed: int, seq_len: int) -> Qwen3ForCausalLM:
    """Create the model on the host. A seed gives the same weights in every dtype, except for rounding.

    The caller's random state does not change.
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
    """Write the model to a folder for ``AutoModelForCausalLM.from_pretrained``."""
    # No progress bar for this one small file.
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
        # Larger than for a large model: in a few hundred steps weights stay close to their initial values.
        initializer_range=0.05,
        use_cache=False,
    )
