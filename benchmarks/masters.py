"""How long steps of AdamW take with masters in halves and with whole ones: optimizer steps alone, and of a model.

Pairs of steps that take turns, on gradients in bf16; prints the median of each, and of the ratio within pairs.
Large tensors, where memory bounds a step, and many small ones, where Python does.
``--model`` adds calls and steps of a model on the devices of ``ROUNDPIPE_DEVICES``:

    python benchmarks/masters.py --pairs 25
    ROUNDPIPE_DEVICES=cuda:0 python benchmarks/masters.py --model
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from roundpipe import RoundPipe, RoundPipeRunConfig
from rp_optim import AdamW, Master, SplitMaster, link, unlink
from torch import nn

Step = Callable[[], None]
BF16 = torch.bfloat16


def optimizer_step(shape: tuple[int, ...], count: int, *, kind: str, second_block: bool) -> Step:
    """A step over `count` tensors of `shape`, linked as the engine links them."""
    weights = [torch.ones(shape, dtype=BF16) for _ in range(count)]
    targets = [torch.ones(shape, dtype=BF16) for _ in range(count)] if second_block else weights
    gradients = [torch.full(shape, 1e-3, dtype=BF16) for _ in range(count)]
    masters = [SplitMaster(one) if kind == "split" else Master(one.float()) for one in weights]
    optimizer = AdamW(masters, lr=1e-5, state="fp32")

    def step() -> None:
        for master, gradient, target in zip(masters, gradients, targets, strict=True):
            link(master, lambda gradient=gradient: gradient, lambda target=target: target)
        optimizer.step()
        for master in masters:
            unlink(master)

    return step


def model_step(kind: str, *, width: int, layers: int, is_async: bool) -> Step:
    """A call of a small batch and a step: bound by the optimizer."""
    row = nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=BF16) for _ in range(layers)))
    config = RoundPipeRunConfig(num_microbatch=1)
    model = RoundPipe(row, torch.float32, kind, config, master=kind)  # type: ignore[arg-type]
    optimizer = AdamW(model.optim_parameters(), lr=1e-5)
    x = torch.ones(8, width, dtype=BF16)

    def step() -> None:
        model.forward_backward((x,), loss_fn=lambda outputs, _: outputs.float().mean())
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)

    return step


def timed(step: Step) -> float:
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


def compare(name: str, whole: Step, split: Step, pairs: int) -> None:
    for step in (whole, split, whole, split):
        step()
    found: list[tuple[float, float]] = []
    for pair in range(pairs):
        # The first of a pair is now one, now the other.
        first, second = (timed(step) for step in ((whole, split) if pair % 2 else (split, whole)))
        found.append((first, second) if pair % 2 else (second, first))
    medians = [1e3 * statistics.median(times) for times in zip(*found, strict=True)]
    ratio = statistics.median(split / whole for whole, split in found)
    print(f"{name:<42} whole {medians[0]:9.2f} ms   split {medians[1]:9.2f} ms   split / whole {ratio:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--numel", type=int, default=1 << 26, help="parameters of the large tensors")
    parser.add_argument("--model", action="store_true")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=16)
    given = parser.parse_args()
    side = 1 << 12
    cases = {"large tensors": ((given.numel // side, side), 1), "1,000 tensors of 64 x 64": ((64, 64), 1000)}
    for name, (shape, count) in cases.items():
        for second in (False, True):
            steps = [optimizer_step(shape, count, kind=kind, second_block=second) for kind in ("whole", "split")]
            where = "another weight" if second else "the same weight"
            compare(f"{name}, into {where}", *steps, given.pairs)
    for is_async in (False, True) if given.model else ():
        sizes = {"width": given.width, "layers": given.layers}
        made = [model_step(kind, is_async=is_async, **sizes) for kind in ("whole", "split")]
        compare(f"a model, {'asynchronous' if is_async else 'synchronous'} steps", *made, given.pairs)


if __name__ == "__main__":
    main()
