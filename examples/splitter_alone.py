"""The splitter alone: gradient accumulation over microbatches of any tree of tensors, with exact means.

python examples/splitter_alone.py --parts 16 --batch 512
python examples/splitter_alone.py --tiny

Needs rp-batch and torch. The gradients are those of the whole batch, also where it does not divide evenly.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import rp_batch
import torch
from torch import nn


class Model(nn.Module):
    """Takes a dict in a tuple, and returns a dict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, inputs: dict[str, torch.Tensor], *, scale: float) -> dict[str, torch.Tensor]:
        """`inputs`: x (batch, width) and a bias (1, width) for all rows."""
        y = scale * self.layers(inputs["x"]) + inputs["bias"]
        return {"y": y, "loss": (y - inputs["x"]).square().mean()}


def main(words: list[str]) -> list[float]:
    """Compare microbatches with the whole batch; the loss of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="a small model")
    arguments = parser.parse_args(words)
    if arguments.tiny:
        arguments = parser.parse_args(["--tiny", "--width=8", "--batch=10", "--parts=4"])
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    model = Model(arguments.width).to(device)
    x = torch.randn(arguments.batch, arguments.width, device=device)
    args: tuple[Any, ...] = ({"x": x, "bias": torch.zeros(1, arguments.width, device=device)},)
    kwargs = {"scale": 2.0}
    for path, why in rp_batch.infer(args, kwargs).reasons.items():
        print(f"{path}: {why.value}")

    parts = rp_batch.split((args, kwargs), arguments.parts)
    print("sizes of the parts:", parts.sizes)
    outputs = []
    for (part_args, part_kwargs), size in zip(parts, parts.sizes, strict=True):
        output = model(*part_args, **part_kwargs)
        (output["loss"] * size / arguments.batch).backward()
        outputs.append(rp_batch.map_leaves(torch.Tensor.detach, output))
    merged = rp_batch.merge(outputs, sizes=parts.sizes)
    accumulated = [parameter.grad for parameter in model.parameters()]

    model.zero_grad()
    whole = model(*args, **kwargs)
    whole["loss"].backward()
    torch.testing.assert_close(merged["y"], whole["y"].detach(), rtol=1e-3, atol=1e-3)
    for gradient, parameter in zip(accumulated, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-3)
    print(f"loss {merged['loss']:.5f}, of the whole batch {whole['loss']:.5f}; gradients agree")
    return [merged["loss"].item(), whole["loss"].item()]


if __name__ == "__main__":
    main(sys.argv[1:])
