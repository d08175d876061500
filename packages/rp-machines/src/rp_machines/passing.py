"""Tensors that every machine has a part of, such as activations of its own microbatches, passed to all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rp_engine.connecting import Rows
from rp_engine.errors import AloneOnly

from rp_machines.group import MachineGroup

# Where one tensor begins in a machine's bytes: any dtype can be viewed there.
_ALIGNED = 16


def rows_of_all(group: MachineGroup, kind: str, rows: Rows, facts: Mapping[str, Any]) -> list[list[Any]]:
    """The rows of all machines, in the order of ranks; on the launcher's thread.

    Args:
        rows: tensors on the host, and plain values: None, numbers and text.
        facts: what must be the same on all machines.

    Raises as `Talk.agree` does, and `AloneOnly` for other values.
    """
    own = [[_described(leaf) for leaf in row] for row in rows]
    told = group.calls.agree(kind, facts, own)
    memory = [torch.empty(_nbytes(each), dtype=torch.uint8, device="cpu") for each in told]
    for tensor, place in zip(_tensors(rows), _views(own, memory[group.rank]), strict=True):
        place.copy_(tensor)
    for work in group.pass_around(memory):
        work.wait()
    return [
        list(row) if rank == group.rank else _read(row, places)
        for rank, each in enumerate(told)
        for places in [iter(_views(each, memory[rank]))]
        for row in (rows if rank == group.rank else each)
    ]


def _described(leaf: Any) -> list[Any]:
    """A leaf in JSON: a tensor by dtype and shape, a plain value as it is."""
    if isinstance(leaf, torch.Tensor):
        return [str(leaf.dtype).removeprefix("torch."), list(leaf.shape)]
    if not isinstance(leaf, bool | int | float | str | None):
        raise AloneOnly(
            f"a {type(leaf).__name__} leaves a layer, which cannot be passed to other machines; let layers return "
            "tensors, numbers and text, train by forward_backward, or on one machine"
        )
    return [leaf]


def _tensors(rows: Rows) -> list[torch.Tensor]:
    return [leaf.detach() for row in rows for leaf in row if isinstance(leaf, torch.Tensor)]


def _spans(rows: Rows) -> list[tuple[int, torch.dtype, list[int], int]]:
    """Where each tensor begins, what it is, and where the next may begin."""
    found: list[tuple[int, torch.dtype, list[int], int]] = []
    begin = 0
    for name, shape in (leaf for row in rows for leaf in row if len(leaf) == 2):
        dtype: torch.dtype = getattr(torch, name)
        size = torch.Size(shape).numel() * dtype.itemsize
        found.append((begin, dtype, shape, begin + size))
        begin += -(-size // _ALIGNED) * _ALIGNED
    return found


def _nbytes(rows: Rows) -> int:
    return max((stop for *_, stop in _spans(rows)), default=0)


def _views(rows: Rows, memory: torch.Tensor) -> list[torch.Tensor]:
    return [memory[begin:stop].view(dtype).view(shape) for begin, dtype, shape, stop in _spans(rows)]


def _read(row: Sequence[Any], places: Any) -> list[Any]:
    # Any: an iterator over tensors.
    return [next(places) if len(leaf) == 2 else leaf[0] for leaf in row]
