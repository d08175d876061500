"""A ResNet as a plain `nn.Sequential`, on images that are generated: stripes, which lie or stand.

python examples/resnet.py --width 256 --blocks 24 --size 224
python examples/resnet.py --tiny
"""

from __future__ import annotations

import argparse
import sys

import roundpipe
import torch
from torch import nn


class Block(nn.Module):
    """Two convolutions and what goes around them. GroupNorm: batch norms would see microbatches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.GroupNorm(4, width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.GroupNorm(4, width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, width, rows, columns)."""
        return x + self.inner(x)


def resnet(width: int, blocks: int, classes: int) -> nn.Sequential:
    """A row of layers, each of which may run on another device."""
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *(Block(width) for _ in range(blocks)), head)


def images(count: int, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy stripes, and whether they stand."""
    labels = torch.randint(2, (count,), generator=generator)
    lying = torch.sin(torch.arange(size) * 1.5)[:, None].expand(size, size)
    pictures = torch.stack([lying.T if label else lying for label in labels])
    noise = torch.randn(count, 3, size, size, generator=generator)
    return pictures[:, None] + 0.3 * noise, labels


def main(words: list[str]) -> list[float]:
    """Train; the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--size", type=int, default=64, help="rows and columns of an image")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tiny", action="store_true", help="small images, for a few steps")
    arguments = parser.parse_args(words)
    if arguments.tiny:
        arguments = parser.parse_args(
            ["--tiny", "--width=8", "--blocks=2", "--size=8", "--batch=16", "--steps=10"]
        )

    torch.manual_seed(0)
    config = roundpipe.RoundPipeRunConfig(num_microbatch=4)
    model = roundpipe.RoundPipe(resnet(arguments.width, arguments.blocks, 2), model_run_config=config)
    optimizer = torch.optim.AdamW(model.optim_parameters(), lr=1e-2 if arguments.tiny else 1e-3)

    def summed(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, labels, reduction="sum")

    loss_fn = roundpipe.token_mean(summed, count=torch.numel)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for number in range(arguments.steps):
        x, y = images(arguments.batch, arguments.size, generator)
        losses.append(model.forward_backward(input_args=(x,), label=y, loss_fn=loss_fn).item())
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        print(f"step {number}: loss {losses[-1]:.3f}")

    model.synchronize()
    model.eval()
    with torch.no_grad():
        x, y = images(arguments.batch, arguments.size, generator)
        print(f"right: {(model(x).argmax(1) == y).float().mean():.0%}")
    return losses


if __name__ == "__main__":
    main(sys.argv[1:])
