"""Steps whose moments are on disk, by this library's optimizer or by DeepSpeed's: one JSON line a step.

    python benchmarks/beside_deepspeed.py ours /mnt/nvme --parameters 4e8
    python benchmarks/beside_deepspeed.py deepspeed /mnt/nvme --parameters 4e8

AdamW in fp32 for the same bf16 linear layers, on the CPU, so that a machine without a GPU compares the paths to
the disk. DeepSpeed's ZeRO stage 3 has masters, moments and, from backward to the step, gradients on disk; here
masters are in memory, and moments on disk. `deepspeed` runs where that is installed, with a compiler and libaio's
headers.

The last line has medians without the first two steps. `call_s`: forward and backward; `step_s`: the optimizer's
step; `moved_gb`: what the system has read and written for it, and `gb_s` that a second; `rate_gb_s`, of `ours`:
what the disk reads and writes at once, just after.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

_WARM_UP = 2
Body = Callable[[], Any]


def main() -> None:
    args = _arguments()
    torch.manual_seed(0)
    side = int((args.parameters / args.layers) ** 0.5) // 64 * 64
    layers = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(args.layers)))
    x = torch.randn(1, side, dtype=torch.bfloat16)
    call, step = {"ours": _ours, "deepspeed": _deepspeed}[args.what](args, layers, x)
    found = list[dict[str, float]]()
    for _ in range(args.steps):
        call_s, before = _timed(call), _moved_gb()
        step_s = _timed(step)
        moved_gb = _moved_gb() - before
        found.append({"call_s": call_s, "step_s": step_s, "moved_gb": moved_gb, "gb_s": moved_gb / step_s})
        _print(**found[-1])
    medians = {name: statistics.median(each[name] for each in found[_WARM_UP:]) for name in found[0]}
    rate = {"rate_gb_s": _rate(args)} if args.what == "ours" else {}
    _print(what=args.what, parameters=side * side * args.layers, **medians, **rate)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ours", "deepspeed"])
    parser.add_argument("directory", help="on the disk that is measured")
    parser.add_argument("--parameters", type=float, default=4e8)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    return parser.parse_args()


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def _ours(args: argparse.Namespace, layers: nn.Sequential, x: torch.Tensor) -> tuple[Body, Body]:
    import roundpipe

    masters = [nn.Parameter(one.detach().clone()) for one in layers.parameters()]
    layers.to(torch.bfloat16)
    optimizer = roundpipe.optim.AdamW(masters, lr=1e-3, state=f"disk:{args.directory}")

    def call() -> None:
        layers.zero_grad()
        _loss(layers(x)).backward()
        for master, weight in zip(masters, layers.parameters(), strict=True):
            master.grad = weight.grad.float()

    return call, optimizer.step


def _rate(args: argparse.Namespace) -> float:
    import roundpipe

    return roundpipe.optim.disk_rates([args.directory], seconds=2.0).both_gb_s


def _deepspeed(args: argparse.Namespace, layers: nn.Sequential, x: torch.Tensor) -> tuple[Body, Body]:
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT="29533", **alone)
    deepspeed: Any = importlib.import_module("deepspeed")
    numel = sum(one.numel() for one in layers.parameters())
    disk = {"device": "nvme", "nvme_path": args.directory, "buffer_count": 30}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {**disk, "pin_memory": False, "pipeline_read": True, "pipeline_write": True},
            "sub_group_size": numel // 8,
        },
        "aio": {"block_size": 8 << 20, "queue_depth": 16, "single_submit": False, "overlap_events": True},
    }
    engine, *_ = deepspeed.initialize(model=layers, model_parameters=layers.parameters(), config=config)
    return lambda: engine.backward(_loss(engine(x))), engine.step


def _timed(body: Body) -> float:
    begun = time.perf_counter()
    body()
    return time.perf_counter() - begun


def _moved_gb() -> float:
    """What the process has read from disks and written to them."""
    counted = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return (int(counted["read_bytes"]) + int(counted["write_bytes"])) / 1e9


def _print(**values: Any) -> None:
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}
    print(json.dumps(rounded), flush=True)


if __name__ == "__main__":
    main()
