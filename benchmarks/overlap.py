"""What a step takes over a slow link: computing alone, the network alone, and both, side by side in one run.

    python benchmarks/overlap.py [--machines 2] [--shares 0.5 1 2] [--rounds 3] [--check] [--trace FOLDER]

Starts `--machines` processes on this machine, whose connections the kernel holds to a rate (Linux alone). The rate
is chosen so that the network alone takes `--shares` times as long as computing. Layers wait where a GPU computes,
so that the processes do not take each other's cores: what is measured is whether traffic waits for computing.

- compute: the training of one machine's microbatches, by a runtime of its own.
- network: the same blocks reduced and, as each of them is, gathered, and nothing else.
- asynchronous, synchronous: the training of all microbatches, with second blocks.

Times are of a step, medians over the rounds, which take turns. `--check` ends with exit code 1 where asynchronous
steps take more than the longer of computing and the network, and 10 %. `--trace` writes a profile of each rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from local_machines import results_of
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, profile
from roundpipe.optim import AdamW
from rp_dist import Machines
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from links import limit

FULL_GB_S = 1000.0


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024, help="a layer has so many weights squared, in bf16")
    parser.add_argument("--layer-ms", type=float, default=20, help="of forward; backward takes twice as long")
    parser.add_argument("--microbatches", type=int, default=2, help="of each machine")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--steps", type=int, default=4, help="of one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--trace", type=Path)
    return parser.parse_args()


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


class Slow(nn.Linear):
    """A linear layer that takes its time, without a core."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__(width, width, bias=False)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the layer, later."""
        return _Wait.apply(super().forward(x), self.seconds)


def square_error(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss whose sum over microbatches is that of the batch."""
    return (outputs - labels).square().sum()


class Training:
    """A model and its steps."""

    def __init__(self, runtime: Runtime, options: argparse.Namespace, count: int, *, is_async: bool) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(*(Slow(options.width, options.layer_ms / 1e3) for _ in range(options.layers)))
        self.model = RoundPipe(
            layers.bfloat16(),
            runtime=runtime,
            optim_dtype=torch.float32,
            double_buffer=True,
            model_run_config=RoundPipeRunConfig(num_microbatch=count),
        )
        self.optimizer = AdamW(self.model.optim_parameters(), lr=1e-5)
        self.x = torch.ones(count, options.width, dtype=torch.bfloat16)
        self.is_async = is_async

    def step(self) -> None:
        """One call, and its step."""
        self.model.forward_backward((self.x,), label=self.x, loss_fn=square_error)
        self.model.step(lambda: (self.optimizer.step(), self.optimizer.zero_grad()), is_async=self.is_async)

    def timed(self, steps: int) -> float:
        """Seconds of a step, once steps follow each other."""
        for _ in range(2):
            self.step()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        seconds = time.perf_counter() - begin
        self.model.synchronize()
        return seconds / steps


class Traffic:
    """What a step sends, alone: of each layer the owners take turns."""

    def __init__(self, machines: Machines, options: argparse.Namespace) -> None:
        self.machines = machines
        self.blocks = [torch.zeros(options.width**2, dtype=torch.bfloat16) for _ in range(options.layers)]
        self.sum = torch.zeros(options.width**2)
        self.tag = 1 << 20

    @property
    def nbytes(self) -> int:
        """What each machine sends."""
        return 2 * sum(block.nbytes for block in self.blocks) * (self.machines.size - 1) // self.machines.size

    def timed(self, steps: int) -> float:
        """Seconds of a step's traffic."""
        begin = time.perf_counter()
        for _ in range(steps):
            self._step()
        return (time.perf_counter() - begin) / steps

    def _step(self) -> None:
        rank, size = self.machines.rank, self.machines.size
        owned = [(block, number % size, self.tag + number) for number, block in enumerate(self.blocks)]
        self.tag += len(owned)
        out = {owner: self.sum if owner == rank else None for owner in range(size)}
        sums = [self.machines.reduce(block, owner, tag=tag, out=out[owner]) for block, owner, tag in owned]
        copies = [self.machines.gather(block, owner, tag=tag) for block, owner, tag in owned if owner != rank]
        for work, (block, owner, tag) in zip(sums, owned, strict=True):
            work.wait()
            if owner == rank:
                copies.append(self.machines.gather(block, owner, tag=tag))
        for work in copies:
            work.wait()


def run(rank: int, options: argparse.Namespace, say: Callable[[str], None]) -> bool:
    """Measure on all ranks; whether asynchronous steps take no longer than they may."""
    size = options.machines
    with (
        Machines.open(connections=1) as machines,
        Runtime("cpu:1", machines=machines) as together,
        Runtime("cpu:1", machines=False) as alone,
    ):
        computing = Training(alone, options, options.microbatches, is_async=True)
        count = options.microbatches * size
        steps = {is_async: Training(together, options, count, is_async=is_async) for is_async in (True, False)}
        traffic = Traffic(machines, options)

        def slowest(way: Callable[[int], float], steps: int) -> float:
            machines.exchange(None, channel=9)
            return max(machines.exchange(way(steps), channel=9))

        compute_s = slowest(computing.timed, options.steps)
        say(
            f"{size} machines, {options.layers} layers of {options.width} x {options.width} in bf16, "
            f"{options.microbatches} microbatches each, torch {torch.__version__}, {os.cpu_count()} cores"
        )
        say(f"each sends {traffic.nbytes / 1e6:.0f} MB a step\n")
        say("ms a step      MB/s  compute  network  asynchronous / longer  synchronous / longer  sum of both")
        is_met = True
        for share in options.shares:
            rate = traffic.nbytes / (share * compute_s) / 1e9
            found: dict[str, list[float]] = defaultdict(list)
            for _ in range(options.rounds):
                limit(FULL_GB_S)
                found["compute"].append(slowest(computing.timed, options.steps))
                limit(rate, among=size - 1)
                found["network"].append(slowest(traffic.timed, 1))
                found["asynchronous"].append(slowest(steps[True].timed, options.steps))
                found["synchronous"].append(slowest(steps[False].timed, options.steps))
            ms = {name: 1e3 * statistics.median(values) for name, values in found.items()}
            longer = max(ms["compute"], ms["network"])
            say(
                f"network x{share:<5g}{1e3 * rate:8.1f} {ms['compute']:8.0f} {ms['network']:8.0f} "
                f"{ms['asynchronous']:13.0f}   {ms['asynchronous'] / longer:4.2f} "
                f"{ms['synchronous']:13.0f}   {ms['synchronous'] / longer:4.2f} "
                f"{ms['compute'] + ms['network']:12.0f}"
            )
            is_met &= ms["asynchronous"] <= 1.1 * longer
        if options.trace is not None:
            options.trace.mkdir(parents=True, exist_ok=True)
            for is_async, training in steps.items():
                machines.exchange(None, channel=9)
                name = "asynchronous" if is_async else "synchronous"
                with profile(options.trace / f"{name}-{rank}.json"):
                    training.timed(2)
        limit(FULL_GB_S)
        return is_met


def _run_here(options: argparse.Namespace, rank: int) -> bool:
    return run(rank, options, print if rank == 0 else lambda _: None)


def main() -> None:
    """Start the processes."""
    options = arguments()
    sys.exit(options.check and not all(results_of(options.machines, partial(_run_here, options))))


if __name__ == "__main__":
    main()
