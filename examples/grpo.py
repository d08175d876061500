"""Reinforcement by GRPO with TRL: the completions of the model itself are scored by a function.

python examples/grpo.py --model Qwen3-4B --data questions.jsonl
python examples/grpo.py --tiny
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import trl
from datasets import Dataset
from rp_serving import VllmServer
from rp_trainer import RoundPipeMixin, RoundPipeOptions
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)


# The two changed lines: TRL's trainer on RoundPipe
class GRPOTrainer(RoundPipeMixin, trl.GRPOTrainer):
    """Generates and trains on all GPUs of the machine, in one process; or else on two CPU devices."""


# The data: rows with a `prompt` and its `answer`
def rows(path: str | None) -> Dataset:
    """The rows of a JSONL file; by default every question has the same answer."""
    if path is not None:
        return Dataset.from_json(path)
    return Dataset.from_list([{"prompt": f"{one} + {7 - one} =", "answer": "7"} for one in range(8)] * 8)


# The reward: any function of completions and the data's columns
def right(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """The share of a completion's words that are the answer."""
    said = [text.split() for text in completions]
    return [words.count(one) / max(1, len(words)) for words, one in zip(said, answer, strict=True)]


# The model: a checkpoint, or a tiny one with a tokenizer of digits
def load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    if not arguments.tiny:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
        return model, AutoTokenizer.from_pretrained(arguments.model)
    vocabulary = {word: place for place, word in enumerate(["<end>", "+", "=", *"0123456789"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<end>", eos_token="<end>")
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    return Qwen3ForCausalLM(config), tokenizer


# The training: TRL's own arguments
def main(words: list[str]) -> list[float]:
    """Train; the mean rewards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-4B", help="the folder of a checkpoint")
    parser.add_argument("--data", help="a JSONL file; default: sums that make seven")
    parser.add_argument("--output", default="rewarded")
    parser.add_argument("--server", type=VllmServer, help="a vLLM server: http://127.0.0.1:8000")
    parser.add_argument("--tiny", action="store_true", help="a tiny model with random weights")
    arguments = parser.parse_args(words)
    model, tokenizer = load(arguments)
    sizes = {"per_device_train_batch_size": 32, "num_generations": 8, "max_completion_length": 512}
    trainer = GRPOTrainer(
        model=model,
        args=trl.GRPOConfig(
            arguments.output,
            **({**sizes, "max_completion_length": 5, "max_steps": 15} if arguments.tiny else sizes),
            learning_rate=2e-2 if arguments.tiny else 1e-6,
            logging_steps=1,
            save_strategy="no" if arguments.tiny else "epoch",
            bf16=torch.cuda.is_available(),
            report_to="none",
        ),
        reward_funcs=right,
        train_dataset=rows(arguments.data),
        processing_class=tokenizer,
        roundpipe=RoundPipeOptions(compile_layers=not arguments.tiny, server=arguments.server),
    )
    trainer.train()
    trainer.save_model(arguments.output)
    return [line["reward"] for line in trainer.state.log_history if "reward" in line]


# Run it
if __name__ == "__main__":
    main(sys.argv[1:])
