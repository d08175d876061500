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


def main() -> None:
    args = _arguments()
    torch.manual_seed(0)
    on_disk = _stepping(args, f"{args.state} disk:{args.directory}".removeprefix("fp32 "))
    in_memory = _stepping(args, args.state)
    # The first step makes the state, the second one is the first that reads it.
    for optimizer in (on_disk, in_memory):
        for _ in range(2):
            optimizer.step()
    moved = _moved_gb(on_disk)
    on_disk.step()
    moved = _moved_gb(on_disk) - moved
    rates, disk, host = [_rate(args)], [], []
    for window in range(args.rounds):
        host.append(_timed(in_memory.step))
        disk.append(_timed(on_disk.step))
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


def _stepping(args: argparse.Namespace, state: str) -> Any:
    """AdamW over parameters of their own, with gradients as a training leaves them."""
    each = int(args.parameters) // args.layers
    weights = [nn.Parameter(torch.zeros(each)) for _ in range(args.layers)]
    for weight in weights:
        weight.grad = torch.full((each,), 1e-3)
    return roundpipe.optim.AdamW(weights, lr=1e-5, state=state)


def _moved_gb(optimizer: Any) -> float:
    """What was read and written so far; blocks that stay in memory between steps are not read again."""
    blocks = optimizer._place.blocks
    return (blocks.bytes_read + blocks.bytes_written) / 1e9


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
    parser.add_argument("--state", choices=["fp32", "bf16", "8bit"], default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="each measured rate")
    return parser.parse_args()


if __name__ == "__main__":
    main()
