"""What the engine itself costs: training calls whose layers do next to nothing, on unchecked CPU devices.

    python benchmarks/engine.py [--layers 32] [--microbatches 10] [--rounds 25] [--cores 1] [--check]

A layer adds one number that it trains: so weights go up, gradients come home and autograd is at work, but there is
nothing to compute. In one process, in turns, many times; the middle time of each, for one call of four in a row:

    plain       the same layers in a plain loop: forward, again for the recomputation, and backward
    each plan   a whole `forward_backward`, on one device and on eight; its last gradients are at home at the end

The plain loop's second column is the same work, its microbatches divided among eight threads. Python runs one
thread at a time, so by default the process keeps to one core. `--cores 0` leaves it all it has: there torch gives
Python's lock away around every operation, and threads on other cores wake up for it in vain, which the plain loop
shows without an engine. `--check` ends with exit code 1 where the marked plan is over its bounds.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from rp_sched import Plan
from side_by_side import side_by_side
from torch import nn

CALL_MS, EIGHT_TO_ONE = 60, 1.3
CALLS = 4
# Seven tasks: on eight devices each has one of its own.
CHECKED = "4 stages"


class AddOne(nn.Module):
    """Next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


def row(layers: int) -> nn.Sequential:
    return nn.Sequential(*(AddOne() for _ in range(layers)))


def in_stages(layers: int, count: int) -> Plan:
    """So many stages up, the last one fused, and the same back."""
    stages = [range(stage * layers // count, (stage + 1) * layers // count) for stage in range(count)]
    return Plan(stages[:-1], stages[-1], stages[-2::-1])


def plans(layers: int, microbatches: int) -> dict[str, Plan]:
    pairs = tuple(range(m, min(m + 2, microbatches)) for m in range(0, microbatches, 2))
    return {
        "all fused": Plan(fused=range(layers)),
        "all fused, in pairs": Plan(fused=range(layers), groups=pairs),
        **{f"{count} stages": in_stages(layers, count) for count in (4, 8, layers)},
    }


def plain(model: nn.Sequential, microbatches: int) -> None:
    x = torch.zeros(1, 4)
    for _ in range(CALLS * microbatches):
        with torch.no_grad():
            model(x)
        model(x).sum().backward()


def training_calls(runtime: Runtime, plan: Plan, layers: int, microbatches: int) -> Callable[[], object]:
    config = RoundPipeRunConfig(num_microbatch=microbatches, execute_plan=plan)
    model = RoundPipe(row(layers), runtime=runtime, model_run_config=config)
    x = torch.zeros(microbatches, 4)

    def calls() -> None:
        for _ in range(CALLS):
            model.forward_backward(input_args=(x,), loss_fn=lambda outputs, _: outputs.sum())
        model.synchronize()

    return calls


def measure(layers: int, microbatches: int, rounds: int) -> dict[str, float]:
    """Milliseconds of each way."""
    torch.set_num_threads(1)
    each = [1] * microbatches
    with (
        Runtime("cpu:1", strict=False) as one,
        Runtime("cpu:8", strict=False) as eight,
        ThreadPoolExecutor(8, initializer=torch.set_num_threads, initargs=(1,)) as threads,
    ):
        rows = [row(layers) for _ in each]
        ways: dict[str, Callable[[], object]] = {
            "plain 1": partial(plain, rows[0], microbatches),
            "plain 8": lambda: list(threads.map(plain, rows, each)),
        }
        for name, plan in plans(layers, microbatches).items():
            ways[f"{name} 1"] = training_calls(one, plan, layers, microbatches)
            ways[f"{name} 8"] = training_calls(eight, plan, layers, microbatches)
        side_by_side(ways, rounds=1, warmup=3)
        # Now and then Python looks through all there is, which is mostly what was imported: no part of any call.
        gc.freeze()
        seconds = side_by_side(ways, rounds=rounds, warmup=0)
    return {name: found * 1e3 / CALLS for name, found in seconds.items()}


def report(ms: dict[str, float], names: list[str]) -> None:
    print(f"{'milliseconds a call':<24} {'one':>8} {'eight':>8} {'ratio':>6}")
    for name in ["plain", *names]:
        one, eight = ms[f"{name} 1"], ms[f"{name} 8"]
        mark = f"   at most {CALL_MS} and {EIGHT_TO_ONE}" if name == CHECKED else ""
        print(f"{name:<24} {one:8.1f} {eight:8.1f} {eight / one:6.2f}{mark}")


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--cores", type=int, default=1, help="how many cores to keep to; 0: all there are")
    parser.add_argument("--check", action="store_true", help="end with an error where a bound is missed")
    options = parser.parse_args()
    if options.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"{options.layers} layers, {options.microbatches} microbatches, {cores} of {os.cpu_count()} cores")
    ms = measure(options.layers, options.microbatches, options.rounds)
    report(ms, list(plans(options.layers, options.microbatches)))
    one, eight = ms[f"{CHECKED} 1"], ms[f"{CHECKED} 8"]
    return int(options.check and (one > CALL_MS or eight > EIGHT_TO_ONE * one))


if __name__ == "__main__":
    sys.exit(main())
