"""The autograd node behind `forward`: its backward runs the call's backward tasks, on host tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import rp_batch
import torch
from torch.autograd.function import once_differentiable

from roundpipe.device.packet import Packet

Gradients = Sequence[torch.Tensor | None]


class _Node(torch.autograd.Function):
    """Connects the inputs that require grad to the outputs that do.

    An empty anchor tensor that requires grad is one more input: weights may need gradients where no input does.
    """

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
    """Return the output trees of all microbatches, connected to autograd by one node.

    Args:
        packets: the outputs of each microbatch.
        inputs: the user's input tensors that require grad, of all microbatches.
        backward: takes the gradients of all outputs that require grad, returns those of `inputs`.
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
