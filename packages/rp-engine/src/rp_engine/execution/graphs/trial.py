"""The trial of graphs: a replay and a run by Python, from the same inputs and seeds, give the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import rp_batch
import torch
from rp_recompute.sketch import sketch
from rp_state.block import Block
from rp_transfer import NotCapturable

from rp_engine.device.activations import enter
from rp_engine.device.gradient_sums import GradientSums
from rp_engine.execution.graphs.held_state import Rewound, compare_written
from rp_engine.execution.graphs.layer_graphs import tensors_of

# Runs layers on leaves; returns the tree that the last one returns.
LeavesRun = Callable[[list[Any]], Any]
# The greatest difference, as a part of the norm, between a replay and a run by Python that roundings explain.
_ROUNDINGS, _LEAST, _MOST = 16, 1e-3, 0.25


@dataclass(frozen=True, slots=True)
class GraphTrial:
    """Compares two runs of some layers from `leaves`, whose weights are there.

    `blocks`: the layers' weights, to whose gradients `sums` belong. `backward`: the context of a backward pass;
    None: there is none. `state`: tensors that they write beside what they return.
    """

    device: torch.device
    leaves: Sequence[Any]
    blocks: Sequence[Block]
    sums: GradientSums
    backward: Callable[[], AbstractContextManager[object]] | None
    state: Sequence[torch.Tensor] = ()

    def compare(self, by_python: LeavesRun, replay: LeavesRun) -> None:
        """Raise `NotCapturable` if outputs, gradients or state differ by more than roundings explain.

        The sums begin again then, in any case, and state is what it was.
        """
        grads = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in self.leaves]
        plain = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        before = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in plain]
        state = Rewound(self.state)
        try:
            found, sums = self._traces(*enter(before, grads), by_python)
            change, numbers = state.written(self.device)
            state.set_back()
            again, more = self._traces(*enter(plain, grads), replay)
            change_again, numbers_again = state.written(self.device)
        finally:
            self.sums.begin_again()
            state.set_back()
        compare_written(numbers, numbers_again)
        found, again = [*found, change], [*again, change_again]
        # The replay has added to the same sums.
        again += [both - one for one, both in zip(sums, more, strict=True)]
        least = min(max(_LEAST, _ROUNDINGS * self._eps()), _MOST)
        for one, other in zip([*found, *sums], again, strict=True):
            gap, size = _norm(one - other), _norm(one)
            if gap > least * size:
                part = gap / size if size else gap
                raise NotCapturable(f"a replay differs from a run by Python by {part:.2g} of its norm")

    def _traces(
        self, given: list[Any], grad_leaves: list[Any], run: LeavesRun
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Sketches of the outputs and of the inputs' gradients, and of the sums with those of the weights.

        The incoming gradients are the outputs themselves.
        """
        tensors = tensors_of(rp_batch.flatten(run(given))[0])
        found = [sketch(tensors, self.device)]
        if self.backward is None:
            return found, []
        ends = [one for one in tensors if one.requires_grad and not any(one is leaf for leaf in given)]
        with self.backward():
            torch.autograd.backward(ends, [end.detach().clone() for end in ends])
        found.append(sketch([leaf.grad for leaf in grad_leaves if leaf is not None], self.device))
        return found, [sketch([sums], self.device) for sums in self.sums.of(self.blocks)]

    def _eps(self) -> float:
        dtypes = {leaf.dtype for leaf in tensors_of(self.leaves)} | {block.layout.dtype for block in self.blocks}
        return max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0)


def _norm(values: torch.Tensor) -> float:
    return float(values.square().sum().sqrt())
