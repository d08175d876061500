"""Tiny models with tokenizers, and data, for tests of `roundpipe train --model`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rp_data.documents import Document
from rp_trainer.finetuning.settings import learning_rate
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCABULARY = 160
_SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "intermediate_size": 48, **_SIZES}
_KEYS: dict[str, Any] = {**_HEADS, "num_key_value_heads": 2, "head_dim": 8}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_HEADS, num_key_value_heads=2),
    "qwen3": lambda: Qwen3Config(**_HEADS, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **_HEADS, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "gemma2": lambda: Gemma2Config(**_HEADS, num_key_value_heads=2, head_dim=8, sliding_window=16),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
    "gpt-neox": lambda: GPTNeoXConfig(**_HEADS),
    "bert": lambda: BertConfig(**_HEADS),
    "gpt-oss": lambda: GptOssConfig(**_KEYS, num_local_experts=4, num_experts_per_tok=2),
    "mixtral": lambda: MixtralConfig(**_KEYS, num_local_experts=4),
    "qwen2-moe": lambda: Qwen2MoeConfig(
        **_HEADS,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "olmoe": lambda: OlmoeConfig(**_KEYS, num_experts=4, num_experts_per_tok=2),
    "deepseek-v3": lambda: DeepseekV3Config(
        **_HEADS,
        num_key_value_heads=4,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    "mamba": lambda: MambaConfig(**_SIZES, state_size=4),
}
FAMILIES = ("llama", "qwen3", "qwen3-moe", "gemma2", "gpt2", "gpt-neox")

# As many chat templates are: each message between marks.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The same, with the assistant's words marked.
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As templates of reasoning models: what the assistant said before is written otherwise later.
UNSTABLE = CHATML.replace(
    "{{ message['content'] }}", "{% if loop.last %}<think></think>{% endif %}{{ message['content'] }}"
)
WORDS = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "and",
    "the",
    "cat",
    "sat",
    "on",
    "a",
]


def tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Byte pairs, trained on a few words."""
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\n"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    pairs.decoder = decoders.ByteLevel()
    alphabet = sorted({*pre_tokenizers.ByteLevel.alphabet()})[: VOCABULARY - 40]
    alphabet = [one for one in alphabet if one.isascii()] + ["Ġ", "Ċ"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    pairs.train_from_iterator([" ".join(WORDS), "user assistant system"], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=pairs, eos_token="<|end|>")
    if template is not None:
        made.chat_template = template
    return made


def make_model(
    folder: Path, family: str = "llama", *, template: str | None = CHATML, weights: bool = True
) -> Path:
    """A folder with a tiny model of random weights, and a tokenizer."""
    torch.manual_seed(0)
    config = CONFIGS[family]()
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    if weights:
        made.save_pretrained(folder)
    else:
        made.config.save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return folder


def words(number: int, count: int) -> str:
    return " ".join(WORDS[(number * 7 + at * (number % 5 + 1)) % len(WORDS)] for at in range(count))


def texts(count: int = 24) -> list[dict[str, Any]]:
    return [{"text": words(number, 3 + number % 9)} for number in range(count)]


def pairs(count: int = 24) -> list[dict[str, Any]]:
    return [
        {"prompt": words(number, 2 + number % 4), "completion": f" {words(number + 3, 2 + number % 5)}"}
        for number in range(count)
    ]


def chats(count: int = 24) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": words(number, 2)},
                {"role": "assistant", "content": words(number + 1, 1 + number % 3)},
                {"role": "user", "content": words(number + 2, 1)},
                {"role": "assistant", "content": words(number + 3, 2)},
            ]
        }
        for number in range(count)
    ]


def json_lines(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def lines(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run."""
    return [json.loads(line) for line in folder.joinpath("metrics.jsonl").read_text().splitlines()]


def plain_loop(
    model: nn.Module, steps: Iterable[Sequence[Document]], *, count: int, rate: float, decay: float, clip: float
) -> list[float]:
    """Train on every document alone, one after another; return the mean over all labels of each step."""
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    decayed = [one for name, one in trained.items() if one.ndim > 1 and "norm" not in name]
    others = [one for name, one in trained.items() if not (one.ndim > 1 and "norm" not in name)]
    groups = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], betas=(0.9, 0.95))
    losses: list[float] = []
    for step, documents in enumerate(steps, 1):
        total = sum(document.labels for document in documents)
        sums: list[float] = []
        for document in documents:
            tokens, labels = document.tensors()
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
            loss = nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum") / total
            loss.backward()
            sums.append(loss.item())
        losses.append(sum(sums))
        torch.nn.utils.clip_grad_norm_(trained.values(), clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps=count, highest=rate, warm_up=1)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trained_plainly(
    model: nn.Module, inputs: Mapping[str, Any], labels: torch.Tensor, *, steps: int, lr: float
) -> list[float]:
    """The losses of steps on one batch in plain PyTorch, with the command's schedule and a norm of at most 0.5."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    losses: list[float] = []
    for step in range(1, steps + 1):
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps=steps, highest=lr, warm_up=1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
