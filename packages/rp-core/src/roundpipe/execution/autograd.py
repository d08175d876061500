"""The autograd node behind `forward`: its backward runs the call's backward tasks, on host tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import rp_batch
import torch
from torch.autograd.function import once_differentiable

from roundpipe.device.packet import Packet

Gradients = Sequence[torch.Tensor | None]
# Takes the gradients of all outputs that require grad, and whether the caller wants those of the weights, too.
Backward = Callable[[Gradients, bool], Gradients]


class _Node(torch.autograd.Function):
    """Connects the inputs that require grad to the outputs that do.

    An empty anchor tensor that requires grad is one more input: weights may need gradients where no input does. It
    is no leaf, so that backward can tell whether the weights' gradients are wanted, or only those of inputs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        backward: Backward,
        outputs: Sequence[torch.Tensor],
        anchor: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        del inputs
        ctx.launch_backward = backward
        ctx.anchored = anchor.grad_fn
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        # Not so in ``torch.autograd.grad(loss, inputs)`` and ``loss.backward(inputs=...)``.
        for_weights = torch._C._will_engine_execute_node(ctx.anchored)  # pyright: ignore[reportPrivateUsage] - as torch's `register_multi_grad_hook` asks
        return (None, None, None, *ctx.launch_backward(grads, for_weights))


def connect(
    packets: Sequence[Packet],
    inputs: Sequence[torch.Tensor],
    backward: Backward,
) -> list[Any]:
    """Return the output trees of all microbatches, connected to autograd by one node.

    Args:
        packets: the outputs of each microbatch.
        inputs: the user's input tensors that require grad, of all microbatches.
        backward: see `Backward`; returns the gradients of `inputs`.
    """
    tracked = [leaf for packet in packets for leaf, grad in zip(packet.leaves, packet.grads, strict=True) if grad]
    anchor = torch.empty(0, requires_grad=True, device="cpu")
    with torch.enable_grad():
        joined = iter(_Node.apply(backward, tracked, anchor.clone(), *inputs)) if tracked else iter(())
    return [
        rp_batch.unflatten(
            packet.treedef,
            [next(joined) if grad else leaf for leaf, grad in zip(packet.leaves, packet.grads, strict=True)],
        )
        for packet in packets
    ]
