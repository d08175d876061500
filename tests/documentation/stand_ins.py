"""Stand-ins that hidden blocks of the pages import: what a page calls Qwen3-8B has few weights here."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 64


def qwen3(vocabulary: int = VOCABULARY) -> Qwen3ForCausalLM:
    """The same tiny model every time."""
    torch.manual_seed(0)
    sizes = {"vocab_size": vocabulary, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, use_cache=False))


def checkpoint(folder: str) -> None:
    """Write it where a page's code looks for a downloaded model."""
    qwen3().save_pretrained(folder)


def checkpoint_with_tokenizer(folder: str) -> None:
    """Write one that has a tokenizer, that of the command's toy."""
    qwen3(vocabulary=257).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        Path(folder, name).write_bytes(files("rp_cli").joinpath("finetune", "tiny", name).read_bytes())


def batch(rows: int = 4, seed: int = 0, length: int = 8) -> dict[str, torch.Tensor]:
    """Token ids, padded on the right to several lengths."""
    ids = torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
    lengths = length - torch.arange(rows)[:, None] % 3
    mask = (torch.arange(length)[None] < lengths).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def batches(count: int = 3) -> list[dict[str, torch.Tensor]]:
    """Several of them."""
    return [batch(seed=seed) for seed in range(count)]
