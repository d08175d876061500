"""A loss without backward beside a forward and a whole training call, on unchecked CPU devices.

    python benchmarks/loss.py [--devices cpu:2] [--layers 12] [--width 256] [--rounds 15] [--check]

One language model of linear layers with a large head, one batch, in one process, in turns, many times; the middle
time of one call of each kind, whose results are on the host at its end:

    loss                `model.loss(...)`: the logits stay on the device
    forward             `model(...)` under `torch.no_grad()`, whose logits come to the host; no loss is computed
    forward, loss       the same, and the loss of the logits on the host
    forward_backward    a training call, whose gradients are dropped

All but the last are in evaluation mode, where calls draw no random numbers. `--check` ends with exit code 1 where
`loss` takes more than 1.15 times the time of a forward and its loss, or 0.7 times that of a training call.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable

import torch
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, token_mean
from side_by_side import side_by_side
from torch import nn
from torch.nn import functional

AT_MOST = {"forward, loss": 1.15, "forward_backward": 0.7}


def language_model(layers: int, width: int, vocabulary: int) -> nn.Sequential:
    """Token ids to logits."""
    inner = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(vocabulary, width), *inner, nn.Linear(width, vocabulary))


def summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def ways(model: RoundPipe, ids: torch.Tensor, training: RoundPipe) -> dict[str, Callable[[], object]]:
    """The calls that are compared. `training`: the same model, in training mode."""
    loss_fn = token_mean(summed, shift=False)

    @torch.no_grad()
    def forward() -> torch.Tensor:
        return model(ids)

    @torch.no_grad()
    def forward_and_loss() -> torch.Tensor:
        return summed(model(ids), ids) / ids.numel()

    def forward_backward() -> None:
        training.forward_backward((ids,), label=ids, loss_fn=loss_fn)
        training.zero_grad()

    return {
        "loss": lambda: model.loss((ids,), label=ids, loss_fn=loss_fn),
        "forward": forward,
        "forward, loss": forward_and_loss,
        "forward_backward": forward_backward,
    }


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a call of each way."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = (options.layers, options.width, options.vocabulary)
    config = RoundPipeRunConfig(num_microbatch=options.microbatches)
    ids = torch.randint(options.vocabulary, (options.microbatches, options.positions))
    with Runtime(options.devices, strict=False) as runtime:
        models = [
            RoundPipe(language_model(*sizes), runtime=runtime, model_run_config=config).train(training)
            for training in (False, True)
        ]
        compared = ways(models[0], ids, models[1])
        side_by_side(compared, rounds=1, warmup=4)
        gc.freeze()
        seconds = side_by_side(compared, rounds=options.rounds, warmup=0)
    return {name: found * 1e3 for name, found in seconds.items()}


def report(ms: dict[str, float]) -> None:
    print(f"{'milliseconds a call':<20} {'median':>8} {'ratio of loss':>14}")
    for name, each in ms.items():
        mark = f"   at most {AT_MOST[name]}" if name in AT_MOST else ""
        print(f"{name:<20} {each:8.1f} {ms['loss'] / each:14.2f}{mark}")


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu:2")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--positions", type=int, default=64, help="tokens of a microbatch")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--check", action="store_true", help="end with an error where a bound is missed")
    options = parser.parse_args()
    print(f"{options.layers} layers of {options.width}, {options.vocabulary} words, {options.devices}")
    ms = measure(options)
    report(ms)
    return int(options.check and any(ms["loss"] > most * ms[name] for name, most in AT_MOST.items()))


if __name__ == "__main__":
    sys.exit(main())
