"""How long it takes to split a tree of 64 tensors into 16 parts and to merge them again, done in several ways.

They are: rp_batch; the same job on torch's pytree, with the same tensor operations; the tensor operations alone,
with no tree; and, to show what of the rest is optree's own, the same job on optree with no rules and no checks.
All take turns in one thread, and the median of each is printed. `--check` fails if rp_batch takes more than half
of the time of torch's pytree.

    python benchmarks/batch.py [--leaves 64] [--parts 16] [--rounds 300] [--check]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

import optree
import rp_batch
import torch
from side_by_side import side_by_side
from torch.utils import _pytree as pytree

OURS, PYTREE, BARE = "rp_batch", "torch's pytree", "the tensor operations alone"


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


def on_torch_pytree(call: Any, cut: Callable[[torch.Tensor], Any]) -> Any:
    leaves, treedef = pytree.tree_flatten(call)
    rows = zip(*map(cut, leaves), strict=True)
    parts = [pytree.tree_unflatten(row, treedef) for row in rows]
    found = [pytree.tree_flatten(part)[0] for part in parts]
    return pytree.tree_unflatten(map(torch.cat, zip(*found, strict=True)), treedef)


def on_optree(call: Any, cut: Callable[[torch.Tensor], Any]) -> Any:
    leaves, treedef = optree.tree_flatten(call)
    parts = [treedef.unflatten(row) for row in zip(*map(cut, leaves), strict=True)]
    found = [treedef.flatten_up_to(part) for part in parts]
    return treedef.unflatten(map(torch.cat, zip(*found, strict=True)))


def on_no_tree(leaves: list[torch.Tensor], cut: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
    columns = [cut(leaf) for leaf in leaves]
    return [torch.cat(column) for column in columns]


def ways(call: Any, parts: int) -> Mapping[str, Callable[[], object]]:
    """The same job, done in several ways."""
    leaves: list[torch.Tensor] = rp_batch.flatten(call)[0]
    sizes = rp_batch.part_sizes(leaves[0].shape[0], parts)

    def cut(tensor: torch.Tensor) -> Any:
        return torch.split_with_sizes(tensor, sizes)

    def tensor_split(tensor: torch.Tensor) -> Any:
        return torch.tensor_split(tensor, parts)

    return {
        OURS: lambda: rp_batch.merge(rp_batch.split(call, parts)),
        PYTREE: lambda: on_torch_pytree(call, cut),
        "torch's pytree, tensor_split": lambda: on_torch_pytree(call, tensor_split),
        "optree, unchecked": lambda: on_optree(call, cut),
        BARE: lambda: on_no_tree(leaves, cut),
        "the same, tensor_split": lambda: on_no_tree(leaves, tensor_split),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", type=int, default=64)
    parser.add_argument("--parts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    call = make_call(asked.leaves, batch=4 * asked.parts)
    medians = side_by_side(ways(call, asked.parts), rounds=asked.rounds, warmup=20)
    for name, seconds in medians.items():
        print(f"{name:30s} {1e3 * seconds:7.3f} ms   rp_batch takes {medians[OURS] / seconds:5.2f} of it")
    return int(asked.check and medians[OURS] > medians[PYTREE] / 2)


if __name__ == "__main__":
    sys.exit(main())
