"""Comparison, in one call of many, of what layers recompute with what their forward gave.

Of each output a few numbers are kept, which differ about as much as the outputs do. They take two small copies,
and the verdict is read when the call is over: nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import rp_batch
import torch

from rp_engine.device.activations import Origins, PacketCopier
from rp_engine.device.packet import Slot
from rp_engine.errors import ImpureLayer
from rp_engine.execution.call import Call, Recomputed
from rp_engine.execution.lazy import is_lazy
from rp_engine.execution.shortage.slots import TaskSlots

# Random projections (Johnson and Lindenstrauss, 1984): the norm of the difference of two sketches is that of the
# outputs' difference, up to some 25 %. Outputs are cut into rows of a length that no hidden size divides.
_PROJECTIONS, _ROW = 8, 8191
# Elements that are projected at once.
_PIECE = 512 * _ROW
# The least relative difference that counts, beside roundings of the least precise dtype: forward may have run on
# another device, and with other kernels.
_LEAST, _ROUNDINGS, _MOST = 1e-3, 16, 0.25

_MESSAGE = (
    "{0} did not compute the same again: what it recomputed for its backward differs from what its forward gave "
    "by {1:.2g} of its norm (microbatch {2}), so gradients of this call are those of another network than its "
    "loss's. Something has changed since its first calls, in which it was examined. Likely causes: a random "
    "generator of its own, a counter or other state, also in a closure or a global; the time. Drop these "
    "gradients (zero_grad) and mend the layer"
)


class LaterComparison:
    """Notes outputs of a task's layers in their forward, and compares them when they are recomputed."""

    def __init__(self, call: Call, copier: PacketCopier, slots: TaskSlots, device: torch.device) -> None:
        self._call = call
        self._copier = copier
        self._slots = slots
        self._device = device

    def see(self, layer: int, microbatch: int, output: Any, dtype: torch.dtype, *, recomputes: bool) -> None:
        """Note the output of a forward that will be recomputed; `recomputes`: compare a recomputation with it."""
        if not recomputes:
            if self._slots.will_recompute(layer, microbatch):
                self._slots.keep(Slot("sketch", layer, microbatch), self._send(sketch(output, self._device)))
            return
        packet = self._slots.fetch(Slot("sketch", layer, microbatch))
        if packet is not None:
            (before,) = self._copier.bring(packet)
            gap = torch.stack([(sketch(output, self._device) - before).norm(), before.norm()])
            least = max(_LEAST, min(_ROUNDINGS * torch.finfo(dtype).eps, _MOST))
            self._call.recomputed.append(Recomputed(layer, microbatch, least, self._send(gap)))

    def _send(self, numbers: torch.Tensor) -> Any:
        return self._copier.send(None, [numbers], [False], Origins())


def refuse(call: Call, recomputed: Sequence[Recomputed]) -> ImpureLayer | None:
    """The error of the first layer that recomputed something else; the packets' numbers are on the host."""
    for each in sorted(recomputed, key=lambda one: (one.microbatch, one.layer)):
        gap, size = map(float, each.packet.leaves[0])
        # NaN is no difference: it was NaN before, or it would be one anyway.
        if gap > each.least * size:
            number = each.microbatch + call.first_microbatch
            return ImpureLayer(_MESSAGE.format(call.where(each.layer), gap / size if size else gap, number))
    return None


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
