"""Which weights' gradients a backward pass wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rp_errors import RoundPipeError


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
        """Return whether a backward pass wants their gradients. `anchored`: a node that it runs, which depends on
        a leaf of its own and on `leaves`.

        Raises `RoundPipeError` if it wants some alone, or those of masters, or wants them returned.
        """
        own, *nodes = (node for node, _ in anchored.next_functions)
        # Nobody else has that leaf: a pass that reaches it was given no inputs, and wants all.
        if is_wanted(own):
            return True
        try:
            wanted, of_masters = (
                sum(map(is_wanted, some)) for some in (nodes[: self._num_trained], nodes[self._num_trained :])
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
                f"backward(inputs=...) names {wanted} of {self._num_trained} weights that model {self._name!r} "
                "trains, but their gradients come together: name all, or none, or freeze the others "
                "(requires_grad_(False)) before the forward"
            )
        return True


def is_wanted(node: Any) -> bool:
    """Return whether the backward pass under way runs this node, also for the sake of others. In a backward only.

    As torch's `register_multi_grad_hook` asks. Raises `RuntimeError` for a leaf whose gradient is to be returned.
    """
    return torch._C._will_engine_execute_node(node)  # pyright: ignore[reportPrivateUsage]
