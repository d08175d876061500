"""How fast steps are whose state is on disk, beside the disk and beside state in memory; one JSON line a window.

    python benchmarks/disk.py /mnt/nvme --parameters 1.7e9
    python benchmarks/disk.py /tmp --parameters 1e6 --layers 4 --rounds 2 --seconds 0.05

In turns, `--rounds` times, since disks of virtual machines vary twofold within minutes:

    rate    `roundpipe.optim.disk_rates`: reading and writing at once, no step
    memory  a step with state in memory: the host's pass
    disk    the same step with state on disk; the last few blocks are written after it

The last line compares medians. `of_rate`: what the disk windows read and wrote in a second, as a share of the
rates measured just before and just after each. `of_bound`: their time over the larger of what the disk needs at
those rates and the host's pass; 1 is the floor. GB is 10^9 bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import roundpipe
import torch
from torch import nn

# What Adam's two moments take on disk, bytes a parameter.
STATE_BYTES = {"fp32": 8.0, "bf16": 4.0, "8bit": 2.125}


def main() -> None:
    args = _arguments()
    torch.manual_seed(0)
    on_disk = _stepping(args, f"{args.state} disk:{args.directory}".removeprefix("fp32 "))
    in_memory = _stepping(args, args.state)
    moved = 2 * STATE_BYTES[args.state] * args.parameters / 1e9
    # The first step makes the state, the second one is the first that reads it.
    for step in (on_disk, in_memory):
        for _ in range(2):
            step()
    rates, disk, host = [_rate(args)], [], []
    for window in range(args.rounds):
        host.append(_timed(in_memory))
        disk.append(_timed(on_disk))
        rates.append(_rate(args))
        _print(window=window, memory_s=host[-1], disk_s=disk[-1], disk_gb_s=moved / disk[-1], rate_gb_s=rates[-1])
    beside = [(before + after) / 2 for before, after in pairwise(rates)]
    of_rate = [moved / took / rate for took, rate in zip(disk, beside, strict=True)]
    of_bound = [took / max(moved / rate, pass_) for took, rate, pass_ in zip(disk, beside, host, strict=True)]
    _print(
        **vars(args),
        moved_gb=moved,
        memory_s=statistics.median(host),
        disk_s=statistics.median(disk),
        rate_gb_s=statistics.median(rates),
        of_rate=statistics.median(of_rate),
        of_bound=statistics.median(of_bound),
    )


def _stepping(args: argparse.Namespace, state: str) -> Callable[[], None]:
    """A step of AdamW over parameters of their own, gradients as a training leaves them."""
    each = int(args.parameters) // args.layers
    weights = [nn.Parameter(torch.zeros(each)) for _ in range(args.layers)]
    for weight in weights:
        weight.grad = torch.full((each,), 1e-3)
    optimizer = roundpipe.optim.AdamW(weights, lr=1e-5, state=state)
    return optimizer.step


def _rate(args: argparse.Namespace) -> float:
    return roundpipe.optim.disk_rates(args.directory.split(","), seconds=args.seconds).both_gb_s


def _timed(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def _print(**found: Any) -> None:
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="on the disk; several, separated by commas, are striped")
    parser.add_argument("--parameters", type=float, default=1.7e9)
    parser.add_argument("--layers", type=int, default=28, help="tensors they are divided into")
    parser.add_argument("--state", choices=sorted(STATE_BYTES), default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="each measured rate")
    return parser.parse_args()


if __name__ == "__main__":
    main()
