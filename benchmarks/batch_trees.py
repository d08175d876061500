"""How long rp_batch takes to split a tree of 64 tensors into 16 parts and to merge them again.

Three ways of the same job: rp_batch; the same few lines on torch's pytree; and the bare tensor operations, with no
tree at all. All of them run in turn, many times, and the middle time of each is printed. Run it with

    python benchmarks/batch_trees.py [--leaves 64] [--parts 16] [--rounds 300] [--check]

`--check` ends with an error if rp_batch takes more than half of the time of torch's pytree.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import rp_batch
import torch
from torch.utils import _pytree as pytree

Job = Callable[[Any, int], Any]


def make_call(leaves: int, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Keyword arguments as a model with many layers takes them: four tensors in each of many dicts in a list."""
    layers = [
        {
            "key": torch.zeros(batch, 4),
            "value": torch.zeros(batch, 4),
            "more": (torch.zeros(batch), torch.ones(batch)),
        }
        for _ in range(leaves // 4)
    ]
    return (), {"layers": layers}


def with_rp_batch(call: Any, parts: int) -> Any:
    return rp_batch.merge(rp_batch.split(call, parts))


def with_torch_pytree(call: Any, parts: int) -> Any:
    leaves, treedef = pytree.tree_flatten(call)
    columns = [torch.tensor_split(leaf, parts) for leaf in leaves]
    split = [pytree.tree_unflatten(row, treedef) for row in zip(*columns, strict=True)]
    rows = [pytree.tree_flatten(part)[0] for part in split]
    return pytree.tree_unflatten([torch.cat(column) for column in zip(*rows, strict=True)], treedef)


def with_torch_microbatches(call: Any, parts: int) -> Any:
    from torch.distributed.pipelining import microbatch

    args, kwargs = call
    _, split = microbatch.split_args_kwargs_into_chunks(args, kwargs, parts)
    return microbatch.merge_chunks(split, None)


def with_no_tree(call: Any, parts: int) -> Any:
    leaves: list[torch.Tensor] = rp_batch.flatten(call)[0]
    sizes = rp_batch.part_sizes(leaves[0].shape[0], parts)
    started = time.perf_counter()
    _ = split_and_merge(leaves, sizes)
    return time.perf_counter() - started


def split_and_merge(leaves: list[torch.Tensor], sizes: tuple[int, ...]) -> list[torch.Tensor]:
    columns = [torch.split_with_sizes(leaf, sizes) for leaf in leaves]
    return [torch.cat(column) for column in columns]


def seconds(job: Job, call: Any, parts: int) -> float:
    started = time.perf_counter()
    result = job(call, parts)
    return result if isinstance(result, float) else time.perf_counter() - started


def measure(jobs: dict[str, Job], call: Any, parts: int, rounds: int) -> dict[str, float]:
    """The middle of many times of each job, in milliseconds; the jobs take turns and meet the same noise."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            times[name].append(1e3 * seconds(job, call, parts))
    return {name: median(found) for name, found in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", type=int, default=64)
    parser.add_argument("--parts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    call = make_call(asked.leaves, batch=4 * asked.parts)
    jobs: dict[str, Job] = {
        "rp_batch": with_rp_batch,
        "torch pytree": with_torch_pytree,
        "torch microbatches": with_torch_microbatches,
        "tensor operations": with_no_tree,
    }
    measure(jobs, call, asked.parts, rounds=20)
    found = measure(jobs, call, asked.parts, asked.rounds)
    for name, ms in found.items():
        print(f"{name:20s} {ms:7.3f} ms  {ms / found['rp_batch']:5.2f} of rp_batch")
    return int(asked.check and found["rp_batch"] > found["torch pytree"] / 2)


if __name__ == "__main__":
    sys.exit(main())
