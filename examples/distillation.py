"""Distillation: a large teacher and a small student, both wrapped, take turns on the same devices.

python examples/distillation.py --teacher Qwen3-8B --student Qwen3-0.6B
python examples/distillation.py --tiny

The teacher's logits stay in microbatches on the host and go to the student without a wait in between.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import roundpipe
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

CONFIG = roundpipe.RoundPipeRunConfig(num_microbatch=4)


def tiny(layers: int) -> roundpipe.RoundPipe:
    """A Qwen3 with random weights."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "head_dim": 8,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
    return roundpipe.wrap_model_to_roundpipe(model, model_run_config=CONFIG)


def load(folder: str, **options: Any) -> roundpipe.RoundPipe:
    """A checkpoint in 16 bits."""
    return roundpipe.from_pretrained(folder, dtype=torch.bfloat16, model_run_config=CONFIG, **options)


def divergence(student: Any, teacher: Any) -> torch.Tensor:
    """Sum over positions of the divergence of the student's distribution from the teacher's, in one microbatch."""
    ours = student.logits.float().log_softmax(-1)
    theirs = teacher.logits.float().log_softmax(-1)
    return nn.functional.kl_div(ours, theirs, reduction="sum", log_target=True)


def main(words: list[str]) -> list[float]:
    """Train the student; the divergences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", default="Qwen3-8B", help="the folder of a checkpoint")
    parser.add_argument("--student", default="Qwen3-0.6B", help="one with the same vocabulary")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tiny", action="store_true", help="tiny models with random weights, for a few steps")
    arguments = parser.parse_args(words)
    torch.manual_seed(0)
    if arguments.tiny:
        arguments = parser.parse_args(["--tiny", "--batch=8", "--sequence=8", "--steps=8"])
        teacher, student, vocabulary = tiny(3), tiny(1), 64
    else:
        teacher, student = load(arguments.teacher), load(arguments.student, optim_dtype=torch.float32)
        vocabulary = student.model.get_input_embeddings().num_embeddings
    teacher.eval()
    student.train()
    optimizer = roundpipe.optim.AdamW(student.optim_parameters(), lr=1e-2 if arguments.tiny else 1e-5)
    in_parts = roundpipe.RoundPipeRunConfig(merge_output=False)
    positions = arguments.batch * arguments.sequence

    generator = torch.Generator().manual_seed(0)
    losses = []
    for number in range(arguments.steps):
        # Text would be better than random tokens; the teacher answers either.
        ids = torch.randint(vocabulary, (arguments.batch, arguments.sequence), generator=generator)
        with torch.no_grad():
            answers = teacher(input_ids=ids, roundpipe_run_config=in_parts)
        loss = student.forward_backward(
            input_kwargs={"input_ids": ids},
            label=answers,
            loss_fn=lambda outputs, answer: divergence(outputs, answer) / positions,
        )
        student.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        losses.append(loss.item())
        print(f"step {number}: divergence {losses[-1]:.4f}")
    student.synchronize()
    return losses


if __name__ == "__main__":
    main(sys.argv[1:])
