"""The autograd node behind `forward`: its backward runs the call's backward tasks, on host tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import rp_batch
import torch
from rp_state.grad_attribute.wanted import TrainedWeights, is_wanted

from rp_engine.device.packet import Packet
from rp_engine.errors import DifferentiatedTwice

Gradients = Sequence[torch.Tensor | None]
# Takes the gradients of all outputs that require grad, and whether the caller wants those of the weights, too.
Backward = Callable[[Gradients, bool], Gradients]


class _Node(torch.autograd.Function):
    """Connects the inputs that require grad to the outputs that do.

    An empty anchor tensor that requires grad is one more input: weights may need gradients where no input does. It
    is no leaf but depends on the weights (`_Anchor`), so that backward can tell whether their gradients are
    wanted, or only those of inputs. `tie`: see `_Tie`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        backward: Backward,
        outputs: Sequence[torch.Tensor],
        tie: Callable[[], torch.Tensor],
        weights: TrainedWeights,
        anchor: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        del inputs
        ctx.launch_backward = backward
        ctx.anchored = anchor.grad_fn
        ctx.weights = weights
        ctx.tie = tie
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        # Not so in ``torch.autograd.grad(loss, inputs)`` and ``loss.backward(inputs=...)``.
        for_weights = is_wanted(ctx.anchored) and ctx.weights.are_wanted(ctx.anchored)
        with torch.no_grad():
            found = ctx.launch_backward(grads, for_weights)
        # Grad mode is on only under ``create_graph=True``.
        if torch.is_grad_enabled():
            found = _once_only(found, [ctx.tie(), *grads])
        return (None, None, None, None, None, *found)


class _Anchor(torch.autograd.Function):
    """An empty tensor that depends on a leaf of its own, weights and masters, which get nothing through it."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.count = len(inputs)
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:
        del grads
        return (None,) * ctx.count


class _Tie(torch.autograd.Function):
    """An empty tensor that depends on all inputs and on the anchor, without the node of the call between."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        del ctx, inputs
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        del ctx, grads
        raise AssertionError("reached only through `_Once`, which raises")


class _Once(torch.autograd.Function):
    """Gradients that must not be differentiated, of what they depend on.

    torch's `once_differentiable` would let them pass as constants where the incoming gradients are constants.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        del ctx
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        del ctx, grads
        raise DifferentiatedTwice(
            "gradients that passed through a RoundPipe model (create_graph=True) must not be differentiated: "
            "its devices keep no graph of their backward. Detach them if they are constants; compute a gradient "
            "penalty inside one layer, on the unwrapped module, or from differences of the model's outputs"
        )


def _once_only(found: Gradients, causes: Sequence[torch.Tensor | None]) -> Gradients:
    """Return the gradients, connected to a node that raises; `causes`: what they depend on."""
    grads = [grad for grad in found if grad is not None]
    with torch.enable_grad():
        joined = iter(_Once.apply(len(grads), *grads, *(cause for cause in causes if cause is not None)))
    return [None if grad is None else next(joined) for grad in found]


def connect(
    packets: Sequence[Packet],
    inputs: Sequence[torch.Tensor],
    backward: Backward,
    weights: TrainedWeights,
) -> list[Any]:
    """Return the output trees of all microbatches, connected to autograd by one node.

    Args:
        packets: the outputs of each microbatch.
        inputs: the user's input tensors that require grad, of all microbatches.
        backward: see `Backward`; returns the gradients of `inputs`.
        weights: what the call trains.
    """
    tracked = [leaf for packet in packets for leaf, grad in zip(packet.leaves, packet.grads, strict=True) if grad]
    joined = iter(_joined(backward, tracked, inputs, weights)) if tracked else iter(())
    return [
        rp_batch.unflatten(
            packet.treedef,
            [next(joined) if grad else leaf for leaf, grad in zip(packet.leaves, packet.grads, strict=True)],
        )
        for packet in packets
    ]


@torch.enable_grad()
def _joined(
    backward: Backward, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], weights: TrainedWeights
) -> tuple[torch.Tensor, ...]:
    anchor = torch.empty(0, requires_grad=True, device="cpu")
    tie = _Tie.apply(anchor, *inputs)
    # Wrapped: it is no input of the node, whose backward would run on to it.
    anchored = _Anchor.apply(anchor, *weights.leaves)
    return _Node.apply(backward, outputs, lambda: tie, weights, anchored, *inputs)
