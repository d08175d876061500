"""LoRA adapters with PEFT: the base weights are frozen and stay on the host as they are.

python examples/lora.py --model Qwen3-8B --data text.txt
python examples/lora.py --tiny
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import roundpipe
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM


# %% The adapters: made by PEFT, on a model that is not wrapped yet
def adapted(rank: int) -> Callable[[nn.Module], nn.Module]:
    """What puts adapters on all linear layers inside the layers."""
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return lambda base: get_peft_model(base, config)


# %% The model: a checkpoint, its adapters, and the devices
def load(arguments: argparse.Namespace) -> tuple[roundpipe.RoundPipe, Callable[[str], list[int]]]:
    """The model, and what makes token ids of text."""
    if not arguments.tiny:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        model = roundpipe.from_pretrained(
            arguments.model, dtype=torch.bfloat16, adapt=adapted(arguments.rank), compile_layers=True
        )
        return model.train(), tokenizer.encode
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    torch.manual_seed(0)
    base = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
    return roundpipe.wrap_model_to_roundpipe(adapted(4)(base)), lambda text: list(text.encode())


# %% The training
def main(words: list[str]) -> list[float]:
    """Train; the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-8B", help="the folder of a checkpoint")
    parser.add_argument("--data", type=Path, help="a text; default: one sentence, again and again")
    parser.add_argument("--output", default="adapters")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sequence", type=int, default=2048, help="tokens in each sequence")
    parser.add_argument("--tiny", action="store_true", help="a tiny model with random weights, for a few steps")
    arguments = parser.parse_args(words)
    model, encode = load(arguments)
    steps, size, length = (12, 8, 24) if arguments.tiny else (arguments.steps, arguments.batch, arguments.sequence)
    text = arguments.data.read_text() if arguments.data else "Weights stay on the host; layers stream. " * 999
    ids = torch.tensor(encode(text))
    optimizer = roundpipe.optim.AdamW(model.optim_parameters(), lr=2e-2 if arguments.tiny else 1e-4)
    trained = sum(master.numel() for master in model.optim_parameters())
    print(f"{trained:,} parameters train, of {sum(p.numel() for p in model.model.parameters()):,}")

    generator = torch.Generator().manual_seed(0)
    losses = []
    for number in range(steps):
        starts = torch.randint(len(ids) - length, (size, 1), generator=generator)
        rows = ids[starts + torch.arange(length)]
        losses.append(model.forward_backward(input_kwargs={"input_ids": rows, "labels": rows}).item())
        # Adapters have few parameters: waiting for their step costs next to nothing, and calls read its result.
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        print(f"step {number}: loss {losses[-1]:.3f}")
    model.save_pretrained(arguments.output)  # the adapters only
    return losses


# %% Run it
if __name__ == "__main__":
    main(sys.argv[1:])
