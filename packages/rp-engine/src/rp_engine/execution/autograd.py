"""The autograd node behind `forward`: its backward runs the call's backward tasks, on host tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rp_batch
import torch

from rp_engine.device.packet import Packet
from rp_engine.errors import DifferentiatedTwice, RoundPipeError

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
        for_weights = _is_wanted(ctx.anchored) and ctx.weights.are_wanted(ctx.anchored)
        with torch.no_grad():
            found = ctx.launch_backward(grads, for_weights)
        # Grad mode is on only under ``create_graph=True``.
        if torch.is_grad_enabled():
            found = _once_only(found, [ctx.tie(), *grads])
        return (None, None, None, None, None, *found)


class TrainedWeights:
    """The parameters that a call trains, as autograd knows them. `name`: the model's.

    `masters`: of those that have one, which no graph depends on. A gradient that is wanted of some alone, or that
    is to be returned, cannot come from devices, which add those of all parameters to what they have.
    """

    def __init__(
        self, name: str, parameters: Sequence[torch.Tensor], masters: Mapping[torch.Tensor, torch.Tensor]
    ) -> None:
        self._name = name
        trained = [each for each in parameters if each.requires_grad and each.is_leaf]
        self._num_trained = len(trained)
        self.leaves = [*trained, *(masters[each] for each in trained if each in masters)]

    def are_wanted(self, anchored: Any) -> bool:
        """Return whether a backward pass wants their gradients. `anchored`: the node of `_Anchor`, which it runs.

        Raises `RoundPipeError` if it wants some alone, or those of masters, or wants them returned.
        """
        own, *nodes = (node for node, _ in anchored.next_functions)
        # Nobody else has that leaf: a pass that reaches it was given no inputs, and wants all.
        if _is_wanted(own):
            return True
        try:
            wanted, of_masters = (
                sum(map(_is_wanted, some)) for some in (nodes[: self._num_trained], nodes[self._num_trained :])
            )
        except RuntimeError:
            raise RoundPipeError(
                f"torch.autograd.grad was asked for gradients of weights of model {self._name!r}, which it cannot "
                "return: call backward(), then synchronize(), and read .grad of the parameters"
            ) from None
        if of_masters > wanted:
            raise RoundPipeError(
                f"backward(inputs=...) names optim_parameters() of model {self._name!r}, which its loss does not "
                "depend on: name the model's own, as in backward(inputs=list(model.model.parameters()))"
            )
        if 0 < wanted < self._num_trained:
            raise RoundPipeError(
                f"backward(inputs=...) names {wanted} of {self._num_trained} weights that model {self._name!r} trains, "
                "but their gradients come together: name all, or none, or freeze the others "
                "(requires_grad_(False)) before the forward"
            )
        return True


def _is_wanted(node: Any) -> bool:
    # As torch's `register_multi_grad_hook` asks.
    return torch._C._will_engine_execute_node(node)  # pyright: ignore[reportPrivateUsage]


class _Anchor(torch.autograd.Function):
    """An empty tensor that depends on a leaf of its own, and on weights and masters, which get nothing through it."""

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
