"""The host optimizer alone: any model on a GPU, its masters and Adam's state on the host.

python examples/optimizer_alone.py --width 8192 --layers 8
python examples/optimizer_alone.py --tiny

Needs rp-optim and torch. The GPU keeps 16-bit weights; gradients go to the host, where a step is one pass.
"""

from __future__ import annotations

import argparse
import sys

import torch
from rp_optim import AdamW, Master, clip_grad_norm_, kernel_in_use, link, unlink
from torch import nn


def main(words: list[str]) -> list[float]:
    """Train; the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="small layers, for a few steps")
    arguments = parser.parse_args(words)
    if arguments.tiny:
        arguments = parser.parse_args(["--tiny", "--width=16", "--layers=2", "--batch=32", "--steps=8"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pinned = device == "cuda"

    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(arguments.width, arguments.width), nn.Tanh()) for _ in range(arguments.layers)
    ]
    model = nn.Sequential(*layers).to(device, torch.bfloat16)
    weights = [parameter.detach().to("cpu") for parameter in model.parameters()]
    weights = [weight.pin_memory() if pinned else weight.clone() for weight in weights]
    gradients = [torch.zeros_like(weight, pin_memory=pinned) for weight in weights]
    masters = [Master(weight.float()) for weight in weights]
    optimizer = AdamW(masters, lr=1e-2 if arguments.tiny else 1e-4)
    print("kernel:", kernel_in_use())

    x = torch.randn(arguments.batch, arguments.width, device=device, dtype=torch.bfloat16)
    losses = []
    for number in range(arguments.steps):
        loss = (model(x) - x.sin()).float().square().mean()
        loss.backward()
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            gradient.copy_(parameter.grad)
            parameter.grad = None
        # A linked master reads its 16-bit gradient in place and writes its 16-bit weight in the same pass.
        for master, gradient, weight in zip(masters, gradients, weights, strict=True):
            link(master, gradients=lambda gradient=gradient: gradient, weights=lambda weight=weight: weight)
        clip_grad_norm_(masters, 1.0)
        optimizer.step()
        for master in masters:
            unlink(master)
        with torch.no_grad():
            for parameter, weight in zip(model.parameters(), weights, strict=True):
                parameter.copy_(weight)
        losses.append(loss.item())
        print(f"step {number}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main(sys.argv[1:])
