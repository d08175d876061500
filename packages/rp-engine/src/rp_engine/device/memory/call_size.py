"""How large a call is: its microbatches, and the rows of the largest one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import rp_batch
import torch


@dataclass(frozen=True, slots=True)
class CallSize:
    """The number of a call's microbatches, and the rows of the largest, see `rows_of`."""

    microbatches: int
    rows: int

    @classmethod
    def of(cls, leaves: Sequence[Iterable[Any]]) -> CallSize:
        """The size of a call whose microbatches have these leaves.

        >>> CallSize.of([[torch.zeros(4, 7, 5)], [torch.zeros(3, 7, 5)]])
        CallSize(microbatches=2, rows=28)
        """
        return cls(len(leaves), max((_rows(leaf) for part in leaves for leaf in part), default=1))


def rows_of(parts: Sequence[Any]) -> int:
    """Return the rows of the largest microbatch: elements of an input, or vectors of a floating-point one.

    >>> rows_of([(torch.zeros(4, 7, dtype=torch.int64),), (torch.zeros(3, 7, dtype=torch.int64),)])
    28
    >>> rows_of([(torch.zeros(4, 7, 5),)])
    28
    """
    return CallSize.of([rp_batch.flatten(tuple(part))[0] for part in parts]).rows


def _rows(leaf: Any) -> int:
    if not isinstance(leaf, torch.Tensor):
        return 1
    width = leaf.shape[-1] if leaf.ndim and leaf.is_floating_point() else 1
    return max(leaf.numel() // max(width, 1), 1)
