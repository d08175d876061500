"""Blocks and values between machines, in one run: numbers of connections, sums at owners beside gloo's, codes.

    torchrun --nproc-per-node 2 benchmarks/network.py [--mib 64] [--rounds 7] [--connections 1 2 4] [--check]

Without torchrun it starts `--machines` processes on this machine. Rates are medians in GB/s (1e9 bytes) of what
each machine sends, while it receives as much; rounds take turns. Values are exchanged over links, whose messages
carry codes; what these take is measured beside it. `--check` ends with exit code 1 where gloo's `all_reduce` is
faster than reduce and gather over the best number of connections.
"""

from __future__ import annotations

import argparse
import hmac
import os
import statistics
import sys
import time
from functools import partial

import torch
import torch.distributed as dist
from local_machines import results_of
from rp_dist import Machines
from side_by_side import side_by_side

DTYPES = (torch.bfloat16, torch.float32)


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=2, help="processes to start where torchrun has not")
    parser.add_argument("--mib", type=int, default=64, help="size of the blocks in all, in MiB of bf16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--check", action="store_true")
    return parser.parse_args()


class Bench:
    """One block of each owner, and the ways to add and copy them."""

    def __init__(self, mib: int, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.numel = (mib << 20) // 2 // size
        self.blocks = {dtype: [torch.ones(self.numel, dtype=dtype) for _ in range(size)] for dtype in DTYPES}
        self.total = torch.empty(self.numel)
        self.whole = torch.ones(self.numel * size)
        self.tag = 0

    def reduce(self, machines: Machines, dtype: torch.dtype) -> None:
        """Each machine gets the sum of its block."""
        works = [
            machines.reduce(block, owner, tag=self.tag + owner, out=self.total if owner == self.rank else None)
            for owner, block in enumerate(self.blocks[dtype])
        ]
        self._wait(works)

    def gather(self, machines: Machines, dtype: torch.dtype) -> None:
        """Each machine gets all blocks."""
        blocks = enumerate(self.blocks[dtype])
        self._wait([machines.gather(block, owner, tag=self.tag + owner) for owner, block in blocks])

    def _wait(self, works: list) -> None:
        for work in works:
            work.wait()
        self.tag += self.size

    def both(self, machines: Machines) -> None:
        """What an all-reduce does: the sums, on all machines."""
        self.reduce(machines, torch.float32)
        self.gather(machines, torch.float32)


def run(options: argparse.Namespace) -> bool:
    """Measure and, on rank 0, print; whether the bounds are met."""
    dist.init_process_group("gloo")
    every = {count: Machines.open(connections=count) for count in options.connections}
    first = every[options.connections[0]]
    bench = Bench(options.mib, first.rank, first.size)
    ways = {}
    for count, machines in every.items():
        ways[f"reduce bf16 into fp32 sums, connections {count}"] = partial(bench.reduce, machines, torch.bfloat16)
        ways[f"gather bf16, connections {count}"] = partial(bench.gather, machines, torch.bfloat16)
        ways[f"reduce and gather fp32, connections {count}"] = partial(bench.both, machines)
    ways["gloo's all_reduce fp32"] = lambda: dist.all_reduce(bench.whole)
    ways = {name: partial(_together, first, way) for name, way in ways.items()}
    medians = side_by_side(ways, rounds=options.rounds)
    slowest = {name: max(first.exchange(seconds)) for name, seconds in medians.items()}
    share = (first.size - 1) / first.size * bench.numel * first.size
    sent = {"reduce bf16": 2 * share, "gather": 2 * share, "reduce and": 8 * share, "gloo": 8 * share}
    if first.rank == 0:
        print(
            f"{first.size} machines, {options.mib} MiB of bf16, torch {torch.__version__}, {os.cpu_count()} cores"
        )
        for count, machines in every.items():
            print(f"link measured when opened, connections {count}: {machines.network_gb_s:.2f} GB/s")
        for name, seconds in slowest.items():
            (nbytes,) = (nbytes for key, nbytes in sent.items() if name.startswith(key))
            print(f"{name:46s} {1e3 * seconds:8.1f} ms  {nbytes / seconds / 1e9:6.2f} GB/s")
    _report_values(first)
    ours = min(seconds for name, seconds in slowest.items() if name.startswith("reduce and"))
    for machines in every.values():
        machines.close()
    dist.destroy_process_group()
    return ours <= slowest["gloo's all_reduce fp32"]


def _report_values(machines: Machines) -> None:
    """Print how long values of some sizes take, and the two codes of each of their messages."""
    for nbytes, count in ((10, 2000), (1_000_000, 20)):
        value, body, took_s = "x" * nbytes, bytes(min(nbytes, 1 << 16)), []
        for _ in range(count):
            begin_s = time.perf_counter()
            machines.exchange(value)
            took_s.append(time.perf_counter() - begin_s)
        begin_s = time.perf_counter()
        for _ in range(count):
            for _ in range(2 * -(-nbytes // len(body))):
                hmac.digest(bytes(32), bytes(12) + body, "sha256")
        codes_s = (time.perf_counter() - begin_s) / count
        if machines.rank == 0:
            print(
                f"exchange of {nbytes} bytes  {1e6 * statistics.median(took_s):8.0f} us, "
                f"of which codes {1e6 * codes_s:8.1f} us"
            )


def _together(machines: Machines, way: partial) -> None:
    """All machines begin at once."""
    machines.exchange(None)
    way()


def _run_here(options: argparse.Namespace, rank: int) -> bool:
    del rank
    return run(options)


def main() -> None:
    """Run under torchrun, or start the processes."""
    options = arguments()
    if "RANK" in os.environ:
        is_met = run(options)
        sys.exit(options.check and not is_met)
    threads = max(1, (os.cpu_count() or 1) // options.machines)
    are_met = results_of(options.machines, partial(_run_here, options), threads=threads)
    sys.exit(options.check and not all(are_met))


if __name__ == "__main__":
    main()
