"""Preferences by KTO with TRL: completions that are marked good or bad, one at a time, on LoRA adapters.

python examples/kto.py --model Qwen3-8B --data judged.jsonl
python examples/kto.py --tiny
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from rp_trainer import RoundPipeMixin, RoundPipeOptions
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)


# The two changed lines: TRL's trainer on RoundPipe
class KTOTrainer(RoundPipeMixin, trl.KTOTrainer):
    """The reference is the same model with its adapters switched off; both run on all GPUs of the machine."""


# The data: rows with a `prompt`, a `completion`, and a `label`, true for a good one
def rows(path: str | None) -> Dataset:
    """The rows of a JSONL file; by default polite answers are good."""
    if path is not None:
        return Dataset.from_json(path)
    answers = {" yes {} please": True, " no {}": False}
    asked = ("tea", "milk", "bread", "salt")
    judged = [(f"more {it} ?", said.format(it), good) for it in asked for said, good in answers.items()]
    return Dataset.from_list([{"prompt": p, "completion": c, "label": good} for p, c, good in judged * 4])


# The model: a checkpoint, or a tiny one with a tokenizer of the data's words
def load(arguments: argparse.Namespace, data: Dataset) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    if not arguments.tiny:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
        return model, AutoTokenizer.from_pretrained(arguments.model)
    words = Tokenizer(models.WordLevel(unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    texts = (row["prompt"] + row["completion"] for row in data)
    words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["<end>"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<end>", eos_token="<end>")
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    return Qwen3ForCausalLM(config), tokenizer


# The training: TRL's own arguments
def main(words: list[str]) -> list[float]:
    """Train; the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-8B", help="the folder of a checkpoint")
    parser.add_argument("--data", help="a JSONL file; default: polite answers")
    parser.add_argument("--output", default="judged")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tiny", action="store_true", help="a tiny model with random weights")
    arguments = parser.parse_args(words)
    data = rows(arguments.data)
    model, tokenizer = load(arguments, data)
    trainer = KTOTrainer(
        model=model,
        args=trl.KTOConfig(
            arguments.output,
            per_device_train_batch_size=8 if arguments.tiny else arguments.batch,
            num_train_epochs=4 if arguments.tiny else 1,
            learning_rate=3e-2 if arguments.tiny else 1e-5,
            logging_steps=1,
            save_strategy="no" if arguments.tiny else "epoch",
            bf16=torch.cuda.is_available(),
            report_to="none",
        ),
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        roundpipe=RoundPipeOptions(compile_layers=not arguments.tiny),
    )
    trainer.train()
    trainer.save_model(arguments.output)  # the adapters only
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


# Run it
if __name__ == "__main__":
    main(sys.argv[1:])
