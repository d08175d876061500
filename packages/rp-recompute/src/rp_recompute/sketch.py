"""A few numbers of an output, which differ about as much as outputs do: for comparing it where it is not kept."""

from __future__ import annotations

from functools import cache
from typing import Any

import rp_batch
import torch

from rp_recompute.differences import is_lazy

# Random projections (Johnson and Lindenstrauss, 1984): the norm of the difference of two sketches is that of the
# outputs' difference, up to some 25 %. Outputs are cut into rows of a length that no hidden size divides.
_PROJECTIONS, _ROW = 8, 8191
# Elements that are projected at once.
_PIECE = 512 * _ROW


@torch.no_grad()
def sketch(output: Any, device: torch.device) -> torch.Tensor:
    """Projections of the floating-point tensors of an output: (8,) float32."""
    total: Any = torch.zeros(_PROJECTIONS, device=device)
    for leaf in rp_batch.flatten(output)[0]:
        if isinstance(leaf, torch.Tensor) and not is_lazy(leaf) and leaf.is_floating_point():
            total = total + _projected(leaf.detach(), device)
    return total


def _projected(leaf: Any, device: torch.device) -> torch.Tensor:
    with torch.autocast(device.type, enabled=False):
        found: Any = torch.zeros(_PROJECTIONS, device=device)
        # Infinities and masks' least numbers would hide all else.
        for number, piece in enumerate(leaf.flatten().split(_PIECE)):
            values = piece.float().nan_to_num(0.0, 0.0, 0.0).clamp(-1e15, 1e15)
            whole = len(values) // _ROW * _ROW
            matrix, signs = _matrix(device), _signs(device)
            rows = values[:whole].view(-1, _ROW) @ matrix
            found = found + (signs[: len(rows), None] * rows).sum(0) * (1 - 2 * (number % 2))
            found = found + values[whole:] @ matrix[: len(values) - whole]
        return found


@cache
def _matrix(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(_ROW, _PROJECTIONS, generator=generator) / _PROJECTIONS**0.5).to(device)


@cache
def _signs(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(2, (_PIECE // _ROW,), generator=generator) * 2.0 - 1).to(device)
