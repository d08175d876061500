"""Full fine-tuning of a Qwen3 on instructions: weights in 16 bits on the host, fp32 masters, asynchronous steps.

python examples/full_finetuning.py --model Qwen3-8B --data instructions.jsonl
python examples/full_finetuning.py --tiny
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import roundpipe
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, get_cosine_schedule_with_warmup

Sample = tuple[list[int], list[int]]


# %% The data: token ids and labels; labels of -100, which those of prompts are, do not count
def samples(path: Path | None, encode: Callable[[str], list[int]]) -> list[Sample]:
    """What the file has; without one, sums."""
    if path is None:
        pairs = [(f"{a}+{b}=?", str(a + b)) for a in range(4) for b in range(4)]
    else:
        pairs = [(line["prompt"], line["response"]) for line in map(json.loads, path.open())]
    asked = [encode(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n") for prompt, _ in pairs]
    answers = [encode(f"{response}<|im_end|>\n") for _, response in pairs]
    return [(a + b, [-100] * len(a) + b) for a, b in zip(asked, answers, strict=True)]


def batches(data: list[Sample], size: int, steps: int, longest: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of random samples, padded on the right."""
    draw = random.Random(0)
    for _ in range(steps):
        chosen = draw.choices(data, k=size)
        length = min(max(len(ids) for ids, _ in chosen), longest)

        def padded(rows: list[list[int]], fill: int, length: int = length) -> torch.Tensor:
            return torch.tensor([row[:length] + [fill] * (length - len(row)) for row in rows])

        ids, labels = zip(*chosen, strict=True)
        mask = padded([[1] * len(row) for row in ids], 0)
        yield {"input_ids": padded(list(ids), 0), "attention_mask": mask, "labels": padded(list(labels), -100)}


# %% The model: loaded from a folder into host memory, and wrapped
def load(arguments: argparse.Namespace) -> tuple[roundpipe.RoundPipe, Callable[[str], list[int]]]:
    """The model, and what makes token ids of text."""
    config = roundpipe.RoundPipeRunConfig(num_microbatch=arguments.num_microbatch)
    if not arguments.tiny:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        dtypes = {"dtype": torch.bfloat16, "optim_dtype": torch.float32}
        model = roundpipe.from_pretrained(arguments.model, model_run_config=config, compile_layers=True, **dtypes)
        return model.train(), lambda text: tokenizer.encode(text, add_special_tokens=False)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
    return roundpipe.wrap_model_to_roundpipe(model, model_run_config=config), lambda text: list(text.encode())


# %% The training
def main(words: list[str]) -> list[float]:
    """Train; the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-8B", help="the folder of a checkpoint")
    parser.add_argument("--data", type=Path, help='lines of {"prompt": ..., "response": ...}')
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--num-microbatch", type=int)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--tiny", action="store_true", help="a tiny model with random weights, for a few steps")
    arguments = parser.parse_args(words)
    model, encode = load(arguments)
    steps, rate = (12, 1e-2) if arguments.tiny else (arguments.steps, 1e-5)
    optimizer = roundpipe.optim.AdamW(model.optim_parameters(), lr=rate)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=steps // 10, num_training_steps=steps)

    def step() -> None:
        roundpipe.optim.clip_grad_norm_(model.optim_parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    losses = []
    for number, batch in enumerate(batches(samples(arguments.data, encode), arguments.batch, steps, 2048)):
        losses.append(model.forward_backward(input_kwargs=batch).item())
        model.step(step)
        print(f"step {number}: loss {losses[-1]:.3f}")
    model.save_pretrained("fine-tuned")
    return losses


# %% Run it
if __name__ == "__main__":
    main(sys.argv[1:])
