"""An encoder-decoder that is taken apart: its own forward runs on the host, its submodules on the devices.

python examples/encoder_decoder.py --layers 12 --width 1024
python examples/encoder_decoder.py --tiny

Use this for models that are no row of layers. (Most encoder-decoders of transformers are one, and train faster as
such: leave `use_sequential_preset=False` out.) The task: to write a sequence backwards.
"""

from __future__ import annotations

import argparse
import sys

import roundpipe
import torch
from torch import nn

VOCABULARY = 32


class Translator(nn.Module):
    """Attends from a decoder's layers to what the encoder's layers made: two rows, not one."""

    def __init__(self, width: int, layers: int, longest: int) -> None:
        super().__init__()
        options = {
            "nhead": 4,
            "dim_feedforward": 4 * width,
            "dropout": 0.0,
            "batch_first": True,
            "norm_first": True,
        }
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(longest, width)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(width, **options) for _ in range(layers))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(width, **options) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Tokens (batch, length) and the same shifted; logits (batch, length, vocabulary)."""
        places = self.positions.weight[: source.shape[1]]
        memory = self.embedding(source) + places
        for layer in self.encoder:
            memory = layer(memory)
        hidden = self.embedding(target) + places
        causal = torch.full((target.shape[1], target.shape[1]), float("-inf")).triu(1)
        for layer in self.decoder:
            hidden = layer(hidden, memory, tgt_mask=causal)
        return self.head(hidden)


def main(words: list[str]) -> list[float]:
    """Train; the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for a few steps")
    arguments = parser.parse_args(words)
    if arguments.tiny:
        arguments = parser.parse_args(
            ["--tiny", "--width=32", "--layers=2", "--length=6", "--batch=16", "--steps=12"]
        )

    torch.manual_seed(0)
    # Submodules of fewer bytes than `lower_threshold` stay on the host.
    model = roundpipe.wrap_model_to_roundpipe(
        Translator(arguments.width, arguments.layers, arguments.length),
        use_sequential_preset=False,
        lower_threshold=8 * 1024,
        model_run_config=roundpipe.RoundPipeRunConfig(num_microbatch=2),
    )
    optimizer = roundpipe.optim.AdamW(model.optim_parameters(), lr=1e-2 if arguments.tiny else 3e-4)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for number in range(arguments.steps):
        source = torch.randint(1, VOCABULARY, (arguments.batch, arguments.length), generator=generator)
        wanted = source.flip(1)
        shifted = nn.functional.pad(wanted[:, :-1], (1, 0))
        logits = model(source, shifted)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        loss.backward()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        losses.append(loss.item())
        print(f"step {number}: loss {losses[-1]:.3f}")
    model.synchronize()
    return losses


if __name__ == "__main__":
    main(sys.argv[1:])
