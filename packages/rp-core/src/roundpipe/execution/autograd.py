"""The autograd node behind `forward`: host tensors in, host tensors out, and a run of backward tasks between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import rp_batch
import torch
from torch.autograd.function import once_differentiable

from roundpipe.device.packet import Packet

Gradients = Sequence[torch.Tensor | None]


class _Node(torch.autograd.Function):
    """Takes the inputs that require grad (and an anchor that does, for the weights), returns such outputs."""

    @staticmethod
    def forward(
        ctx: Any,
        backward: Callable[[Gradients], Gradients],
        outputs: Sequence[torch.Tensor],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        del inputs
        ctx.launch_backward = backward
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        return (None, None, None, *ctx.launch_backward(grads))


def connect(
    packets: Sequence[Packet],
    inputs: Sequence[torch.Tensor],
    backward: Callable[[Gradients], Gradients],
) -> list[Any]:
    """The output trees of all microbatches, joined to autograd by one node.

    Args:
        packets: the outputs of each microbatch.
        inputs: the user's input tensors that require grad, of all microbatches.
        backward: from gradients of all outputs that require grad to those of `inputs`.
    """
    tracked = [leaf for packet in packets for leaf, grad in zip(packet.leaves, packet.grads, strict=True) if grad]
    anchor = torch.empty(0, requires_grad=True, device="cpu")
    with torch.enable_grad():
        joined = iter(_Node.apply(backward, tracked, anchor, *inputs)) if tracked else iter(())
    return [
        rp_batch.unflatten(
            packet.treedef,
            [next(joined) if grad else leaf for leaf, grad in zip(packet.leaves, packet.grads, strict=True)],
        )
        for packet in packets
    ]
