"""Comparison, in one call of many, of what layers recompute with what their forward gave.

Of each output a few numbers are kept, which differ about as much as the outputs do. They take two small copies,
and the verdict is read when the call is over: nothing waits for it. Likewise for whether weights were written, or
buffers past their version counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from rp_recompute.bits import names_of, sums_of_bits
from rp_recompute.sketch import sketch
from rp_state.block import Block
from rp_state.modules.content import WRITTEN

from rp_engine.device.activations import Origins, PacketCopier
from rp_engine.device.packet import Slot
from rp_engine.errors import ImpureLayer
from rp_engine.execution.call import Call, Recomputed, Rewritten
from rp_engine.execution.shortage.task_slots import TaskSlots

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

_LATE = (
    "{0} wrote its buffer {1!r} past torch's version counters, as by .data, which it did not in its first calls, "
    "so what it wrote is lost; write it in place, as in self.{1}.copy_(new)"
)


class SampledComparison:
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

    def see_weights(self, layer: int, names: Iterable[str], differences: torch.Tensor) -> None:
        """Note by how much the sums of a layer's weights differ after it has run, (names,)."""
        words = [WRITTEN.format(layer, name) for name in names]
        self._call.rewritten.append(Rewritten(layer, words, self._send(differences)))

    def see_buffers(self, layer: int, block: Block, before: torch.Tensor, after: torch.Tensor) -> None:
        """Note whether a layer has written buffers, (numel,), although nothing else has shown that."""
        names = {id(one): name for name, one in self._call.state.layers[layer].module.named_buffers()}
        words = [_LATE.format(self._call.where(layer), names.get(id(one), "?")) for one in block.tensors]
        old, new = (sums_of_bits(block.layout.views(memory), self._device) for memory in (before, after))
        self._call.rewritten.append(Rewritten(layer, words, self._send(new - old)))

    def _send(self, numbers: torch.Tensor) -> Any:
        return self._copier.send(None, [numbers], [False], Origins())


def refusals(call: Call, recomputed: Sequence[Recomputed], rewritten: Sequence[Rewritten]) -> list[BaseException]:
    """The errors of layers that wrote what is lost, or recomputed something else; all numbers are on the host."""
    in_order = sorted(recomputed, key=lambda one: (one.microbatch, one.layer))
    writes = [
        TypeError(words)
        for each in sorted(rewritten, key=lambda one: one.layer)
        for words in names_of(each.words, each.packet.leaves[0])
    ]
    return [*writes, *(error for each in in_order for error in _refusal(call, each))]


def _refusal(call: Call, each: Recomputed) -> list[ImpureLayer]:
    gap, size = map(float, each.packet.leaves[0])
    # NaN is no difference: it was NaN before, or it would be one anyway.
    if not gap > each.least * size:
        return []
    number = each.microbatch + call.first_microbatch
    return [ImpureLayer(_MESSAGE.format(call.where(each.layer), gap / size if size else gap, number))]
