"""Tiny models, ragged data, a tokenizer of words, and two runs of a script side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

WORDS = ["<pad>", "</s>", *(f"w{number}" for number in range(46))]
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss")
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 3,
    "per_device_eval_batch_size": 4,
    "num_train_epochs": 2,
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "max_grad_norm": 0.5,
    "weight_decay": 0.01,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
}


def causal_lm(seed: int = 0, **settings: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(_config(**settings))


def rewarding(seed: int = 0) -> Qwen3ForSequenceClassification:
    """A model that gives a text one number."""
    torch.manual_seed(seed)
    return Qwen3ForSequenceClassification(_config(id2label={0: "reward"}))


def _config(**settings: Any) -> Qwen3Config:
    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    return Qwen3Config(**sizes, **heads, pad_token_id=0, eos_token_id=1, **settings)


def rows(count: int = 22, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 12, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(2, len(WORDS), (length,), generator=generator)} for length in lengths]


def sentences(count: int = 22, seed: int = 1) -> list[str]:
    return [" ".join(WORDS[token] for token in row["input_ids"]) for row in rows(count, seed)]


def padded(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in batch], batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row["input_ids"]) for row in batch], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def tokenizer() -> PreTrainedTokenizerFast:
    found = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", eos_token="</s>")


def logs(trainer: Any, names: tuple[str, ...] = LOGGED) -> list[dict[str, float]]:
    """What a trainer has logged, without times."""
    return [
        {name: value for name, value in line.items() if name in ("step", *names)}
        for line in trainer.state.log_history
        if "train_runtime" not in line
    ]


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_same(found: Any, wanted: Any, names: tuple[str, ...] = LOGGED, atol: float = 2e-5) -> None:
    """Both trainers logged the same numbers at the same steps, and ended with the same weights."""
    assert [line.keys() for line in logs(found, names)] == [line.keys() for line in logs(wanted, names)]
    for here, there in zip(logs(found, names), logs(wanted, names), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=atol)
    before = weights(wanted)
    for name, value in weights(found).items():
        torch.testing.assert_close(value, before[name], rtol=1e-4, atol=atol, msg=name)


def folder(path: Path, name: str) -> str:
    return str(path / name)
